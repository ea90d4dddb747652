"""Render templates for words: emphasis, languages, characters, quotations, lists, names."""

from rag_model.corpus.markup.literal import protect
from rag_model.corpus.markup.scanner import Renderer, TemplateCall, build_renderers, parse_position
from rag_model.corpus.markup.tex import format_superscript

_LANGUAGE_PAIRS = """
aa Afar|ab Abkhazian|af Afrikaans|akk Akkadian|am Amharic|an Aragonese|ang Old English|ar Arabic|arc
Aramaic|as Assamese| ast Asturian|av Avar|ay Aymara|az Azerbaijani|ba Bashkir|bar Bavarian|be Belarusian|ber
Berber|bg Bulgarian|bn Bengali|bo Tibetan| br Breton|bs Bosnian|ca Catalan|ce Chechen|ceb Cebuano|chr
Cherokee|cop Coptic|co Corsican|cs Czech|cu Church Slavonic|cv Chuvash| cy Welsh|da Danish|de German|dsb
Lower Sorbian|dv Dhivehi|dz Dzongkha|el Greek|en English|eo Esperanto|es Spanish|et Estonian| eu Basque|fa
Persian|fi Finnish|fil Filipino|fo Faroese|fr French|frm Middle French|fro Old French|fy West Frisian|ga
Irish| gd Scottish Gaelic|gl Galician|gn Guarani|goh Old High German|got Gothic|grc Ancient Greek|grc-gre
Greek|gsw Swiss German| gu Gujarati|gv Manx|ha Hausa|haw Hawaiian|he Hebrew|hi Hindi|hr Croatian|hsb Upper
Sorbian|ht Haitian Creole|hu Hungarian| hy Armenian|ia Interlingua|id Indonesian|ig Igbo|is Icelandic|it
Italian|iu Inuktitut|ja Japanese|jv Javanese|ka Georgian| kk Kazakh|kl Greenlandic|km Khmer|kn Kannada|ko
Korean|ku Kurdish|kw Cornish|ky Kyrgyz|la Latin|lad Ladino|lb Luxembourgish| li Limburgish|lmo Lombard|ln
Lingala|lo Lao|lt Lithuanian|lv Latvian|mg Malagasy|mi Māori|mk Macedonian|ml Malayalam|mn Mongolian| mr
Marathi|ms Malay|mt Maltese|my Burmese|nah Nahuatl|nap Neapolitan|nb Norwegian Bokmål|nds Low German|ne
Nepali|nl Dutch| nn Norwegian Nynorsk|no Norwegian|non Old Norse|nv Navajo|oc Occitan|oj Ojibwe|om Oromo|or
Odia|os Ossetian|ota Ottoman Turkish| pa Punjabi|pal Middle Persian|peo Old Persian|phn Phoenician|pi Pali|pl
Polish|ps Pashto|pt Portuguese|qu Quechua|rm Romansh| ro Romanian|ru Russian|rw Kinyarwanda|sa Sanskrit|sah
Yakut|sc Sardinian|scn Sicilian|sco Scots|sd Sindhi|se Northern Sami| sh Serbo-Croatian|si Sinhala|sk
Slovak|sl Slovene|sm Samoan|sn Shona|so Somali|sq Albanian|sr Serbian|st Sotho|su Sundanese| sux Sumerian|sv
Swedish|sw Swahili|syc Syriac|syr Syriac|ta Tamil|te Telugu|tet Tetum|tg Tajik|th Thai|ti Tigrinya|tk
Turkmen| tl Tagalog|tn Tswana|to Tongan|tr Turkish|ts Tsonga|tt Tatar|uk Ukrainian|ug Uyghur|ur Urdu|uz
Uzbek|vec Venetian|vi Vietnamese| vo Volapük|wa Walloon|wo Wolof|xh Xhosa|yi Yiddish|yo Yoruba|za Zhuang|zh
Chinese|zu Zulu
"""
LANGUAGE_NAMES = dict(pair.strip().split(" ", 1) for pair in _LANGUAGE_PAIRS.replace("\n", " ").split("|"))


_COUNTRY_PAIRS = """
AFG Afghanistan|AGO Angola|ANG Angola|AIA Anguilla|ALB Albania|ALG Algeria|DZA Algeria|AND Andorra|
ARE United Arab Emirates|UAE United Arab Emirates|ARG Argentina|ARM Armenia|ASM American Samoa|
ATG Antigua and Barbuda|ANT Antigua and Barbuda|AUS Australia|AUT Austria|AZE Azerbaijan|ABW Aruba|
ARU Aruba|BDI Burundi|BEL Belgium|BEN Benin|BFA Burkina Faso|BUR Burkina Faso|BGD Bangladesh|BAN Bangladesh|
BGR Bulgaria|BUL Bulgaria|BHR Bahrain|BRN Bahrain|BHS Bahamas|BAH Bahamas|BIH Bosnia and Herzegovina|
BLR Belarus|BLZ Belize|BIZ Belize|BMU Bermuda|BER Bermuda|BOL Bolivia|BRA Brazil|BRB Barbados|BAR Barbados|
BRU Brunei|BTN Bhutan|BHU Bhutan|BWA Botswana|BOT Botswana|BVT Bouvet Island|CAF Central African Republic|
CAN Canada|CHE Switzerland|SUI Switzerland|CHL Chile|CHI Chile|CHN China|PRC China|CIV Ivory Coast|
CMR Cameroon|COD Democratic Republic of the Congo|COG Republic of the Congo|CGO Republic of the Congo|
COK Cook Islands|COL Colombia|COM Comoros|CPV Cape Verde|CRI Costa Rica|CRC Costa Rica|CUB Cuba|CUR Curaçao|
CUW Curaçao|CYM Cayman Islands|CAY Cayman Islands|CYP Cyprus|CZE Czech Republic|TCH Czechoslovakia|
DEU Germany|GER Germany|GDR East Germany|FRG West Germany|DJI Djibouti|DMA Dominica|DNK Denmark|DEN Denmark|
DOM Dominican Republic|ECU Ecuador|EGY Egypt|ENG England|ERI Eritrea|ESH Western Sahara|ESP Spain|
EST Estonia|ETH Ethiopia|EU European Union|EUR Europe|FIN Finland|FJI Fiji|FIJ Fiji|FLK Falkland Islands|
FRA France|FRO Faroe Islands|FSM Micronesia|GAB Gabon|GBR United Kingdom|UK United Kingdom|
UKGBI United Kingdom|GEO Georgia|GGY Guernsey|GHA Ghana|GIB Gibraltar|GIN Guinea|GUI Guinea|GMB The Gambia|
GAM The Gambia|GNB Guinea-Bissau|GBS Guinea-Bissau|GNQ Equatorial Guinea|GEQ Equatorial Guinea|GRC Greece|
GRE Greece|GRD Grenada|GRN Grenada|GRL Greenland|GTM Guatemala|GUA Guatemala|GUM Guam|GUY Guyana|
HKG Hong Kong|HND Honduras|HON Honduras|HRV Croatia|CRO Croatia|HTI Haiti|HAI Haiti|HUN Hungary|
IDN Indonesia|INA Indonesia|IMN Isle of Man|IOM Isle of Man|IND India|IRL Ireland|IRN Iran|IRI Iran|
IRQ Iraq|ISL Iceland|ISR Israel|ITA Italy|JAM Jamaica|JEY Jersey|JOR Jordan|JPN Japan|KAZ Kazakhstan|
KEN Kenya|KGZ Kyrgyzstan|KHM Cambodia|CAM Cambodia|KIR Kiribati|KNA Saint Kitts and Nevis|
SKN Saint Kitts and Nevis|KOR South Korea|KOS Kosovo|KWT Kuwait|KUW Kuwait|LAO Laos|LBN Lebanon|LIB Lebanon|
LBR Liberia|LBY Libya|LBA Libya|LCA Saint Lucia|LIE Liechtenstein|LKA Sri Lanka|SRI Sri Lanka|LSO Lesotho|
LES Lesotho|LTU Lithuania|LUX Luxembourg|LVA Latvia|LAT Latvia|MAC Macau|MAF Saint Martin|MAR Morocco|
MCO Monaco|MON Monaco|MDA Moldova|MDG Madagascar|MAD Madagascar|MDV Maldives|MEX Mexico|
MHL Marshall Islands|MKD Macedonia|MLI Mali|MLT Malta|MMR Myanmar|MYA Myanmar|MNE Montenegro|MNG Mongolia|
MGL Mongolia|MOZ Mozambique|MRT Mauritania|MTN Mauritania|MSR Montserrat|MUS Mauritius|MRI Mauritius|
MWI Malawi|MAW Malawi|MYS Malaysia|MAS Malaysia|NAM Namibia|NCL New Caledonia|NER Niger|NIG Niger|
NGA Nigeria|NGR Nigeria|NIC Nicaragua|NCA Nicaragua|NIR Northern Ireland|NLD Netherlands|NED Netherlands|
NOR Norway|NPL Nepal|NEP Nepal|NRU Nauru|NZL New Zealand|OMN Oman|OMA Oman|PAK Pakistan|PAN Panama|PER Peru|
PHL Philippines|PHI Philippines|PLW Palau|PNG Papua New Guinea|POL Poland|PRI Puerto Rico|PUR Puerto Rico|
PRK North Korea|PRT Portugal|POR Portugal|PRY Paraguay|PAR Paraguay|PSE Palestine|PLE Palestine|
PYF French Polynesia|QAT Qatar|ROC Taiwan|ROM Romania|ROU Romania|RUS Russia|RWA Rwanda|SAU Saudi Arabia|
KSA Saudi Arabia|SCG Serbia and Montenegro|SCO Scotland|SDN Sudan|SUD Sudan|SEN Senegal|SGP Singapore|
SIN Singapore|SGS South Georgia and the South Sandwich Islands|SHN Saint Helena|SLB Solomon Islands|
SLE Sierra Leone|SLV El Salvador|ESA El Salvador|SMR San Marino|SOM Somalia|SRB Serbia|SSD South Sudan|
STP São Tomé and Príncipe|SUN Soviet Union|URS Soviet Union|USSR Soviet Union|SUR Suriname|SVK Slovakia|
SVN Slovenia|SLO Slovenia|SWE Sweden|SWZ Swaziland|SXM Sint Maarten|SYC Seychelles|SEY Seychelles|SYR Syria|
TCA Turks and Caicos Islands|TCD Chad|CHA Chad|TGO Togo|TOG Togo|THA Thailand|TJK Tajikistan|
TKM Turkmenistan|TLS East Timor|TON Tonga|TGA Tonga|TPE Chinese Taipei|TTO Trinidad and Tobago|
TRI Trinidad and Tobago|TUN Tunisia|TUR Turkey|TUV Tuvalu|TWN Taiwan|TZA Tanzania|TAN Tanzania|UGA Uganda|
UKR Ukraine|URY Uruguay|URU Uruguay|USA United States|US United States|UZB Uzbekistan|VAT Vatican City|
VCT Saint Vincent and the Grenadines|VIN Saint Vincent and the Grenadines|VEN Venezuela|
VGB British Virgin Islands|VIR United States Virgin Islands|VNM Vietnam|VIE Vietnam|VUT Vanuatu|VAN Vanuatu|
WAL Wales|WSM Samoa|SAM Samoa|YEM Yemen|YUG Yugoslavia|ZAF South Africa|RSA South Africa|ZMB Zambia|
ZAM Zambia|ZWE Zimbabwe|ZIM Zimbabwe
"""
COUNTRY_NAMES = dict(entry.strip().split(" ", 1) for entry in _COUNTRY_PAIRS.replace("\n", " ").split("|"))


def render_first(call: TemplateCall) -> str:
    """Render the first parameter."""
    return call.get("1", "text", "content")


def render_second(call: TemplateCall) -> str:
    """Render the second parameter, or the only one."""
    return call.get("2", "text", "1")


def render_last(call: TemplateCall) -> str:
    """Render the last positional parameter."""
    return next((value for value in reversed(call.positional()) if value), "")


def _join_renderer(separator: str) -> Renderer:
    def render(call: TemplateCall) -> str:
        return separator.join(value for value in call.positional() if value)

    return render


def _wrap_renderer(before: str, after: str) -> Renderer:
    is_word = before[-1:] in {" ", "e"} and before != "ISBN "  # an English word: `p. `, `(see `

    def render(call: TemplateCall) -> str:
        return call.get("1") if is_word and not call.is_english else f"{before}{call.get('1')}{after}"

    return render


def _constant_renderer(text: str) -> Renderer:
    protected_text = protect(text)
    is_word = text in {"Yes", "No", "N/A"}
    return lambda call: "" if is_word and not call.is_english else protected_text


def _render_language(call: TemplateCall) -> str:
    """Render `{{lang-fr|Bonjour}}` as "French: Bonjour", with the translation of lit=."""
    code = call.name.partition("-")[2]
    is_labelled = call.is_english and call.get("label") != "none"
    name = LANGUAGE_NAMES.get(code, "") if is_labelled else ""
    words = _join_meaning(call, call.get("1", "text"), call.get("2", "translit"), call.get("lit", "translation", "3"))
    return f"{name}: {words}" if name and words else words


def _render_langx(call: TemplateCall) -> str:
    params = {
        str(position - 1) if (position := parse_position(key)) else key: value
        for key, value in call.params.items()
        if key != "1"
    }
    return _render_language(TemplateCall(f"lang-{call.get('1')}", params, call.language))


def _join_meaning(call: TemplateCall, words: str, romanized: str, meaning: str) -> str:
    mark = "lit. " if call.is_english else ""
    notes = [romanized, f"{mark}'{meaning}'" if meaning else ""]
    return ", ".join(part for part in (words, *notes) if part)


_CHINESE = (
    ("c", "Chinese"), ("s", "simplified Chinese"), ("t", "traditional Chinese"), ("p", "pinyin"), ("hp", "pinyin"),
    ("w", "Wade–Giles"), ("j", "Jyutping"), ("cy", "Cantonese Yale"), ("poj", "Pe̍h-ōe-jī"), ("l", "lit."),
    ("hangul", "Korean"), ("hanja", "Hanja"), ("rr", "RR"), ("mr", "MR"),
)  # fmt: skip


def _render_chinese(call: TemplateCall) -> str:
    """Render each form of `{{zh|s=汉|t=漢|p=hàn}}` or `{{korean|hangul=…}}` with its label."""
    labelled_forms = [
        f"{label}: {call.get(key)}" if call.is_english else call.get(key) for key, label in _CHINESE if call.get(key)
    ]
    return "; ".join(labelled_forms) or render_first(call)


def _render_nihongo(call: TemplateCall) -> str:
    """Render `{{nihongo|English|kanji|rōmaji|extra}}` as "English (kanji, rōmaji, extra)"."""
    english, *rest = (call.positional() + [""] * 5)[:5]
    inside = ", ".join(part for part in (*rest[:3], call.get("extra")) if part)
    return f"{english} ({inside}) {rest[3]}".strip() if english and inside else english or inside


def _render_nihongo_romaji_first(call: TemplateCall) -> str:
    english, kanji, romaji = (call.positional() + [""] * 3)[:3]
    inside = ", ".join(part for part in (kanji, english) if part)
    return f"{romaji} ({inside})" if romaji else inside


def _render_ipa(call: TemplateCall) -> str:
    """Render a pronunciation, since a sentence with "pronounced" needs it."""
    return call.get("1") if call.name == "ipa" else f"[{call.get('1')}]" if call.get("1") else ""


def _render_ipa_symbols(call: TemplateCall) -> str:
    """Render `{{IPAc-en|ˈ|æ|n}}` as /ˈæn/; labels such as `pron` and `uk` become words."""
    labels = {"pron": "pronounced ", "lang": "English: ", "also": "also ", "us": "US: ", "uk": "UK: "}
    shown_labels = labels if call.is_english else {}
    labels_text = "".join(shown_labels.get(value.lower(), "") for value in call.positional())
    sounds = "".join(
        value.replace("_", " ") or " "
        for value in call.positional()
        if value.lower() not in labels and "." not in value
    )
    return f"{labels_text}/{sounds}/" if sounds.strip() else ""


def _render_quotation(call: TemplateCall) -> str:
    words = call.get("1", "text", "quote")
    source = ", ".join(
        part for part in (call.get("2", "author", "sign", "by"), call.get("3", "source", "title")) if part
    )
    return f"\n{words}\n{'— ' + source if source and words else ''}\n"


def _render_list(call: TemplateCall) -> str:
    return "\n" + "\n".join(value for value in call.positional() if value) + "\n"


def _render_columns(call: TemplateCall) -> str:
    return (
        "\n"
        + "\n".join(value for key, value in call.params.items() if key.startswith("col") and key[3:].isdigit())
        + "\n"
    )


def _render_flag(call: TemplateCall) -> str:
    """Render `{{flag|FRA}}` as the country's name; a full name is kept."""
    names = COUNTRY_NAMES if call.is_english else {}
    return names.get(render_first(call), render_first(call))


def _render_ship(call: TemplateCall) -> str:
    """Render `{{USS|Hornet|CV-12|6}}`: the prefix is the template's name, 6 is the form to show."""
    prefix = "" if call.name == "ship" else call.name.upper()
    parts = call.positional()
    if call.name == "ship":
        prefix, parts = ([*parts, ""])[0], parts[1:]
    name, hull, form = ([*parts, "", "", ""])[:3]
    hull = "" if form in {"2", "3", "6"} or not hull else f" ({hull})"
    return f"{'' if form in {'3', '5'} else prefix} {name}{hull}".strip()


def _render_interlanguage(call: TemplateCall) -> str:
    """Render `{{ill|Name|de|Deutscher}}`, also in the older order `{{ill|de|Deutscher|Name}}`."""
    parts = [part for part in call.positional() if part]
    if call.get("lt"):
        return call.get("lt")
    return parts[-1] if len(parts) >= 2 and parts[0].islower() and len(parts[0]) <= 3 else render_first(call)


def _render_russian_interlanguage(call: TemplateCall) -> str:
    """Render Russian and Ukrainian links to other wikis: `{{нп|target|words|…}}`."""
    return call.get("2", "text", "1")


def _render_chinese_interlanguage(call: TemplateCall) -> str:
    """Render Chinese links to other wikis: `{{le|target|English|words}}`,
    `{{tsl|en|English|target|words}}`.
    """
    first = 3 if call.name == "tsl" else 1
    return call.get(str(4 if call.name == "tsl" else 3), str(first), "1")


def _render_bible(call: TemplateCall) -> str:
    return " ".join(value for value in call.positional()[:2] if value)


def _render_respelling(call: TemplateCall) -> str:
    return "-".join(value for value in call.positional() if value and value != "_")


def _render_music(call: TemplateCall) -> str:
    return {"flat": "♭", "sharp": "♯", "natural": "♮", "b": "♭", "#": "♯"}.get(
        render_first(call).lower(), render_first(call)
    )


def _render_address(call: TemplateCall) -> str:
    return call.get("2") or render_first(call).removeprefix("http://").removeprefix("https://").rstrip("/")


def _render_sic(call: TemplateCall) -> str:
    return "".join(call.positional()[:2]) + (" [sic]" if not call.is_on("hide") else "")


def _render_number_sign(call: TemplateCall) -> str:
    return f"{'No.' if call.is_english else '№'} {render_first(call)}".strip()


def _render_marriage(call: TemplateCall) -> str:
    mark = "m. " if call.is_english else ""
    return f"{call.get('1')} ({mark}{call.get('2')})" if call.get("2") else render_first(call)


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
    build_renderers(*((names, _constant_renderer(text)) for names, text in _CONSTANTS.items()))
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
        ("ipaslink, ipa slink, //", _wrap_renderer("/", "/")),
        ("ipablink, ipa blink", _wrap_renderer("[", "]")),
        ("ipalink, ipa link, ipa sound", render_first),
        ("angbr, angle bracket, angbr ipa, angle brackets, grapheme", _wrap_renderer("⟨", "⟩")),
        ("respell, pronunciation respelling", _render_respelling),
        ("sup, smallsup", lambda call: protect(format_superscript(render_first(call))) if render_first(call) else ""),
        ("keypress, key press, key, keys, keypress2", _join_renderer("+")),
        ("button", _wrap_renderer("", "")),
        ("quote, quotation, blockquote, cquote, bquote, quote box, rquote, poem quote, poemquote, pull quote, "
         "epigraph, quotebox, verse translation, centered pull quote, quote frame, long quotation", _render_quotation),
        ("hlist, hlist-comma, cslist, comma separated entries, csv", _join_renderer(", ")),
        ("ubl, unbulleted list, ublist, vunblist, bulleted list, blist, ordered list, numbered list, olist, "
         "flowlist, indented plainlist, collapsible list", _render_list),
        ("columns, multi-column", _render_columns),
        ("ship, uss, hms, hmas, hmcs, ss, ms, rms, mv, usns, sms, hmnzs, ins, ijn, uscgc", _render_ship),
        ("ill, interlanguage link, link-interwiki, interlanguage link multi, illm", _render_interlanguage),
        ("нп, нп1, нп2, нп3, нп4, нп5, не переведено, не переведено 1, не переведено 2, не переведено 3, "
         "не переведено 4, не переведено 5, не перекладено", _render_russian_interlanguage),
        ("le, tsl, translink", _render_chinese_interlanguage),
        ("bibleverse, bibleref, bibleref2, bibleverse-lb, bibleref2-nb", _render_bible),
        ("flag, flagcountry, flagu, flag+link, flaglink, flagg", _render_flag),
        ("music", _render_music),
        ("url, official url, url2", _render_address),
        ("sic, sic?", _render_sic),
        ("no., number sign, numero, abbreviation no.", _render_number_sign),
        ("p., page", _wrap_renderer("p. ", "")),
        ("pp.", _wrap_renderer("pp. ", "")),
        ("vol.", _wrap_renderer("vol. ", "")),
        ("isbn", _wrap_renderer("ISBN ", "")),
        ("see above", _wrap_renderer("(see above", ")")),
        ("see below", _wrap_renderer("(see ", ")")),
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
