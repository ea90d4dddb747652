"""Convert the remaining markup, after templates, tables and links, to lines of plain text.

Each step is one regular expression over a section and runs in linear time: where two repetitions
may match the same characters, the first is possessive (`*+`), so that it does not backtrack.
"""

import html
import re
import sys
from html.entities import html5 as html_entities

from rag_model.corpus.language_names import list_behaviour_switches
from rag_model.corpus.markup.literal import GAP, protect, protect_character, remove_marks, reveal
from rag_model.corpus.markup.tex import format_superscript

MAX_LEFTOVERS = 10  # maximum passes over unpaired brackets; real pages need one

_BLOCK_NAMES = (
    "blockquote br caption center dd div dl dt h1 h2 h3 h4 h5 h6 hr li ol p poem section table tbody td th thead tr ul"
)
_INLINE_NAMES = (
    "a abbr b bdi bdo big ce chem cite code data del dfn em font gallery i includeonly ins kbd "
    "mark math nobr noinclude onlyinclude pre q rb rbc ref references rp rt rtc ruby s samp "
    "small source span strike strong sub sup syntaxhighlight time timeline tt u var wbr"
)
_BLOCK_TAGS = frozenset(_BLOCK_NAMES.split())
_TAG = re.compile(rf"</?({'|'.join([*_BLOCK_NAMES.split(), *_INLINE_NAMES.split()])})(?=[\s/>])[^<>]*>", re.IGNORECASE)
_HIDDEN_ELEMENT = re.compile(
    r"<(span|div|p|small)\b(?=[^<>]*?display:\s*none)[^<>]*+>(?:[^<>]|<(?!/?\1\b)[^<>]*+>)*+</\1>", re.IGNORECASE
)
_SUPERSCRIPT = re.compile(r"<sup[^<>]*>([^<>]*)</sup>", re.IGNORECASE)
_ORDINALS = frozenset({"st", "nd", "rd", "th", "er", "re", "e", "o", "a"})
_EXTERNAL_LINK = re.compile(
    r"\[(?:(?:(?:https?|ftps?|ircs?|gopher|git|mms|nntp|redis|sftp|ssh|svn|telnet|worldwind):)?//|"
    r"(?:bitcoin|geo|magnet|mailto|matrix|news|sips?|sms|tel|urn|xmpp):)(?=[^\s\]<>\"])"
    r"(?:\[[\da-f:.]++\])?(?:[^\s\[\]<>\"'&]|'(?!')|&(?![lg]t;))*+"  # address up to the next markup
    # The words may contain `[`, and HTML tags in the words may also contain `]`.
    r"((?:[^\]\n<]|<(?:/?[a-z][^<>\n]*+>)?)*+)\]",
    re.IGNORECASE,
)
_QUOTES = re.compile(r"('{2,})")
_SWITCH = re.compile(r"__([^\W\d_]\w{1,60}?)__")
_ENTITY = re.compile(r"&(?:#0*+(\d{1,7})|#[xX]0*+([0-9a-fA-F]{1,6})|(\w{2,32}));")
# The characters that MediaWiki accepts as numeric entities; it shows other entities as written.
_ENTITY_CHARACTER = re.compile("[\t\n -~\u00a0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_RIGHT_TO_LEFT_MARKS = ("רלמ", "رلم")  # names of entities that only MediaWiki has
# A term and its meaning: the first colon that is not in a link or an address divides them.
_TERM = re.compile(
    r"^([:*#;]++)(?<=;) *+((?:[^\n:]|://(?:[^\s:]|:(?!\s))*+|"
    r"(?:(?<=\bmailto)|(?<=\bnews)|(?<=\burn)|(?<=\btel)|(?<=\bsip)):[^\s:](?:[^\s:]|:(?!\s))*+)*+)(:++) *+",
    re.MULTILINE,
)
_LIST_MARKS = re.compile(r"^(?:[*#:;]++| ++[*#:;]*+) *+", re.MULTILINE)
_RULE = re.compile(r"^-{4,}", re.MULTILINE)
_VARIANT_START = re.compile(r"-\{(?=\w[^{}\n]*\}-)")
_CELLS = re.compile(r"^[ \t]*(?:\||\{\||!.*(?:\||!!)).*$", re.MULTILINE)
# Used if there is no unclosed table, because other lines that start with `|` are then text.
_STRAY_ROWS = re.compile(r"^[ \t]*\|[-+].*$", re.MULTILINE)
_LEFTOVER = re.compile(r"\{\{|\}\}|\{\||\|\}|<!--|</?ref\b[^<>\n]{0,80}>?")
_BRACKET = re.compile(r"[{}<]")  # without these characters there is no unpaired markup
_VARIANT = re.compile(r"-\{([^{}]*)\}-")
_MAX_NESTED_VARIANTS = 3
# Languages whose wikis convert between scripts, each with its variants in order of preference for
# readers who chose no variant: MediaWiki's fallbacks first, then the other variants.
_VARIANTS = {
    "ban": "ban ban-bali ban-x-dharma ban-x-palmleaf ban-x-pku", "crh": "crh crh-latn crh-cyrl",
    "gan": "gan gan-hans gan-hant", "iu": "iu ike-cans ike-latn",
    "kk": "kk kk-cyrl kk-latn kk-arab kk-kz kk-tr kk-cn", "ku": "ku ku-latn ku-arab", "mni": "mni mni-beng",
    "sh": "sh-latn sh-cyrl", "shi": "shi shi-latn shi-tfng", "sr": "sr sr-ec sr-el", "tg": "tg tg-latn",
    "tly": "tly tly-cyrl", "uz": "uz uz-latn uz-cyrl", "wuu": "wuu wuu-hans wuu-hant", "zgh": "zgh zgh-latn",
    "zh": "zh zh-hans zh-hant zh-cn zh-tw zh-hk zh-sg zh-mo zh-my",
}  # fmt: skip
_VARIANT_RANKS = {variant: rank for names in _VARIANTS.values() for rank, variant in enumerate(names.split())}
_VARIANT_FLAGS = re.compile(r"[\w;+\- ]*\|")
_ANY_VARIANT = "|".join(map(re.escape, _VARIANT_RANKS))
# A semicolon between two forms of a text, but not one that ends an entity (`&amp;`).
_FORM_END = re.compile(rf"(?<!&amp)(?<!&lt)(?<!&gt)(?<!&nbsp);\s*(?=(?:[^;:]*?=>\s*)?(?:{_ANY_VARIANT})\s*:|\s*$)")
_FORM = re.compile(rf"\s*(?:[^:]*?=>\s*)?({_ANY_VARIANT})\s*:(.*)", re.DOTALL)

# Each pattern starts with a literal or a character class, so that `re` finds candidates faster.
_INVISIBLE = re.compile("[\u00ad\u200b\u200e\u200f\u2060\ufeff]")
_BLANK = re.compile("[\t\r\f\v\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]")
_BLANKS = re.compile("  +")
_LINE_BREAKS = re.compile(r"\n\s+")
# empty brackets, except the brackets of a call such as `f()`
_EMPTY_BRACKETS = re.compile(r"\((?:(?: ?[,;:])+ ?| |(?<!\w\())\)")
_EMPTY_GAP = re.compile(rf"\((?=[ ,;:]*+{GAP})[{GAP} ,;:]*+\)")
_OPENING = re.compile(r"\((?: ?[,;]| )+ ?")
_CLOSING = re.compile(r"[ ,;][ ,;]{0,8}\)")
_EMPTY_WIDE_BRACKETS = re.compile(r"（[ 、，；：,;:]*）")
_WIDE_OPENING = re.compile(r"（[ 、，；,;]+")
_WIDE_CLOSING = re.compile(r"[ 、，；,;]{1,9}）")
_PUNCTUATION = frozenset(",.;:)\n、，。；：）")
_GAPS = re.compile(f"{GAP}[{GAP} ]*")
# A gap between two commas or stops, of which one remains: `A,{{ref}}, B`.
_COMMA_GAP = re.compile(rf"[,;、，] ?{GAP}[{GAP} ]*(?=[,.;:)、，。；：）])")


def to_plain_text(text: str) -> str:
    """Convert a section's expanded wikitext to lines of text, one per paragraph or list item."""
    if "[" in text:
        text = _render_external_links(text)
    if "''" in text:
        text = render_apostrophes(text)
    if "__" in text:
        text = _SWITCH.sub(_render_switch, text)
    if "<" in text:
        text = _SUPERSCRIPT.sub(_render_superscript, _HIDDEN_ELEMENT.sub("", text))
        text = _TAG.sub(lambda tag: "\n" if tag[1].lower() in _BLOCK_TAGS else "", text)
    if "-{" in text:
        text = render_variants(text)
    cell_pattern = _CELLS if "{|" in text else _STRAY_ROWS
    text = _LIST_MARKS.sub("", _TERM.sub(_render_term, _RULE.sub(GAP, cell_pattern.sub("", text))))
    if GAP in text:
        for punctuation in ".,;":  # authors write `thinking .<ref>` with a space
            text = text.replace(f" {punctuation}{GAP}", f"{punctuation}{GAP}")
        text = _close_gaps(_EMPTY_GAP.sub(GAP, text))
    if "&" in text:
        text = _ENTITY.sub(_decode_entity, text)
    for _ in range(MAX_LEFTOVERS):
        text = _remove_traces(_LEFTOVER.sub("", text))
        if not _LEFTOVER.search(text):  # the removal created no new brackets
            return reveal(text)
    # The brackets are nested so that each removal creates new ones: remove all of them.
    return reveal(_remove_traces(_BRACKET.sub("", text)))


SENTENCE_ENDS = ".!?…。！？؟۔।॥։"  # for a character class of a regular expression
_LIST_ITEM = re.compile(rf"^[ \t{GAP}]*(?:[*#:;]|<(?:ul|ol|dl|li|dd|dt)\b).*$", re.MULTILINE | re.IGNORECASE)
_SENTENCE_END = re.compile(rf"[{SENTENCE_ENDS}][\"'”’»›」』)\]]{{0,4}}$")
_REFERENCE_MARK = re.compile(r"\b(?:ISBN|ISSN|OCLC|doi)\b|https?:|\b(?:pp?|[Ss]|[Сс])\. ?\d")
_CITATION = re.compile(r"([^\d]{3,150}?)(?:[.,:;] |\()(?:1[4-9]|20)\d\d[a-z]?\)?[.,:]")
_WORD = re.compile(r"[^\W\d_]+")
_MIN_LOWER_SHARE = 0.25  # minimum share of lower-case words; names and titles have fewer


def to_running_text(text: str) -> str:
    """Convert wikitext as `to_plain_text` does, but keep only the lines that are sentences.

    This drops the list items, labels, links and references of sections that list sources.
    """
    lines = to_plain_text(_LIST_ITEM.sub("", text)).split("\n")
    return "\n".join(line for line in lines if _is_sentence(remove_marks(line)))


def _is_sentence(line: str) -> bool:
    """Return whether a line of plain text is a sentence, not a label or a reference."""
    if not _SENTENCE_END.search(line) or _REFERENCE_MARK.search(line):
        return False
    if (citation_match := _CITATION.match(line)) and _is_author_list(citation_match[1]):
        return False
    words = [word for word in _WORD.findall(line) if word.lower() != word.upper()]
    return not words or sum(map(str.islower, words)) >= _MIN_LOWER_SHARE * len(words)


def _is_author_list(text: str) -> bool:
    """Return whether a text is a list of names: it has punctuation, but no long lower-case words.

    >>> _is_author_list("Mann, Noel, Wendy Smith and Eva Ujlakyova"), _is_author_list("He wrote A, B")
    (True, False)
    """
    return ("," in text or "." in text) and not any(word.islower() and len(word) > 3 for word in _WORD.findall(text))


def _remove_traces(text: str) -> str:
    """Remove traces of dropped markup: double spaces, empty lines, empty brackets, and ` ,`."""
    text = _BLANKS.sub(" ", _BLANK.sub(" ", _INVISIBLE.sub("", text)))
    text = _EMPTY_BRACKETS.sub(GAP, text)
    if "（" in text:
        text = _WIDE_CLOSING.sub("）", _WIDE_OPENING.sub("（", _close_gaps(_EMPTY_WIDE_BRACKETS.sub(GAP, text))))
    text = _CLOSING.sub(")", _OPENING.sub("(", _close_gaps(text)))
    return _LINE_BREAKS.sub("\n", _BLANKS.sub(" ", text).replace(" \n", "\n")).strip()


def _render_term(term: re.Match[str]) -> str:
    words = term[2].strip()
    definition_text = term[3][term[1].count(";") :]  # each `;` uses up one colon
    return f"{words}: {definition_text}" if words else definition_text


def _render_superscript(superscript: re.Match[str]) -> str:
    text = html.unescape(_LEFTOVER.sub("", superscript[1])).strip()
    return (
        text
        if not text or text in _ORDINALS or (text.isalpha() and len(text) > 1)
        else protect(format_superscript(text))
    )


def _render_external_links(text: str) -> str:
    """Replace `[address words]` by the words.

    Takes linear time, because only text before the last `]` of a line is searched for links.
    """
    lines = text.split("\n")
    for i, line in enumerate(lines):
        if "[" in line and (end := line.rfind("]") + 1):
            lines[i] = _EXTERNAL_LINK.sub(_render_external_link, line[:end]) + line[end:]
    return "\n".join(lines)


def _render_external_link(link: re.Match[str]) -> str:
    # `|` at the start of a line would be a table cell, and `:` would end a term.
    return protect_character(protect_character(link[1].strip(), "|"), ":")


def render_apostrophes(text: str) -> str:
    """Remove the apostrophes that mark bold and italics in each line; keep apostrophes of the text.

    Follows MediaWiki's `Parser::doQuotes`: of four apostrophes the first is text, and of more than
    five all but the last five are. If a line has odd numbers of both bold and italic marks, one
    bold mark is read as an apostrophe and an italic mark: the first one after a word of one letter
    (`l'''amour''`), else after a longer word, else after a space.
    """
    return "\n".join(_render_quoted_line(line) if "''" in line else line for line in text.split("\n"))


def _render_quoted_line(line: str) -> str:
    pieces = _QUOTES.split(line)
    lengths = [0, *(len(apostrophes) for apostrophes in pieces[1::2])]
    pieces = pieces[::2]
    for i, length in enumerate(lengths):
        if length == 4 or length > 5:
            lengths[i] = 3 if length == 4 else 5
            pieces[i - 1] += "'" * (length - lengths[i])
    n_bold, n_italic = (sum(length in (mark_length, 5) for length in lengths) for mark_length in (3, 2))
    if n_bold % 2 and n_italic % 2:
        last_characters = {i: pieces[i - 1][-2:] for i, length in enumerate(lengths) if length == 3}
        candidate_marks = (
            next((i for i, last_two in last_characters.items() if last_two[-1:] != " " and last_two[:-1] == " "), 0),
            next((i for i, last_two in last_characters.items() if last_two[-1:] != " " and last_two[:-1] != " "), 0),
            next((i for i, last_two in last_characters.items() if last_two[-1:] == " "), 0),
        )
        if i := next(filter(None, candidate_marks), 0):
            pieces[i - 1] += "'"
    return "".join(pieces)


def _close_gaps(text: str) -> str:
    if GAP not in text:
        return text
    return _GAPS.sub(_close_gap, _COMMA_GAP.sub(GAP, text).replace(f" {GAP}", f"{GAP} "))


def _close_gap(gap: re.Match[str]) -> str:
    """Keep one of the spaces around dropped markup, but none before punctuation."""
    return " " if " " in gap[0] and gap.string[gap.end() : gap.end() + 1] not in _PUNCTUATION else ""


def resolve_variants(text: str, language: str) -> str:
    """Resolve `-{…}-` on a wiki that converts between scripts; on other wikis, keep it as text.

    If it contains templates, `to_plain_text` resolves it after they are expanded.
    """
    if "-{" not in text:
        return text
    return render_variants(text) if language in _VARIANTS else _VARIANT_START.sub(protect("-{"), text)


def render_variants(text: str) -> str:
    """Render `-{…}-` as readers who chose no variant see it; conversion rules become empty."""
    for _ in range(_MAX_NESTED_VARIANTS):
        text, n_variants = _VARIANT.subn(_render_variant, text)
        if not n_variants:
            break
    return text


def _render_variant(choice: re.Match[str]) -> str:
    flags_match = _VARIANT_FLAGS.match(choice[1])
    forms_text = choice[1][flags_match.end() :] if flags_match else choice[1]
    flags = {flag.strip() for flag in flags_match[0][:-1].split(";")} if flags_match else set[str]()
    if "R" in flags:
        return forms_text
    if flags & {"H", "T", "-", "N"} and "A" not in flags:
        return ""
    form_matches = [_FORM.fullmatch(form) for form in _FORM_END.split(forms_text) if form.strip()]
    text_by_variant = {form[1]: form[2].strip() for form in form_matches if form}
    if not all(form_matches) or not text_by_variant:
        return forms_text.strip()
    if "D" in flags:
        return "; ".join(text_by_variant.values())
    return text_by_variant[min(text_by_variant, key=lambda variant: _VARIANT_RANKS[variant])]


def _render_switch(word: re.Match[str]) -> str:
    return "" if word[1].lower() in list_behaviour_switches() else word[0]


def _decode_entity(entity: re.Match[str]) -> str:
    """Decode an entity, and protect a character that looks like markup."""
    if entity[3]:
        if f"{entity[3]};" not in html_entities:
            return "" if entity[3] in _RIGHT_TO_LEFT_MARKS else entity[0]
        character = html.unescape(entity[0])
    else:
        code_point = int(entity[1] or entity[2], 10 if entity[1] else 16)
        if code_point > sys.maxunicode or not _ENTITY_CHARACTER.match(chr(code_point)):
            return protect(entity[0])
        character = chr(code_point)
    return character if character.isspace() else protect(character)
