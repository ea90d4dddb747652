"""Statements of a file and of a corpus's leads."""

from pathlib import Path

import pytest

from rag_model.errors import InputError
from rag_model.store.store import Store
from rag_model.training.objectives.end2end import Statement, first_sentence, read_statements, sample_leads
from tests.fixtures.tiny import save_bert
from tests.fixtures.tiny_snapshot import publish_tiny


def test_lines_of_a_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "statements.jsonl"
    path.write_text('{"statement": "The  king\\nwas born."}\n{"id": "b", "statement": "He died."}\n')
    assert read_statements(str(path)) == [Statement("0", "The king was born."), Statement("b", "He died.")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"statement": "one"}\n{"statement": ""}\n', "line 2 has no statement"),
        ('{"text": "one"}\n', "line 1 has no statement"),
        ("", "holds no statement"),
        ("{", "statements.jsonl"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "statements.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=said):
        read_statements(str(path))
    with pytest.raises(InputError, match="cannot be read"):
        read_statements(str(tmp_path / "none.jsonl"))


def test_leads_are_the_first_sentences_of_pages(tmp_path: Path) -> None:
    articles = {f"City {n}": f"City {n} is a city of kings. It has a river." for n in range(9)} | {
        "Short": "Too short."
    }
    (tmp_path / "work").mkdir()
    store = Store.open(str(tmp_path / "store"), create=True)
    snapshot = publish_tiny(store, save_bert(tmp_path / "bert"), articles, tmp_path / "work")
    every = [Statement(str(n + 1), f"City {n} is a city of kings.") for n in range(9)]
    assert sample_leads(snapshot, 100, seed=1) == every
    drawn = [sample_leads(snapshot, 4, seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(len(some) == 4 and {*some} <= {*every} for some in drawn)


def test_a_text_without_an_end_is_one_sentence() -> None:
    assert (first_sentence("no end  at all"), first_sentence("")) == ("no end at all", "")
