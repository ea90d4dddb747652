"""Where sentences end: a small rule for texts of any script, without a model or a dictionary.

A sentence ends after a mark that ends sentences (Unicode's `Sentence_Terminal`: full stops of Latin, CJK, Arabic,
Devanagari, Ethiopic, …) and the quotation marks and brackets that close after it, unless a small letter follows. A full
stop of Latin texts is more: after an initial, an ordinal, an abbreviation, it ends nothing. In doubt no sentence ends:
an end that is missed makes a longer sentence, and a false one cuts a sentence in two.
"""

_OPENERS = "\"'“„‘‚«‹([{¿¡「『【（〈《"
_CLOSERS = "\"'”’»›)]}」』】）〉》"
_CJK = "。！？｡．"  # no space follows them, and no small letter
_ENDS = ".!?…‽؟۔։।॥።፧။។៕" + _CJK
_END, _CJK_END, _MAY_END = frozenset(_ENDS), frozenset(_CJK), frozenset(_ENDS + _CLOSERS)
_TITLES = "mr mrs ms mx dr prof st ste sr sra rev hon fr gen col lt sgt capt cmdr adm maj gov sen rep pres mme mlle hr"
_IN_REFERENCES = "no nos nr vol vols fig figs ca cf approx pp ed eds trans vs al sec ch art para bd bzw vgl geb jh núm"
_MONTHS_AND_PLACES = "jan feb mar apr jun jul aug sep sept oct okt nov dec dez mt ft ave blvd dept"
_ABBREVIATIONS = frozenset(f"{_TITLES} {_IN_REFERENCES} {_MONTHS_AND_PLACES}".split())


def ends_sentence(word: str, following: str) -> bool:
    """Whether a sentence ends between two words that whitespace separates; neither is empty or has whitespace.

    >>> ends_sentence("(ended.)", "The"), ends_sentence("Dr.", "Jones"), ends_sentence("approx.", "three")
    (True, False, False)
    """
    if word[-1] not in _MAY_END:
        return False
    body = word.rstrip(_CLOSERS)
    if not body or body[-1] not in _END:
        return False
    if following.lstrip(_OPENERS)[:1].islower():
        return False
    return body[-1] != "." or not _is_abbreviation(body.rstrip(".").lstrip(_OPENERS), body)


def ends_run(piece: str) -> bool:
    """Whether a sentence ends after a piece of a text without spaces, such as Japanese."""
    return piece[-1] in _MAY_END and piece.rstrip(_CLOSERS)[-1:] in _CJK_END


def ends_line(word: str, following: str) -> bool:
    """Whether a sentence ends between the last word of a line and the first of the next: not in a wrapped sentence."""
    return not following[0].islower() or word.rstrip(_CLOSERS)[-1:] in _END


def _is_abbreviation(name: str, body: str) -> bool:
    if body.endswith(".."):
        return False  # an ellipsis
    initial = len(name) == 1 and name.isalpha()
    ordinal = name.isdigit() and len(name) <= 2
    dotted = "." in name and all(len(part) <= 2 for part in name.split("."))  # U.S., e.g., p.m.
    return initial or ordinal or dotted or name.casefold() in _ABBREVIATIONS
