"""Templates are replaced by the words that Wikipedia shows for them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_model.corpus.records import Siteinfo
from rag_model.corpus.wikitext import clean_wikitext


def read_cases(name: str) -> list[list[str]]:
    lines = (Path(__file__).parent / name).read_text(encoding="utf-8").splitlines()
    return [line.replace("\\n", "\n").split("\t") for line in lines if not line.startswith("#")]


CASES, CONVERT_CASES = read_cases("template_cases.tsv"), read_cases("convert_cases.tsv")
SITE = Siteinfo("enwiki", "en", "https://en.wikipedia.org/wiki/Main_Page", {"file": 6, "category": 14})


def test_case_file_is_large_enough() -> None:
    assert len({wikitext for wikitext, _ in CASES}) >= 150


@pytest.mark.parametrize("cases", [CASES, CONVERT_CASES], ids=["templates", "measures"])
def test_templates_give_the_words_of_wikipedia(cases: list[list[str]]) -> None:
    results = [
        [wikitext, *(section.text for section in clean_wikitext(wikitext, SITE, "Title"))] for wikitext, _ in cases
    ]
    assert [pair for pair in zip(results, cases, strict=True) if pair[0] != pair[1]] == []


REMARK = "how is this working out in practice? The law is one thing; but what happens"
UNKNOWN_CASES = [
    # Links to other wikis have several orders of parameters.
    ("ja", "小説「{{仮リンク|県|en|Adam Bede}}」の", "小説「県」の"),
    ("ja", "* {{ill2|甲|en|B|label=乙}}、{{仮リンク|The Old Man and the Sea|en|X}}", "乙、The Old Man and the Sea"),
    ("ja", "{{仮リンク|県|en|Prefecture}}", "県"),
    ("zh", "包括{{tsl|en|D|丁}}、{{link-en|丙|C}}等", "包括丁、丙等"),
    ("uk", "«{{нп|Життя||en|Life}}» і {{langi|fr|Charlotte d'Armont}}", "«Життя» і Charlotte d'Armont"),
    # Dates and units in the language of the page.
    ("uk", "Він ({{ДН|27|1|1839}} — {{ДС|14|1|1884|2}}) жив", "Він (27 січня 1839 — 14 січня 1884) жив"),
    ("ja", "生まれ{{生年月日|1839|1|27}}。", "生まれ1839年1月27日。"),
    ("bn", "({{birth date|df=yes|১৯২০|৩|১৭}})", "(17 মার্চ 1920)"),
    ("es", "En {{death date and age|2000|5|2|1920|1|1}}", "En 2 mayo 2000 (80)"),
    ("fr", "Le {{date|14|juillet|1789}} et le {{date|14|7|1789}}", "Le 14 juillet 1789 et le 14 juillet 1789"),
    ("fr", "en {{date||juillet|1789}}, {{date|juillet|1789|en musique}}", "en juillet 1789, juillet 1789 en musique"),
    ("fr", "le {{date|14|juillet}}, le {{date|1er|mai|1850}}", "le 14 juillet, le 1er mai 1850"),
    ("fr", "né le {{date de naissance|14|juillet|1789}} et {{x|mai|1850}}", "né le 14 juillet 1789 et mai 1850"),
    ("fr", "mort le {{date de décès|14|juillet|1789|2|mai|1720}}.", "mort le."),
    ("fr", "le {{death date and age|14|juillet|1789|2|mai|1720}}", "le 14 juillet 1789 (69)"),
    ("es", "El {{fecha|14|julio|1789}}", "El 14 julio 1789"),
    ("fr", "Environ {{unité|300|km}} et {{convert|5|mi|km}}", "Environ 300 km et 5 mi (8.0 km)"),
    ("bn", "আয়তন {{রূপান্তর|306|km2|sqmi|lk=out}}।", "আয়তন 306 km²।"),
    ("bn", "এটি {{রূপান্তর|100|–|150|m|abbr=on}} উঁচু", "এটি 100–150 m উঁচু"),
    ("ja", "位置は{{ウィキ座標度分秒|33|17|03|N|044|15|22|E}}に", "位置は33°17′03″N 044°15′22″Eに"),
    # No English words in foreign text.
    ("de", "Ein {{lang-fr|mot}}, {{zh|s=汉|p=hàn}} {{flag|FRA}} {{USA}}", "Ein mot, 汉; hàn FRA USA"),
    ("de", "Nr. {{IPAc-en|us|ˈ|æ|n}} {{circa|1900}} {{born|1901}} {{p.|7}}", "Nr. /ˈæn/ c. 1900 1901 7"),
    ("bn", f"এটি{{{{স্পষ্ট করা প্রয়োজন|{REMARK}}}}}।", "এটি।"),
    # Notes, options, files and names of parameters are not words of the sentence.
    ("uk", "біля Білогороді{{ref+|Сучасне сіло Білогородка Київської області.|ком.}} є", "біля Білогороді є"),
    ("de", "Ein {{farbe|DarkRed|Wort}}{{höhe|10px}}{{ton|A.ogg}} {{x|left|richtig}}", "Ein Wort richtig"),
    ("bn", "{{বই উদ্ধৃতি|শিরোনাম=ক|বছর=১৯৯০}} ক {{x|শিরোনাম=ক}}খ", "ক খ"),
    # A template alone on a line is kept if it has prose.
    ("uk", "{{цитата|Мова росте елементарно, з душею народу.}}", "Мова росте елементарно, з душею народу."),
    ("ja", "{{col|\n* 甲\n* 乙\n}}", "甲\n乙"),
    ("uk", "{{основна стаття|Антоновичі}}\n{{картка|назва=А}}\nТекст", "Текст"),
    # In English, no words are lost.
    (
        "en",
        "has a {{railgauge|1000mm|allk=on}} line at {{coord|13|19|N|169|9|W}}",
        "has a 1000mm line at 13°19′N 169°9′W",
    ),
    ("en", "as {{wp|32-bit computing|32-bit}} {{plink|Farming cape|txt=Farming}}", "as 32-bit computing Farming"),
]


@pytest.mark.parametrize(("language", "wikitext", "expected"), UNKNOWN_CASES)
def test_unknown_template_keeps_its_words_in_each_language(language: str, wikitext: str, expected: str) -> None:
    (lead,) = clean_wikitext(wikitext, Siteinfo("wiki", language, ""))
    assert lead.text == expected


@pytest.mark.parametrize(
    ("wikitext", "expected"),
    [
        ("{{convert|10|xyz|km}}", "10 xyz"),
        ("{{convert|10|to|20|xyz}}", "10 to 20 xyz"),
        ("{{convert|10|mi|xyz}}", "10 miles"),
        ("{{convert|10|mi|kg}}", "10 miles"),
        ("{{convert|10|mi|xyz km}}", "10 miles (16 km)"),
        ("{{convert|ten|mi|km}}", "ten mi"),
        ("{{convert|5|ft|10|in|to|6|ft|2|in|cm}}", "5 feet 10 inches"),
        ("{{convert|0|mpgus|L/100 km}}", "0 miles per US gallon"),
        ("{{convert|9e99|km|fm|sigfig=3}}", "9×10⁹⁹ kilometres (9.00×10¹¹⁷ fm)"),
        ("{{convert|10|mi|nonsense|disp=unit2}}", "miles"),
    ],
)
def test_invalid_conversion_is_shown_as_written(wikitext: str, expected: str) -> None:
    (lead,) = clean_wikitext(wikitext, SITE)
    assert lead.text == expected


PIECES = [
    "5", "10", "1/2", "2+1/2", "0", "-3", "1e9", "9e99", ".5", "14.2", "to", "x", "+/-", "-",
    "by(x)", "and", "ft", "in", "mi", "km", "e6acre", "e15km", "C", "F", "K", "kg/ha", "lb", "st",
    "oz", "m", "ftin", "stlb", "hand", "mpgus", "L/100km", "koilbbl/d", "acre", "Hz", "3x4",
    "5-6", "6|ft|1|in", "km|mi", "0|", "|", "xyz", "a/b/c", "$/mi", "-long", "−2", "abbr=on",
    "abbr=off", "abbr=~", "abbr=values", "abbr=unit", "adj=on", "adj=mid", "adj=pre", "adj=ri1",
    "disp=or", "disp=x", "disp=unit", "disp=unit2", "disp=number", "order=flip", "order=out",
    "sigfig=3", "sigfig=99", "round=5", "round=each", "frac=8", "sp=us", "comma=off", "lk=on",
]  # fmt: skip


@given(st.sampled_from(["convert", "cvt"]), st.lists(st.sampled_from(PIECES), max_size=9))
def test_any_parameters_give_text(name: str, pieces: list[str]) -> None:
    (lead,) = clean_wikitext("A {{" + "|".join([name, *pieces]) + "}} b.", SITE)
    assert lead.text.startswith("A")
    assert lead.text.endswith("b.")
