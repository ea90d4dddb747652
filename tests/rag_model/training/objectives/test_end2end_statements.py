"""Statements, read from a file or sampled from the first sentences of pages."""

from pathlib import Path

import pytest

from rag_model.errors import InputError
from rag_model.store.store import Store
from rag_model.training.objectives.end2end import Statement, get_first_sentence, read_statements, sample_leads
from tests.fixtures.tiny import save_bert
from tests.fixtures.tiny_snapshot import publish_tiny


def test_reads_statements_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "statements.jsonl"
    path.write_text('{"statement": "The  king\\nwas born."}\n{"id": "b", "statement": "He died."}\n')
    assert read_statements(str(path)) == [Statement("0", "The king was born."), Statement("b", "He died.")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"statement": "one"}\n{"statement": ""}\n', "line 2 has no statement"),
        ('{"text": "one"}\n', "line 1 has no statement"),
        ("", "holds no statement"),
        ("{", "statements.jsonl"),
    ],
)
def test_file_without_statements_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "statements.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_statements(str(path))
    with pytest.raises(InputError, match="cannot be read"):
        read_statements(str(tmp_path / "none.jsonl"))


def test_leads_are_the_first_sentences_of_pages(tmp_path: Path) -> None:
    articles = {f"City {n}": f"City {n} is a city of kings. It has a river." for n in range(9)}
    articles["Short"] = "Too short."
    (tmp_path / "work").mkdir()
    store = Store.open(str(tmp_path / "store"), create=True)
    snapshot = publish_tiny(store, save_bert(tmp_path / "bert"), articles, tmp_path / "work")
    all_leads = [Statement(str(n + 1), f"City {n} is a city of kings.") for n in range(9)]
    assert sample_leads(snapshot, 100, seed=1) == all_leads
    samples = [sample_leads(snapshot, 4, seed) for seed in (1, 1, 2)]
    assert samples[0] == samples[1] != samples[2]
    assert all(len(sample) == 4 and {*sample} <= {*all_leads} for sample in samples)


def test_text_without_a_full_stop_is_one_sentence() -> None:
    assert (get_first_sentence("no end  at all"), get_first_sentence("")) == ("no end at all", "")
