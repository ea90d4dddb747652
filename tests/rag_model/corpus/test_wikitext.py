"""Wikitext is cleaned to the visible text of each section, for any page."""

import re
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.corpus.dump_formats.mediawiki import FORMAT as MEDIAWIKI
from rag_model.corpus.plan import plan_dump
from rag_model.corpus.records import Section, Siteinfo, UnparsablePageError
from rag_model.corpus.wikitext import MAX_CHARS, clean_wikitext
from tests.fixtures.work_counters import measure_peaks

ENGLISH = Siteinfo(
    "enwiki", "en", "https://en.wikipedia.org/wiki/Main_Page", {"": 0, "file": 6, "category": 14, "help": 12}
)
BULGARIAN = Siteinfo("bgwiki", "bg", "https://bg.wikipedia.org/wiki/", {"файл": 6, "картинка": 6, "категория": 14})
RESIDUE = re.compile(r"\{\{|\}\}|\{\||\|\}|<ref|</|'''|&nbsp;|__TOC__|thumb\||<!--")
BRACKETS = re.compile(r"\[\[|\]\]")  # MediaWiki shows unmatched brackets


def read_text(wikitext: str, site: Siteinfo = ENGLISH) -> str:
    """Return the text of a page, with each heading on its own line."""
    return "\n".join(
        filter(None, (part for s in clean_wikitext(wikitext, site, "Title") for part in (s.heading, s.text)))
    )


@pytest.mark.parametrize(
    ("wikitext", "expected"),
    [
        ("'''Bold''' and ''italic'' and '''''both'''''", "Bold and italic and both"),
        ("L''''amour''' and the dogs' '''bones'''", "L'amour and the dogs' bones"),
        ("a [[link]], [[target|words]], [[bus]]es, [[Help:Page]], [[:Category:Cats]]",
         "a link, words, buses, Help:Page, Category:Cats"),
        ("[[Mercury (planet)|]] and [[#Later|below]]", "Mercury and below"),
        ("[[File:A.jpg|thumb|left|A [[cat]] and {{convert|1|mi}}]]Text", "Text"),
        ("[[Image:A.jpg|200px|with [http://a.org a link]]]Text", "Text"),
        ("[[Category:Cats]][[de:Katze]]Text[[Category:Pets|*]]", "Text"),
        ("[[wikt:cat|cat]] and [[doi:10.1/2]]", "cat and doi:10.1/2"),
        ("see [http://a.org/x?y=1 the site], [http://b.org] and [//c.org it]", "see the site, and it"),
        ("[mailto:a@b.c write], [sic: this]", "write, [sic: this]"),
        ("H<sub>2</sub>O, 10<sup>6</sup>, km<sup>2</sup>, 19<sup>th</sup>, x<sup>ab1</sup>, "
        "m<sup>&minus;2</sup>",
         "H2O, 10⁶, km², 19th, x^(ab1), m⁻²"),
        ("<div class='a'>One<br/>two<p>three</p></div>", "One\ntwo\nthree"),
        ("a <span style='display:none'>0001</span><b>1</b> <small>x</small> 1 < 2 > 0", "a 1 x 1 < 2 > 0"),
        ("Fish &amp; chips&nbsp;&ndash; &#233;&#xe9; &lt;b&gt; &bogus; AT&T",
        "Fish & chips – éé <b> &bogus; AT&T"),
        ("<nowiki>[[no]] {{link}} ''here''</nowiki> '''b'''", "[[no]] {{link}} ''here'' b"),
        ("a<nowiki/>'' b'' {<nowiki/>{c}}", "a b c"),
        ("<math>x_1,\\dotsc,x_n</math> have mean <math>\\bar{x}</math>", "x_1,…,x_n have mean x\u0304"),
        ("<math>\\frac{(3+5)}{2}</math>", "(3+5)/2"),
        ("x <math>E = mc^2</math>, <math>\\frac{a}{b_{1}}</math>", "x E = mc², a/b_1"),
        ("<math>\\alpha \\le \\sqrt{x+1}</math> <math>\\begin{matrix}1\\end{matrix}</math>end",
        "α ≤ √(x+1) end"),
        ("code <code>a = b[1]</code>; <syntaxhighlight inline>{{x}}</syntaxhighlight>.",
        "code a = b[1]; {{x}}."),
        ("A<source lang='c'>int a[] = {{1}};</source>B<pre>\n|x|\n</pre>C", "ABC"),
        ("A.<ref>{{cite web|url=x}}</ref> B.<ref name=a /> C.<ref name='b'>[[x]] <b>y</ref>", "A. B. C."),
        ("A.<ref name=x>never closed", "A.never closed"),
        ("A.<ref name=x and no end", "A."),
        ("a<!-- hidden [[ --> b <!-- {{ -->c", "a b c"),
        ("seen <!-- never closed [[x]]", "seen"),
        ("__NOTOC__A__FORCETOC__ __init__", "A __init__"),
        ("* one\n* two\n** deeper\n# first\n: indented", "one\ntwo\ndeeper\nfirst\nindented"),
        ("; term : its meaning\n; other\n: meaning", "term: its meaning\nother\nmeaning"),
        ("above\n----\nbelow", "above\nbelow"),
        ("{|\n! a !! b\n|-\n| [[c]] || d\n|}\nText", "Text"),
        ("{| class=x\n| a\n{|\n| nested\n|}\n| b\n|}\nText", "Text"),
        (":{|\n|a\n|}Text", "Text"),
        ("Before\n{|\n| cell\n|-\n| cell", "Before"),
        ("<table><tr><td>x<table></table></td></tr></table>Text", "Text"),
        ("<gallery>\nFile:a.jpg|b\n</gallery>Text<timeline>x</timeline>", "Text"),
        ("Ada ({{IPA-xx|}}; born 1815), ( , ) and ()", "Ada (born 1815), and"),
        ("{{nowrap|'''}}bold{{nowrap|'''}}", "bold"),
        ("''{{unknown}}'' and '''{{unknown}}''' x", "and x"),
        ("a {{unclosed|text", "a text"),
        ("a [[unclosed|text", "a [[unclosed|text"),
        ("a }} b ]] c |} d", "a b ]] c d"),
        ("{{small|[[a}} b", "a b"),
        ("{{{1|default}}} and {{{2}}}", "default and"),
        ("\ufeffzero\u200bwidth\u00ad\u00a0space\u2003wide", "zerowidth space wide"),
        ("\ufdd0\ufdd0x\ufdd1\ufdd1", "x"),
        ("It cost $191,000 ({{inflation|US|191000|1914}}). Next", "It cost $191,000. Next"),
        ("In Taverley ({{level|Cooking|10}}), there is ( {{cn}} ) one", "In Taverley (Cooking), there is one"),
        ("人口は{{自治体人口/滋賀県|date}}現在。散文{{NoteTag|注である。}}の分界。", "人口は現在。散文の分界。"),
        ("<tabber>One=''a''\n* b|-|Two=[[c|d]]</tabber> e", "One\na\nb\nTwo\nd\ne"),
        ("<langconvert from='zh' to='zh-hans'>[[a|b]]</langconvert> c", "b c"),
        ("a\n | b\n|}\n|-\n| c", "a\n| b\n| c"),
        ("a {{small option|nolink}} b {{largeur|12}}", "a b 12"),
        ("«{{нп|Життя||en|Life}}» і {{не перекладено|Пансіон|Пансіоні|ru|X}}", "«Життя» і Пансіоні"),
        ("до −42&nbsp;{{градус Цельсія}}.", "до −42 °C."),
        ("[[甲]]、{{le|乙|B}}、{{link-en|丙|C}}、{{tsl|en|D|丁}}、{{le|戊|E|己}}等。", "甲、乙、丙、丁、己等。"),
        ("sense and thinking .<ref>a</ref> The 5 ;<ref/>\nB ,{{sfn|c}} d . e", "sense and thinking. The 5;\nB, d . e"),
        ("<math>a</sup>b</math>", "ab"),
        ("10<sup>}}6</sup>, a<sup>}}</sup>, b<sup>__TOC__</sup>", "10⁶, a, b"),
        (";a:b\n; c :d\n;;e::f\n; [[g|h: i]] : j\n;http://a.org/b:c :k\n;news:a.b :c\n;a::b",
         "a: b\nc: d\ne: f\nh: i: j\nhttp://a.org/b:c: k\nnews:a.b: c\na: :b"),
        ("[[a|b [[c]] d]] [[[[e]]]] [[f<b]] [[g{h|i]] [[j&#124;k]] [[l&amp;amp;m]] [[|n]] [[::o]] [[p%5Bq]]",
         "[[a|b c d]] [[e]] [[f<b]] [[g{h|i]] [[j|k]] [[l&amp;m]] [[|n]] [[::o]] [[p%5Bq]]"),
        ("[[r#s&#124;t]] [[100%25]] [[u]v]] [[https://a.org]] [[https://a.org w]] [[news:a]] [[x]]]]",
         "r#s|t 100% [[u]v]] [w] x]]"),
        ("[[Help:]] [[:File:#a|b]] [[Help:#c]] [[Help me:#d]]", "[[Help:]] [[:File:#a|b]] [[Help:#c]] Help me:#d"),
        ("[https:// a] [//a.org <i title='[b]'>c</i> [d] e]", "[https:// a] c [d e]"),
        ("[ssh://a b] [sms:12 c] [http://a.org/d&lt;e f] [http: g]", "b c <e f [http: g]"),
        ("&#00; &#xD; &#150; &#xD83D; &#x110000; &#x0000063;&#000000065;a&רלמ;b",
         "&#00; &#xD; &#150; &#xD83D; &#x110000; cAab"),
        ("f() and f({{unknown}}) and <nowiki>a <nowiki>b</nowiki> c</nowiki> <nowiki>d",
         "f() and f and a <nowiki>b c</nowiki> <nowiki>d"),
        ("* *a*b\n*b\n----*c", "*a*b\nb\n*c"),
        ("[[A{{!}}b]] [[C| ]][[D |e]] [[I%27s%20J]] [[K%]]", "b e I's J K%"),
        ("<nowiki>[</nowiki>[http://a.org b]] [http://[2404:130::2]/c d]", "[b] d"),
        ("[[[a b|c]]] [[[d]]] |}e\n|}f", "[[[a b|c]]] [[[d]]] e\nf"),
        ("a<div style='display:none'>b<br>x</div>c <p style=\"display: none\"><i>d</i></p>e", "ac e"),
        ("<onlyinclude>a</onlyinclude><includeonly>b</includeonly><noinclude>c</noinclude>", "ac"),
    ],
)  # fmt: skip
def test_markup_is_replaced_by_visible_text(wikitext: str, expected: str) -> None:
    assert read_text(wikitext) == expected


def test_headings_start_sections() -> None:
    page = "Lead.\n== First ''one'' ==\nA.\n=== [[Deeper|Below]] ===\nB.\n==Empty==\n==Last==\nC."
    assert clean_wikitext(page, ENGLISH) == (
        Section("", "Lead."),
        Section("First one", "A."),
        Section("Below", "B."),
        Section("Last", "C."),
    )


def test_prose_in_reference_sections_is_kept() -> None:
    page = (
        "Lead.\n== Culture ==\n=== Literature ===\nNizami Ganjavi was a [[poet]].{{sfn|Rypka|1968}}\n"
        "* {{cite book|title=A book.}}\n* Annotated: this book tells of the poets.\n"
        "==== Modern ====\nMirza Fatali wrote ''Hekayat'' (1850), ''Aldanmis'' (1857) and comedies.\n"
        "==== Books ====\n* A\n=== Music ===\n* Mugham\n"
        "== Sources ==\nThe Kura has its sources in Turkey.\n== References ==\n{{reflist}}\n"
    )
    sections = (
        Section("", "Lead."),
        Section("Literature", "Nizami Ganjavi was a poet."),
        Section("Modern", "Mirza Fatali wrote Hekayat (1850), Aldanmis (1857) and comedies."),
        Section("Music", "Mugham"),
        Section("Sources", "The Kura has its sources in Turkey."),
    )
    assert clean_wikitext(page, ENGLISH) == sections
    with_links = clean_wikitext(page, ENGLISH, anchors=True)
    assert [section.text[slice(*span)] for section in with_links for span in section.links] == ["poet"]


@pytest.mark.parametrize(
    ("language", "heading", "sentence"),
    [
        ("de", "Literatur", "Thomas Mann schrieb Romane."),
        ("de", "Quellen", "Der Fluss hat zwei Quellen im Schwarzwald, die sich in Donaueschingen vereinen."),
        ("fr", "Notes", "Les notes de musique sont au nombre de sept."),
        ("es", "Fuentes", "La ciudad tiene tres fuentes del siglo XVII."),
        ("it", "Fonti", "Le fonti del Nilo furono cercate per secoli."),
        ("ru", "Литература", "Первый роман на этом языке вышел в 1899 году."),
        ("bg", "Източници", "Реката има три източници в Рила."),
        ("bn", "তথ্যসূত্র", "এই নদীর উৎস পাহাড়ে।"),
        ("el", "Πηγές", "Ο ποταμός έχει δύο πηγές."),
        ("nb", "Kilder", "Elven har to kilder."),
        ("ja", "出典", "この川は富士山に発する。"),
        ("zh", "参考文献", "這本書是第一部小說。"),
        ("ko", "각주", "이 강은 산에서 시작한다."),
        ("ar", "مصادر", "للنهر مصدران في الجبال."),
        ("en", "Links", "He asked: “Who built the links?”"),
        ("ur", "حوالہ جات", "یہ دریا پہاڑوں سے نکلتا ہے۔"),
        ("is", "Heimildir", "Áin á sér tvær heimildir."),
        ("bar", "Weblinks", "Da Fluss hod zwoa Quain."),
    ],
)
def test_prose_is_kept_in_each_language(language: str, heading: str, sentence: str) -> None:
    page = f"== {heading} ==\n{sentence}\n* [[A]], B. 1990.\n"
    assert clean_wikitext(page, Siteinfo("wiki", language, "")) == (Section(heading, sentence),)


@pytest.mark.parametrize(
    "line",
    [
        "* A long annotation of a book, which says in a whole sentence what it is about.",
        "# First note.",
        ": Quoted words.",
        "; Term.",
        "<ul><li>An item of a list.</li></ul>",
        "{{cite book|title=A book. Its subtitle.|year=1990}}",
        "{{cite book\n| title=A book.\n| publisher = A house.\n}}",
        "{{refbegin}}\n* A book.\n{{refend}}",
        "[[Category:St. Louis]]",
        "[[Portal:History of the U.S.]]",
        "[http://a.org The home page]",
        "'''Multimedia'''",
        "NASA reports:",
        "David Birmingham, African Affairs, Vol. 77, No. 309 (Oct., 1978), pp. 554–564",
        "Mann, Noel, Wendy Smith and Eva Ujlakyova. 2009. ''Linguistic clusters: an overview of the "
        "language families.'' Chiang Mai: Payap University.",
        "Smith, J. (2009). The effect of the weather on the growth of plants. ''Botany'', 3(2).",
        "Rypka, Jan: ''History of Iranian Literature''. Dordrecht.",
        "A history of the world in two volumes, ISBN 0-306-40615-2.",
        "The weather of the coast, p. 12.",
    ],
)
def test_references_links_and_list_items_are_dropped(line: str) -> None:
    for heading in ("Literature", "See also", "External links", "Further reading", "Notes"):
        assert clean_wikitext(f"== {heading} ==\n{line}\n=== More ===\n{line}", ENGLISH) == ()


@pytest.mark.parametrize(
    ("language", "heading"),
    [
        ("bn", "আরও দেখুন"),
        ("el", "Δείτε επίσης"),
        ("nb", "Se også"),
        ("pt-BR", "Ligações externas"),
        ("en", "Other websites"),
        ("eu", "Ikus, gainera"),
        ("hy", "Տես նաև"),
        ("ka", "იხილეთ აგრეთვე"),
        ("sw", "Viungo vya nje"),
        ("vo", "I logolöd:"),
    ],
)
def test_lists_of_links_are_dropped_in_each_language(language: str, heading: str) -> None:
    assert clean_wikitext(f"== {heading} ==\n* [[A]]", Siteinfo("wiki", language, "")) == ()


@pytest.mark.parametrize("language", ["lo", "ltg", "de", "xx"])
def test_lists_of_external_links_are_dropped_under_any_heading(language: str) -> None:
    site = Siteinfo("wiki", language, "")
    page = "Lead.\n== ລິ້ງ ==\n* [http://a.org Home page]\n* [//b.org/map Map] (in Lao)\n"
    assert clean_wikitext(page, site) == (Section("", "Lead."),)
    assert len(clean_wikitext(page + "A sentence.", site)) == 2
    assert len(clean_wikitext("== Works ==\n* ''A book'', [http://a.org 1990]", site)) == 1


def test_sections_without_prose_are_dropped_with_their_subsections() -> None:
    page = "Lead.\n==See also==\n*x\n===Books===\n*y\n==Life==\nA.\n==External links==\n[http://a b]\n"
    page += "== Notes, citations, and references: ==\nn"
    assert [section.heading for section in clean_wikitext(page, ENGLISH)] == ["", "Life"]


def test_namespaces_and_headings_follow_the_language() -> None:
    page = "[[Файл:А.jpg|мини|надпис]][[Категория:Б]]Текст.\n== Източници ==\nи\n== Живот ==\nж"
    assert clean_wikitext(page, BULGARIAN) == (Section("", "Текст."), Section("Живот", "ж"))


@pytest.mark.parametrize(
    ("heading", "shown_heading"),
    [("{{Wortart|Ort|Deutsch}}, {{m}}", "Ort"), ("{{m}}, {{n}}", ""), ("C++", "C++"), ("?", "")],
)
def test_heading_is_cleaned(heading: str, shown_heading: str) -> None:
    assert clean_wikitext(f"== {heading} ==\nA.", ENGLISH) == (Section(shown_heading, "A."),)


@pytest.mark.parametrize(("language", "text"), [("en", "From Greek: γῆ."), ("uk", "From γῆ."), ("", "From Greek: γῆ.")])
def test_language_name_is_shown_in_english_wikis(language: str, text: str) -> None:
    for markup in ("{{lang-el|γῆ}}", "{{langx|el|γῆ}}"):
        assert read_text(f"From {markup}.", Siteinfo("wiki", language, "")) == text


def test_unclosed_markup_ends_with_its_section() -> None:
    assert read_text("a {{lost|b\n== Next ==\nc [[d]] e") == "a b\nNext\nc d e"


def test_empty_page_has_no_sections() -> None:
    assert clean_wikitext("", ENGLISH) == clean_wikitext("{{stub}}\n<!-- -->\n", ENGLISH) == ()


def test_too_long_page_is_reported() -> None:
    with pytest.raises(UnparsablePageError, match="characters"):
        clean_wikitext("x" * (MAX_CHARS + 1), ENGLISH)


def test_words_of_deeply_nested_markup_are_kept() -> None:
    """Anyone can write such a page, so it must neither be lost nor counted as damaged."""
    assert set(read_text("a " + "{{small|" * 1000 + "b").split()) == {"a", "small", "b"}
    assert read_text("a " + "{" * 1000 + "b" + "}" * 1000 + " c") == "a b c"
    nested = read_text("a " + "<!-" * 50 + "-" * 50 + " b")
    assert not RESIDUE.search(nested)
    assert nested[0] == "a"  # the text after the last "<!-" and "-" is an unclosed comment


def show_nested_page(number: int) -> None:
    page = f"{'b' * 100_000} {number}"
    for depth in range(90):
        page = f"{{{{{'lc' if depth % 2 else 'uc'}:{depth} {page}}}}}"
    read_text(page)


def show_nested_pages(first: int, last: int) -> None:
    for number in range(first, last):
        show_nested_page(number)


def test_very_long_names_are_not_cached() -> None:
    """Each page has 90 names of 100 kB; caching them would need more memory for each further page."""
    _, one_page, four_pages = measure_peaks(*(partial(show_nested_pages, *span) for span in ((0, 1), (1, 2), (2, 6))))
    assert four_pages < one_page + (1 << 20), (one_page, four_pages)


@pytest.mark.parametrize("key", ["²", "0", "9" * 5_000, "\u0661"])
def test_invalid_position_is_a_parameter_name(key: str) -> None:
    assert read_text(f"a {{{{hlist|b|{key}=x|2=c}}}} d {{{{langx|fr|e|{key}=x}}}}") == "a b, c d French: e"


HOSTILE = {
    "open templates": "{{", "spaced templates": "{{ ", "named templates": "{{a|", "citations": "{{cite web|",
    "closing braces": "}}", "open links": "[[", "piped links": "[[a|", "closing links": "]]",
    "tables": "{|\n",
    "html tables": "<table>", "references": "<ref>", "cut references": '<ref name="a" ', "comments": "<!--",
    "nowiki": "<nowiki>", "math": "<math>", "tags": "<div ", "less": "<", "sup": "<sup>",
    "hidden": "<span display:",
    "words": "word ", "letters": "a", "headings": "= =", "heading lines": "==\n", "quotes": "'",
    "ampersands": "&amp",
    "brackets": "(", "empty brackets": "(, ,;", "commas": " ,", "blanks": " ", "lines": "\n ", "nbsp": "\xa0",
    "external": "[http://a ", "external blanks": "[http://a\t\t\t\t", "lists": "*", "terms": "; a : ",
    "bars": "|",
    "cells": "\n|", "bangs": "!", "switches": "__A", "mixed": "{{[[", "crossed": "{{a|[[b}}",
    "variants": "-{",
    "parameters": "{{{", "noncharacters": "\ufdd0",
}  # fmt: skip


@pytest.mark.timeout(60)  # quadratic code would take hours
@pytest.mark.parametrize("unit", HOSTILE.values(), ids=HOSTILE)
def test_hostile_markup_is_linear(unit: str) -> None:
    assert sum(len(section.text) for section in clean_wikitext(unit * 50_000, ENGLISH)) <= len(unit) * 50_000


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("before", "middle", "after"),
    [
        ("{{small|", "x", "}}"), ("[[a|", "x", "]]"), ("{|\n", "|x\n", "\n|}"), ("<table>", "x", "</table>"),
        ("{{{1|", "x", "}}}"), ("<ref>", "x", "</ref>"), ("{", "|x", "}"), ("(", ",", ")"), ("<div>", "x",
        "</div>"),
    ],
)  # fmt: skip
def test_deeply_nested_markup_is_linear(before: str, middle: str, after: str) -> None:
    page = before * 100_000 + middle + after * 100_000
    assert sum(len(section.text) for section in clean_wikitext(page, ENGLISH)) <= len(page)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "page",
    [
        "[http://a" + " " * 200_000, "=" + " " * 200_000 + "x", ";" + "a " * 200_000,
        "{{hlist" + "|a" * 200_000 + "}}",
        "{{convert|" + "9" * 200_000 + "|km}}",
        "{{convert|" + "3x" * 100_000 + "|km}}", "{{convert|1" + "|to|1" * 100_000 + "|mi}}",
        "{{birth date|" + "1" * 200_000 + "|1|1}}", "{{formatnum:" + "1" * 200_000 + "}}",
        "{{" + "a " * 200_000 + "}}",
        "[[a " + "( " * 200_000 + "|]]", "<span display:" + " " * 200_000,
        "<math>" + "{" * 200_000 + "</math>",
        "x" + "{[" * 100_000 + "y" + "]}" * 100_000, "&#" + "1" * 200_000 + ";",
        "{{e|" + "9" * 200_000 + "}}",
    ],
    ids=lambda page: page[:14],
)  # fmt: skip
def test_huge_pieces_of_markup_are_linear(page: str) -> None:
    assert sum(len(section.text) for section in clean_wikitext(page, ENGLISH)) <= 8 * len(page)


TOKENS = [
    "{{", "}}", "{{{", "}}}", "[[", "]]", "{|", "|}", "|", "\n", "\n|", "\n|-\n", "=", "\n== h ==\n", "'''",
    "''", "<ref>",
    "</ref>", "<ref name=a/>", "<!--", "-->", "<br>", "<sup>", "</sup>", "<table>", "</table>", "<math>",
    "</math>", "[", "]",
    "http://a.b", "File:", "Category:", "convert", "lang", "5", "1/2", "km", "mi", "word ", "é", "(", ")",
    ",", "\n*", "\n;",
    ":", "__TOC__", "-{", "}-", "nihongo", "quote", "hlist", "cite web", "{", "}", " ", "formatnum:",
    "birth date", "val", "to",
]  # fmt: skip


@given(st.lists(st.sampled_from(TOKENS), max_size=60).map("".join))
def test_any_markup_gives_text_without_residue(wikitext: str) -> None:
    # Formulas keep their brackets, and MediaWiki shows some of more than five apostrophes.
    without_formulas = re.sub(r"<math>.*?</math>", "", wikitext, flags=re.DOTALL)
    assert not RESIDUE.search(read_text(without_formulas).replace("'", " "))


@given(st.text(max_size=300))
def test_any_text_is_cleaned_and_stays_clean(text: str) -> None:
    sections = clean_wikitext(text, ENGLISH)
    assert all(section.text == section.text.strip() and section.text for section in sections)
    assert "\n\n" not in read_text(text)


@given(st.lists(st.from_regex(r"[a-z]{1,8}", fullmatch=True), min_size=1, max_size=30))
def test_plain_words_do_not_change(words: list[str]) -> None:
    assert read_text(" ".join(words)).split() == words


@given(st.lists(st.from_regex(r"[a-z]{1,8}", fullmatch=True), min_size=1, max_size=8), st.data())
def test_no_word_inside_markup_is_lost(words: list[str], data: st.DataObject) -> None:
    wraps = ["{}", "''{}''", "'''{}'''", "[[{}]]", "[[a|{}]]", "{{{{nowrap|{}}}}}", "<b>{}</b>",
    "{}<ref>r</ref>",
             "{{{{small|[[x|{}]]}}}}", "[http://a {}]", "{}{{{{sfn|a}}}}", "{}<!-- c -->",
             "{{{{lang|fr|{}}}}}"]  # fmt: skip
    page = " ".join(data.draw(st.sampled_from(wraps)).format(word) for word in words)
    assert read_text(page).split() == words


def test_real_dump_has_no_residue(demo_dump: Path, tmp_path: Path) -> None:
    plan = plan_dump(str(demo_dump), workdir=tmp_path, stage=str)
    residue: dict[str, str] = {}
    pages = 0
    for part in plan.parts:
        for page in MEDIAWIKI.read(part):
            if page.namespace or page.redirect:
                continue
            pages += 1
            for section in clean_wikitext(page.text, plan.siteinfo, page.title):
                residue.update(dict.fromkeys(RESIDUE.findall(section.text), page.title))
                residue.update(dict.fromkeys(BRACKETS.findall(section.text), page.title))
    assert pages > 100
    assert not residue
