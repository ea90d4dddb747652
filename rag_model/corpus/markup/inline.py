"""Templates that wrap or stand for words: emphasis, languages, characters, quotations, lists, names."""

from rag_model.corpus.markup.call import Call, Renderer, by_name, position_of
from rag_model.corpus.markup.country_names import COUNTRY_NAMES
from rag_model.corpus.markup.language_names import LANGUAGE_NAMES
from rag_model.corpus.markup.literal import protect
from rag_model.corpus.markup.tex import raised


def first(call: Call) -> str:
    """Show the first parameter."""
    return call.get("1", "text", "content")


def second(call: Call) -> str:
    """Show the second parameter, or the only one."""
    return call.get("2", "text", "1")


def last(call: Call) -> str:
    """Show the last positional parameter."""
    return next((value for value in reversed(call.positional()) if value), "")


def _joined(separator: str) -> Renderer:
    def render(call: Call) -> str:
        return separator.join(value for value in call.positional() if value)

    return render


def _wrapped(before: str, after: str) -> Renderer:
    def render(call: Call) -> str:
        return f"{before}{call.get('1')}{after}"

    return render


def _constant(text: str) -> Renderer:
    shown = protect(text)
    return lambda call: shown


def _language(call: Call) -> str:
    """`{{lang-fr|Bonjour}}` reads "French: Bonjour", with its translation from lit=."""
    code = call.name.partition("-")[2]
    name = "" if call.get("label") == "none" else LANGUAGE_NAMES.get(code, "")
    words = _with_meaning(call.get("1", "text"), call.get("2", "translit"), call.get("lit", "translation", "3"))
    return f"{name}: {words}" if name and words else words


def _langx(call: Call) -> str:
    rest = {str(at - 1) if (at := position_of(key)) else key: value for key, value in call.params.items() if key != "1"}
    return _language(Call(f"lang-{call.get('1')}", rest))


def _with_meaning(words: str, romanized: str, meaning: str) -> str:
    extra = [romanized, f"lit. '{meaning}'" if meaning else ""]
    return ", ".join(part for part in (words, *extra) if part)


_CHINESE = (
    ("c", "Chinese"), ("s", "simplified Chinese"), ("t", "traditional Chinese"), ("p", "pinyin"), ("hp", "pinyin"),
    ("w", "Wade–Giles"), ("j", "Jyutping"), ("cy", "Cantonese Yale"), ("poj", "Pe̍h-ōe-jī"), ("l", "lit."),
    ("hangul", "Korean"), ("hanja", "Hanja"), ("rr", "RR"), ("mr", "MR"),
)  # fmt: skip


def _chinese(call: Call) -> str:
    """`{{zh|s=汉|t=漢|p=hàn}}` and `{{korean|hangul=…}}`: each form with its label."""
    shown = [f"{label}: {call.get(key)}" for key, label in _CHINESE if call.get(key)]
    return "; ".join(shown) or first(call)


def _nihongo(call: Call) -> str:
    """`{{nihongo|English|kanji|rōmaji|extra}}` reads "English (kanji, rōmaji, extra)"."""
    english, *rest = (call.positional() + [""] * 5)[:5]
    inside = ", ".join(part for part in (*rest[:3], call.get("extra")) if part)
    return f"{english} ({inside}) {rest[3]}".strip() if english and inside else english or inside


def _nihongo_romaji_first(call: Call) -> str:
    english, kanji, romaji = (call.positional() + [""] * 3)[:3]
    inside = ", ".join(part for part in (kanji, english) if part)
    return f"{romaji} ({inside})" if romaji else inside


def _ipa(call: Call) -> str:
    """Pronunciations are kept: the reader sees them, and a sentence with "pronounced" needs them."""
    return call.get("1") if call.name == "ipa" else f"[{call.get('1')}]" if call.get("1") else ""


def _ipa_symbols(call: Call) -> str:
    """`{{IPAc-en|ˈ|æ|n}}` reads /ˈæn/; labels such as `pron` and `uk` become words."""
    spoken = {"pron": "pronounced ", "lang": "English: ", "also": "also ", "us": "US: ", "uk": "UK: "}
    before = "".join(spoken.get(value.lower(), "") for value in call.positional())
    sounds = "".join(
        value.replace("_", " ") or " "
        for value in call.positional()
        if value.lower() not in spoken and "." not in value
    )
    return f"{before}/{sounds}/" if sounds.strip() else ""


def _quotation(call: Call) -> str:
    words = call.get("1", "text", "quote")
    source = ", ".join(
        part for part in (call.get("2", "author", "sign", "by"), call.get("3", "source", "title")) if part
    )
    return f"\n{words}\n{'— ' + source if source and words else ''}\n"


def _listed(call: Call) -> str:
    return "\n" + "\n".join(value for value in call.positional() if value) + "\n"


def _columns(call: Call) -> str:
    return (
        "\n"
        + "\n".join(value for key, value in call.params.items() if key.startswith("col") and key[3:].isdigit())
        + "\n"
    )


def _flag(call: Call) -> str:
    """`{{flag|FRA}}` reads as the country's name; a full name is not changed."""
    return COUNTRY_NAMES.get(first(call), first(call))


def _ship(call: Call) -> str:
    """`{{USS|Hornet|CV-12|6}}`: the prefix is the template's name, the third parameter selects what is shown."""
    prefix = "" if call.name == "ship" else call.name.upper()
    parts = call.positional()
    if call.name == "ship":
        prefix, parts = ([*parts, ""])[0], parts[1:]
    name, hull, form = ([*parts, "", "", ""])[:3]
    hull = "" if form in {"2", "3", "6"} or not hull else f" ({hull})"
    return f"{'' if form in {'3', '5'} else prefix} {name}{hull}".strip()


def _interlanguage(call: Call) -> str:
    """`{{ill|Name|de|Deutscher Name}}`, or in its older order `{{ill|de|Deutscher Name|Name}}`."""
    parts = [part for part in call.positional() if part]
    if call.get("lt"):
        return call.get("lt")
    return parts[-1] if len(parts) >= 2 and parts[0].islower() and len(parts[0]) <= 3 else first(call)


def _bible(call: Call) -> str:
    return " ".join(value for value in call.positional()[:2] if value)


def _respelling(call: Call) -> str:
    return "-".join(value for value in call.positional() if value and value != "_")


def _music(call: Call) -> str:
    return {"flat": "♭", "sharp": "♯", "natural": "♮", "b": "♭", "#": "♯"}.get(first(call).lower(), first(call))


def _address(call: Call) -> str:
    return call.get("2") or first(call).removeprefix("http://").removeprefix("https://").rstrip("/")


def _sic(call: Call) -> str:
    return "".join(call.positional()[:2]) + (" [sic]" if not call.on("hide") else "")


def _number_sign(call: Call) -> str:
    return f"No. {first(call)}".strip()


_CONSTANTS = {
    "ndash, en dash, –": "–",
    "spaced ndash, snd, snds, spnd, sndash, spaced en dash, spaced en dash space": " – ",
    "mdash, em dash, —": "—", "spaced mdash, snd—, mdashb": " — ", "ndashb": "–",
    "nbsp, space, spaces, thinsp, nnbsp": " ",
    "'": "'", "'s": "'s", "' \"": "'\"", "\" '": "\"'", "-'": "'", "-\"": "\"",
    "!": "|", "=": "=", "pipe": "|", "*": "*", "(": "(", ")": ")", "[": "[", "]": "]",
    "·, dot, middot, •, bull, bullet, \\": " · ", "zwj, zwnj, hairsp, shy, wbr, zwsp": "",
    "ell": "…", "...": "…", "dagger, †, extinct": "†", "double-dagger, ‡": "‡", "section sign, §": "§",
    "pi": "π", "okina, hamza": "ʻ",
    "sharp": "♯", "flat": "♭", "natural": "♮", "et al., et al": "et al.", "i.e.": "i.e.", "e.g.": "e.g.",
    "degree, deg": "°", "prime": "′", "times": "×", "minus": "−", "plusmn, ±": "±", "infin": "∞",
    "yes": "Yes", "no": "No", "n/a": "N/A", "tm": "™", "registered": "®", "male": "♂", "female": "♀",
    "as written": "[sic]", "eqm, equilibrium": "⇌",
}  # fmt: skip

_FIRST = (
    "nowrap, nobr, nobreak, nowraplinks, nowrap begin, small, smaller, big, larger, midsize, center, nobold, "
    "noitalic, normal, strong, em, b, i, italic, italics, bold, underline, u, s, sc, smallcaps, small caps, "
    "sc1, sc2, caps, allcaps, mono, monospace, code, tt, kbd, samp, var, math, mvar, mathvar, sub, vanchor, "
    "visible anchor, visanc, linktext, tooltip, abbr, abbrlink, unicode, polytonic, hebrew, arabic, "
    "nastaliq, urdu, rtl, ltr, nihongo2, noflag, transclude, citation needed span, cn-span, clarify span, "
    "not a typo, notatypo, typo, proper name, title, plainlist, flatlist, plain list, endplainlist, div col "
    "content, bulleted, bible verse, lsj, iast, iso15919, keyword, hanja, hangul, my, dfn, "
    "word, notelist text, char, codes, wrap, shy text, pslink, section link, slink, plain text, fontcolor, "
    "highlight, strike, del, verse, sup2, nowrap1, stack, block indent, indented, poem, longitem, "
    "resize text, shc, native name text, raise, lower, sans-serif, serif, big-math, bigmath, q, blockindent, "
    "pre, syntaxhighlight text"
)

RENDERERS: dict[str, Renderer] = (
    by_name(*((names, _constant(text)) for names, text in _CONSTANTS.items()))
    | by_name(
        (_FIRST, first),
        ("lang, rtl-lang, native name, nativename, wikt-lang, language with name, script/text, font, color, colour, "
         "wiktlang, lang-x", second),
        ("transl, transliteration, transl., iw, resize, font color, fs interlinear, columns-list, columnslist, "
         "col-list, script, stylednames, ruby-text, span", last),
        ("langx", _langx),
        ("zh, chinese, lang-zh, zh-cn, korean, ko-hhrm, lang-ko-text", _chinese),
        ("nihongo, nihongo krt, nihongo title, nihongo foot", _nihongo),
        ("nihongo3", _nihongo_romaji_first),
        ("ipac-en, ipac-pl, ipac-cmn, ipac-hu, ipac-ga, ipac-ro", _ipa_symbols),
        ("ipa", _ipa),
        ("ipaslink, ipa slink, //", _wrapped("/", "/")),
        ("ipablink, ipa blink", _wrapped("[", "]")),
        ("ipalink, ipa link, ipa sound", first),
        ("angbr, angle bracket, angbr ipa, angle brackets, grapheme", _wrapped("⟨", "⟩")),
        ("respell, pronunciation respelling", _respelling),
        ("sup, smallsup", lambda call: protect(raised(first(call))) if first(call) else ""),
        ("keypress, key press, key, keys, keypress2", _joined("+")),
        ("button", _wrapped("", "")),
        ("quote, quotation, blockquote, cquote, bquote, quote box, rquote, poem quote, poemquote, pull quote, "
         "epigraph, quotebox, verse translation, centered pull quote, quote frame, long quotation", _quotation),
        ("hlist, hlist-comma, cslist, comma separated entries, csv", _joined(", ")),
        ("ubl, unbulleted list, ublist, vunblist, bulleted list, blist, ordered list, numbered list, olist, "
         "flowlist, indented plainlist, collapsible list", _listed),
        ("columns, multi-column", _columns),
        ("ship, uss, hms, hmas, hmcs, ss, ms, rms, mv, usns, sms, hmnzs, ins, ijn, uscgc", _ship),
        ("ill, interlanguage link, link-interwiki, interlanguage link multi, illm", _interlanguage),
        ("bibleverse, bibleref, bibleref2, bibleverse-lb, bibleref2-nb", _bible),
        ("flag, flagcountry, flagu, flag+link, flaglink, flagg", _flag),
        ("music", _music),
        ("url, official url, url2", _address),
        ("sic, sic?", _sic),
        ("no., number sign, numero, abbreviation no.", _number_sign),
        ("p., page", _wrapped("p. ", "")),
        ("pp.", _wrapped("pp. ", "")),
        ("vol.", _wrapped("vol. ", "")),
        ("isbn", _wrapped("ISBN ", "")),
        ("see above", _wrapped("(see above", ")")),
        ("see below", _wrapped("(see ", ")")),
        ("ruby", lambda call: f"{call.get('1')} ({call.get('2')})" if call.get("2") else first(call)),
        ("marriage", lambda call: f"{call.get('1')} (m. {call.get('2')})" if call.get("2") else first(call)),
        ("trim, lc, uc, ucfirst, lcfirst", first),
    )
)  # fmt: skip


def by_family(name: str) -> Renderer | None:
    """Return the renderer for a template of a family, such as `lang-fr`, `IPA-de` or `script/Greek`."""
    if name.startswith("lang-"):
        return _language
    if name.startswith(("ipa-", "ipa/")):
        return _ipa
    return first if name.startswith(("script/", "native name ")) else None
