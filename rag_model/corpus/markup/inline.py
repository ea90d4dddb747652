"""Render templates for words: emphasis, languages, characters, quotations, lists, names."""

import tomllib
from pathlib import Path

from rag_model.corpus.markup.literal import protect
from rag_model.corpus.markup.scanner import Renderer, TemplateCall, build_renderers, parse_position
from rag_model.corpus.markup.tex import format_superscript

# English names of languages and countries by code, for templates such as `{{lang-fr}}`.
_NAMES_BY_CODE = tomllib.loads(Path(__file__).with_name("names_by_code.toml").read_text(encoding="utf-8"))
LANGUAGE_NAMES: dict[str, str] = _NAMES_BY_CODE["languages"]
COUNTRY_NAMES: dict[str, str] = _NAMES_BY_CODE["countries"]


def render_first(call: TemplateCall) -> str:
    """Render the first parameter."""
    return call.get("1", "text", "content")


def render_second(call: TemplateCall) -> str:
    """Render the second parameter, or the only one."""
    return call.get("2", "text", "1")


def render_last(call: TemplateCall) -> str:
    """Render the last positional parameter."""
    return next((argument for argument in reversed(call.get_positional()) if argument), "")


def _build_join_renderer(separator: str) -> Renderer:
    def render(call: TemplateCall) -> str:
        return separator.join(argument for argument in call.get_positional() if argument)

    return render


def _build_wrap_renderer(before: str, after: str) -> Renderer:
    is_english = before[-1:] in {" ", "e"} and before != "ISBN "  # English, such as `p. `, `(see `

    def render(call: TemplateCall) -> str:
        return call.get("1") if is_english and not call.is_english else f"{before}{call.get('1')}{after}"

    return render


def _build_constant_renderer(text: str) -> Renderer:
    protected_text = protect(text)
    is_english = text in {"Yes", "No", "N/A"}
    return lambda call: "" if is_english and not call.is_english else protected_text


def _render_language(call: TemplateCall) -> str:
    """Render `{{lang-fr|Bonjour}}` as "French: Bonjour", with the translation of lit=."""
    language_code = call.name.partition("-")[2]
    is_labelled = call.is_english and call.get("label") != "none"
    language_name = LANGUAGE_NAMES.get(language_code, "") if is_labelled else ""
    words = _join_meaning(call, call.get("1", "text"), call.get("2", "translit"), call.get("lit", "translation", "3"))
    return f"{language_name}: {words}" if language_name and words else words


def _render_langx(call: TemplateCall) -> str:
    shifted_params = {
        str(position - 1) if (position := parse_position(key)) else key: argument
        for key, argument in call.params.items()
        if key != "1"
    }
    return _render_language(TemplateCall(f"lang-{call.get('1')}", shifted_params, call.language))


def _join_meaning(call: TemplateCall, words: str, romanized: str, meaning: str) -> str:
    label = "lit. " if call.is_english else ""
    notes = [romanized, f"{label}'{meaning}'" if meaning else ""]
    return ", ".join(note for note in (words, *notes) if note)


_ZH_LABELS = (
    ("c", "Chinese"), ("s", "simplified Chinese"), ("t", "traditional Chinese"), ("p", "pinyin"), ("hp", "pinyin"),
    ("w", "Wade–Giles"), ("j", "Jyutping"), ("cy", "Cantonese Yale"), ("poj", "Pe̍h-ōe-jī"), ("l", "lit."),
    ("hangul", "Korean"), ("hanja", "Hanja"), ("rr", "RR"), ("mr", "MR"),
)  # fmt: skip


def _render_chinese(call: TemplateCall) -> str:
    """Render each form of `{{zh|s=汉|t=漢|p=hàn}}` or `{{korean|hangul=…}}` with its label."""
    labelled_forms = [
        f"{label}: {call.get(key)}" if call.is_english else call.get(key) for key, label in _ZH_LABELS if call.get(key)
    ]
    return "; ".join(labelled_forms) or render_first(call)


def _render_nihongo(call: TemplateCall) -> str:
    """Render `{{nihongo|English|kanji|rōmaji|extra}}` as "English (kanji, rōmaji, extra)"."""
    english, *rest = (call.get_positional() + [""] * 5)[:5]
    notes = ", ".join(note for note in (*rest[:3], call.get("extra")) if note)
    return f"{english} ({notes}) {rest[3]}".strip() if english and notes else english or notes


def _render_nihongo_romaji_first(call: TemplateCall) -> str:
    english, kanji, romaji = (call.get_positional() + [""] * 3)[:3]
    notes = ", ".join(note for note in (kanji, english) if note)
    return f"{romaji} ({notes})" if romaji else notes


def _render_ipa(call: TemplateCall) -> str:
    """Render a pronunciation, because "pronounced" needs a word after it."""
    return call.get("1") if call.name == "ipa" else f"[{call.get('1')}]" if call.get("1") else ""


def _render_ipa_symbols(call: TemplateCall) -> str:
    """Render `{{IPAc-en|ˈ|æ|n}}` as /ˈæn/; labels such as `pron` and `uk` become words."""
    labels = {"pron": "pronounced ", "lang": "English: ", "also": "also ", "us": "US: ", "uk": "UK: "}
    shown_labels = labels if call.is_english else {}
    labels_text = "".join(shown_labels.get(argument.lower(), "") for argument in call.get_positional())
    spoken_text = "".join(
        argument.replace("_", " ") or " "
        for argument in call.get_positional()
        if argument.lower() not in labels and "." not in argument
    )
    return f"{labels_text}/{spoken_text}/" if spoken_text.strip() else ""


def _render_quotation(call: TemplateCall) -> str:
    words = call.get("1", "text", "quote")
    attribution = ", ".join(
        part for part in (call.get("2", "author", "sign", "by"), call.get("3", "source", "title")) if part
    )
    return f"\n{words}\n{'— ' + attribution if attribution and words else ''}\n"


def _render_list(call: TemplateCall) -> str:
    return "\n" + "\n".join(argument for argument in call.get_positional() if argument) + "\n"


def _render_columns(call: TemplateCall) -> str:
    return (
        "\n"
        + "\n".join(argument for key, argument in call.params.items() if key.startswith("col") and key[3:].isdigit())
        + "\n"
    )


def _render_flag(call: TemplateCall) -> str:
    """Render `{{flag|FRA}}` as the country's name, and `{{flag|France}}` unchanged."""
    country_names = COUNTRY_NAMES if call.is_english else {}
    return country_names.get(render_first(call), render_first(call))


def _render_ship(call: TemplateCall) -> str:
    """Render `{{USS|Hornet|CV-12|6}}`: prefix, name, hull number, and a code for what is shown."""
    name_parts = call.get_positional() if call.name == "ship" else [call.name.upper(), *call.get_positional()]
    prefix, name, hull_number, display_code = ([*name_parts, "", "", "", ""])[:4]
    hull_number = "" if display_code in {"2", "3", "6"} or not hull_number else f" ({hull_number})"
    return f"{'' if display_code in {'3', '5'} else prefix} {name}{hull_number}".strip()


def _render_interlanguage(call: TemplateCall) -> str:
    """Render `{{ill|Name|de|Deutscher}}`, also in the older order `{{ill|de|Deutscher|Name}}`."""
    parts = [link_part for link_part in call.get_positional() if link_part]
    if call.get("lt"):
        return call.get("lt")
    return parts[-1] if len(parts) >= 2 and parts[0].islower() and len(parts[0]) <= 3 else render_first(call)


def _render_chinese_interlanguage(call: TemplateCall) -> str:
    """Render Chinese links to other wikis.

    They are `{{le|target|English|words}}` or `{{tsl|en|English|target|words}}`.
    """
    return call.get("4", "3", "1") if call.name == "tsl" else call.get("3", "1")


def _render_bible(call: TemplateCall) -> str:
    return " ".join(argument for argument in call.get_positional()[:2] if argument)


def _render_respelling(call: TemplateCall) -> str:
    return "-".join(argument for argument in call.get_positional() if argument and argument != "_")


def _render_music(call: TemplateCall) -> str:
    return {"flat": "♭", "sharp": "♯", "natural": "♮", "b": "♭", "#": "♯"}.get(
        render_first(call).lower(), render_first(call)
    )


def _render_address(call: TemplateCall) -> str:
    return call.get("2") or render_first(call).removeprefix("http://").removeprefix("https://").rstrip("/")


def _render_sic(call: TemplateCall) -> str:
    return "".join(call.get_positional()[:2]) + (" [sic]" if not call.is_on("hide") else "")


def _render_number_sign(call: TemplateCall) -> str:
    return f"{'No.' if call.is_english else '№'} {render_first(call)}".strip()


def _render_marriage(call: TemplateCall) -> str:
    label = "m. " if call.is_english else ""
    return f"{call.get('1')} ({label}{call.get('2')})" if call.get("2") else render_first(call)


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
    "degree, deg": "°",
    "градус цельсія, градус цельсия": "°C", "градус": "°",
    "prime": "′", "times": "×", "minus": "−", "plusmn, ±": "±", "infin": "∞",
    "yes": "Yes", "no": "No", "n/a": "N/A", "tm": "™", "registered": "®", "male": "♂", "female": "♀",
    "as written": "[sic]", "eqm, equilibrium": "⇌",
}  # fmt: skip

_FIRST_PARAMETER_NAMES = (
    "nowrap, nobr, nobreak, nowraplinks, nowrap begin, small, smaller, big, larger, midsize, "
    "center, nobold, noitalic, normal, strong, em, b, i, italic, italics, bold, underline, u, s, "
    "sc, smallcaps, small caps, sc1, sc2, caps, allcaps, mono, monospace, code, tt, kbd, samp, "
    "var, math, mvar, mathvar, sub, vanchor, visible anchor, visanc, linktext, tooltip, abbr, "
    "abbrlink, unicode, polytonic, hebrew, arabic, nastaliq, urdu, rtl, ltr, nihongo2, noflag, "
    "transclude, citation needed span, cn-span, clarify span, not a typo, notatypo, typo, proper "
    "name, title, plainlist, flatlist, plain list, endplainlist, div col content, bulleted, bible "
    "verse, lsj, iast, iso15919, keyword, hanja, hangul, my, dfn, word, notelist text, char, "
    "codes, wrap, shy text, pslink, section link, slink, plain text, fontcolor, highlight, strike, "
    "del, verse, sup2, nowrap1, stack, block indent, indented, poem, longitem, resize text, shc, "
    "native name text, raise, lower, sans-serif, serif, big-math, bigmath, q, blockindent, pre, "
    "syntaxhighlight text"
)

INLINE_RENDERERS: dict[str, Renderer] = (
    build_renderers(*((names, _build_constant_renderer(text)) for names, text in _CONSTANTS.items()))
    | build_renderers(
        (_FIRST_PARAMETER_NAMES, render_first),
        ("lang, rtl-lang, native name, nativename, wikt-lang, language with name, script/text, font, color, colour, "
         "wiktlang, lang-x", render_second),
        ("transl, transliteration, transl., iw, resize, font color, fs interlinear, columns-list, columnslist, "
         "col-list, script, stylednames, ruby-text, span", render_last),
        ("langx", _render_langx),
        ("zh, chinese, lang-zh, zh-cn, korean, ko-hhrm, lang-ko-text", _render_chinese),
        ("nihongo, nihongo krt, nihongo title, nihongo foot", _render_nihongo),
        ("nihongo3", _render_nihongo_romaji_first),
        ("ipac-en, ipac-pl, ipac-cmn, ipac-hu, ipac-ga, ipac-ro", _render_ipa_symbols),
        ("ipa", _render_ipa),
        ("ipaslink, ipa slink, //", _build_wrap_renderer("/", "/")),
        ("ipablink, ipa blink", _build_wrap_renderer("[", "]")),
        ("ipalink, ipa link, ipa sound", render_first),
        ("angbr, angle bracket, angbr ipa, angle brackets, grapheme", _build_wrap_renderer("⟨", "⟩")),
        ("respell, pronunciation respelling", _render_respelling),
        ("sup, smallsup", lambda call: protect(format_superscript(render_first(call))) if render_first(call) else ""),
        ("keypress, key press, key, keys, keypress2", _build_join_renderer("+")),
        ("button", _build_wrap_renderer("", "")),
        ("quote, quotation, blockquote, cquote, bquote, quote box, rquote, poem quote, poemquote, pull quote, "
         "epigraph, quotebox, verse translation, centered pull quote, quote frame, long quotation", _render_quotation),
        ("hlist, hlist-comma, cslist, comma separated entries, csv", _build_join_renderer(", ")),
        ("ubl, unbulleted list, ublist, vunblist, bulleted list, blist, ordered list, numbered list, olist, "
         "flowlist, indented plainlist, collapsible list", _render_list),
        ("columns, multi-column", _render_columns),
        ("ship, uss, hms, hmas, hmcs, ss, ms, rms, mv, usns, sms, hmnzs, ins, ijn, uscgc", _render_ship),
        ("ill, interlanguage link, link-interwiki, interlanguage link multi, illm", _render_interlanguage),
        ("нп, нп1, нп2, нп3, нп4, нп5, не переведено, не переведено 1, не переведено 2, не переведено 3, "
         "не переведено 4, не переведено 5, не перекладено", render_second),
        ("le, tsl, translink", _render_chinese_interlanguage),
        ("bibleverse, bibleref, bibleref2, bibleverse-lb, bibleref2-nb", _render_bible),
        ("flag, flagcountry, flagu, flag+link, flaglink, flagg", _render_flag),
        ("music", _render_music),
        ("url, official url, url2", _render_address),
        ("sic, sic?", _render_sic),
        ("no., number sign, numero, abbreviation no.", _render_number_sign),
        ("p., page", _build_wrap_renderer("p. ", "")),
        ("pp.", _build_wrap_renderer("pp. ", "")),
        ("vol.", _build_wrap_renderer("vol. ", "")),
        ("isbn", _build_wrap_renderer("ISBN ", "")),
        ("see above", _build_wrap_renderer("(see above", ")")),
        ("see below", _build_wrap_renderer("(see ", ")")),
        ("ruby", lambda call: f"{call.get('1')} ({call.get('2')})" if call.get("2") else render_first(call)),
        ("marriage", _render_marriage),
        ("trim, lc, uc, ucfirst, lcfirst", render_first),
    )
)  # fmt: skip


def find_family_renderer(name: str) -> Renderer | None:
    """Return the renderer of a template family such as `lang-fr` or `IPA-de`, or None."""
    if name.startswith("lang-"):
        return _render_language
    if name.startswith("link-"):
        return _render_chinese_interlanguage
    if name.startswith(("ipa-", "ipa/")):
        return _render_ipa
    return render_first if name.startswith(("script/", "native name ")) else None
