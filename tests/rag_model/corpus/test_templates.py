"""Templates become the words a reader sees: real uses beside what Wikipedia shows for them."""

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


def test_there_are_enough_cases() -> None:
    assert len({wikitext for wikitext, _ in CASES}) >= 150


@pytest.mark.parametrize(("wikitext", "expected"), CASES, ids=[case[0][:50] for case in CASES])
def test_a_template_shows_its_words(wikitext: str, expected: str) -> None:
    (lead,) = clean_wikitext(wikitext, SITE, "Title")
    assert lead.text == expected


@pytest.mark.parametrize(("wikitext", "expected"), CONVERT_CASES, ids=[case[0] for case in CONVERT_CASES])
def test_a_measure_is_converted_as_in_wikipedia(wikitext: str, expected: str) -> None:
    (lead,) = clean_wikitext(wikitext, SITE)
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
def test_what_cannot_be_converted_is_shown_as_written(wikitext: str, expected: str) -> None:
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
def test_any_parameters_become_text(name: str, pieces: list[str]) -> None:
    (lead,) = clean_wikitext("A {{" + "|".join([name, *pieces]) + "}} b.", SITE)
    assert lead.text.startswith("A")
    assert lead.text.endswith("b.")
