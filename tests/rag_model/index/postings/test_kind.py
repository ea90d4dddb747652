from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rag_model.errors import InputError, StoreError, UsageError
from rag_model.index.build import run_stages
from rag_model.index.kind import IndexFiles, TextQuerySet, get_kind_for_factory
from rag_model.index.postings.analyzer import Analyzer
from rag_model.index.postings.kind import KIND
from rag_model.index.recipe import IndexRecipe
from rag_model.training.data.examples import build_passage
from tests.fixtures.bm25_index import build_bm25, write_parts

CORPUS = [build_passage(f"title {number}", f"Passage number {number} is of pigs.") for number in range(40)]
TRIAL = TextQuerySet([f"Passage number {row} is of pigs." for row in (3, 9)], 5, np.array([3, 9]))


def get_index_files(path: Path) -> IndexFiles:
    return IndexFiles(path, list, len(CORPUS))


def test_plan_records_how_words_are_analyzed() -> None:
    plan = get_kind_for_factory("BM25").plan(IndexRecipe("BM25", search={"k1": 1.2}), 40, 0)
    entry = plan.entry()
    assert (entry["kind"], entry["search"]) == ("bm25", {"k1": 1.2, "b": 0.4})
    assert entry["settings"]["language"] == "english"
    german = KIND.plan(IndexRecipe("BM25", settings={"language": "german"}), 40, 0)
    assert german.piece_inputs() != plan.piece_inputs(), "pieces depend on the stemmer"


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"settings": {"stemmer": "x"}}, "stemmer is not a setting of BM25: it takes language"),
        ({"settings": {"language": "klingon"}}, "there is no stemmer for 'klingon'"),
        ({"search": {"k1": "much"}}, "k1 of BM25 is 'much': give a number from 0 to 1000"),
        ({"search": {"efSearch": 3}}, "efSearch is not a search parameter of BM25"),
        ({"recall_target": 0.9}, "recall_target does not apply to BM25"),
    ],
)
def test_wrong_settings_are_refused(recipe: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        IndexRecipe("BM25", **recipe)  # type: ignore[arg-type]


def test_the_gate_measures_exactness_and_misses_no_word(tmp_path: Path) -> None:
    index = build_bm25(CORPUS, tmp_path)
    entry = KIND.plan(IndexRecipe("BM25"), len(CORPUS), 0).entry()
    result = KIND.measure(get_index_files(index.file.path), entry, TRIAL)
    assert result.recalls.tolist() == [1, 1]
    assert result.metrics["source@5"] == 1
    other_index = build_bm25([build_passage("", "cows")] * 40, tmp_path / "others")
    with pytest.raises(InputError, match="lacks the term 'passag' of a passage: build it again"):
        KIND.measure(get_index_files(other_index.file.path), entry, TRIAL)


def test_an_index_of_another_analyzer_is_refused(tmp_path: Path) -> None:
    index = build_bm25(CORPUS, tmp_path)
    entry = KIND.plan(IndexRecipe("BM25"), len(CORPUS), 0).entry()
    entry["settings"]["analyzer"] = "sha256:other"
    with pytest.raises(StoreError, match="built by another analyzer of english words than PyStemmer"):
        KIND.open(get_index_files(index.file.path), entry)


def test_an_index_of_an_older_version_keeps_its_words(tmp_path: Path) -> None:
    """Version 1 only removed accents. A later build does not derive its file from a file of version 1."""
    corpus = [build_passage("", "Łódź"), build_passage("", "Köln")]
    newest = KIND.plan(IndexRecipe("BM25"), len(corpus), 0)
    older = replace(newest, settings={"language": "english", "analyzer": Analyzer(version=1).fingerprint})
    rows_by_plan = {}
    for name, plan in (("newest", newest), ("older", older)):
        (work := tmp_path / name).mkdir()
        parts, out = write_parts(corpus, [1], work), work / "bm25.postings"
        run_stages(plan, parts, out, work)
        index = KIND.open(IndexFiles(out, list, len(corpus)), plan.entry())
        rows_by_plan[name] = [index.search([query], 1)[1].item() for query in ("ŁÓDŹ", "lodz", "koln")]
    assert rows_by_plan == {"newest": [0, 0, 1], "older": [0, -1, 1]}
    assert older.piece_inputs() != newest.piece_inputs()
    rows = np.arange(len(corpus))
    assert KIND.derive(older.entry(), newest.entry(), out, rows, lambda _: iter(()), tmp_path / "derived") is None


def test_pieces_that_lack_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the pieces have 0 rows, but the plan has 40: build them again"):
        KIND.merge(KIND.plan(IndexRecipe("BM25"), 40, 0), tmp_path, [], [], [], tmp_path / "out")
