"""Templates become the words a reader sees: real uses beside what Wikipedia shows for them."""

from pathlib import Path

import pytest

from rag_model.corpus.records import Siteinfo
from rag_model.corpus.wikitext import clean_wikitext

CASES = [
    line.replace("\\n", "\n").split("\t")
    for line in (Path(__file__).parent / "template_cases.tsv").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]
SITE = Siteinfo("enwiki", "en", "https://en.wikipedia.org/wiki/Main_Page", {"file": 6, "category": 14})


def test_there_are_enough_cases() -> None:
    assert len({wikitext for wikitext, _ in CASES}) >= 150


@pytest.mark.parametrize(("wikitext", "expected"), CASES, ids=[case[0][:50] for case in CASES])
def test_a_template_shows_its_words(wikitext: str, expected: str) -> None:
    (lead,) = clean_wikitext(wikitext, SITE, "Title")
    assert lead.text == expected
