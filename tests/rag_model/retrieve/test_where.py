"""A condition filters any retriever by the kind of the passages, and evaluation reports by kind."""

from dataclasses import replace
from pathlib import Path

import pytest

from rag_model.corpus.passages import FULL_SCHEMA, KIND_SCHEMA, PassageWriter
from rag_model.corpus.records import Passage
from rag_model.encoders.encoder import Encoder
from rag_model.errors import UsageError
from rag_model.evaluation.questions import Question
from rag_model.evaluation.retrieval.judging import RetrievalJudge, match_hits
from rag_model.retrieve.expression import add_condition
from rag_model.retrieve.factory import open_retriever
from rag_model.retrieve.hits import Hit
from rag_model.serving.http.messages import SearchRequest
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content, Manifest
from rag_model.store.versions.snapshot import Snapshot

FIRST_ROW = 5  # row of the second part, the only one whose file has kinds
TABLES, INFOBOX = {6, 11}, {8}


@pytest.fixture
def mixed_snapshot(content: tuple[Store, Content], passages: list[Passage], tmp_path: Path) -> Snapshot:
    """Publish the snapshot with tables and an infobox in its second part."""
    store, base_content = content
    kinds = {**dict.fromkeys(TABLES, "table"), **dict.fromkeys(INFOBOX, "infobox")}
    with PassageWriter(tmp_path / "part.parquet", KIND_SCHEMA) as writer:
        for row, passage in enumerate(passages[FIRST_ROW:], FIRST_ROW):
            writer.write(replace(passage, kind=kinds.get(row, "prose")))
    blob = store.blobs.put_file(tmp_path / "part.parquet")
    files = {**base_content.files, "passages/part-00001.parquet": blob}
    return Snapshot.from_store(store, store.snapshots.publish(Manifest(replace(base_content, files=files))))


@pytest.mark.parametrize("inner", ["exact", "hnsw", "rrf(hnsw, ivfpq)"])
def test_condition_keeps_the_best_passages_of_the_kind(mixed_snapshot: Snapshot, encoder: Encoder, inner: str) -> None:
    questions = ["what relieves pain?", "who wrote animal farm?"]
    all_results = open_retriever(mixed_snapshot, inner, encoder=encoder).search(questions, mixed_snapshot.n)
    for condition, rows in (
        ("kind=table", TABLES),
        ("kind=table,infobox", TABLES | INFOBOX),
        ("kind=prose", {*range(12)} - TABLES - INFOBOX),
    ):
        retriever = open_retriever(mixed_snapshot, add_condition(inner, condition), encoder=encoder)
        for k in (1, 2, mixed_snapshot.n):
            expected = [[hit for hit in hits if hit.row in rows][:k] for hits in all_results]
            results = retriever.search(questions, k)
            assert [[hit.row for hit in hits] for hits in results] == [[hit.row for hit in hits] for hits in expected]
            assert [[hit.rank for hit in hits] for hits in results] == [[*range(1, len(hits) + 1)] for hits in expected]


@pytest.fixture
def tagged_snapshot(content: tuple[Store, Content], passages: list[Passage], tmp_path: Path) -> Snapshot:
    """Publish the snapshot with metadata in its second part."""
    store, base_content = content
    with PassageWriter(tmp_path / "part.parquet", FULL_SCHEMA) as writer:
        for row, passage in enumerate(passages[FIRST_ROW:], FIRST_ROW):
            categories = "Drugs|Pain, acute" if row in TABLES else "Pain"
            item = f"Q{row}"
            language = "de" if row % 2 else "en"
            labels = {"language": language, "wikidata": item, "categories": categories}
            writer.write(replace(passage, **labels))  # type: ignore[arg-type]
    files = {**base_content.files, "passages/part-00001.parquet": store.blobs.put_file(tmp_path / "part.parquet")}
    chunk = {**base_content.recipe.get("chunk", {}), "metadata": ["categories", "language", "wikidata"]}
    recipe = {**base_content.recipe, "chunk": chunk}
    return Snapshot.from_store(
        store, store.snapshots.publish(Manifest(replace(base_content, files=files, recipe=recipe)))
    )


@pytest.mark.parametrize(
    ("condition", "rows"),
    [
        ("language=de", {row for row in range(FIRST_ROW, 12) if row % 2}),
        ("language=de,en", {*range(FIRST_ROW, 12)}),
        ("wikidata=Q7", {7}),
        ("category=Pain, acute", TABLES),
        ("category=Pain", {*range(FIRST_ROW, 12)} - TABLES),
        ("category=Pai", set[int]()),
        ("title=no such page, at all", set[int]()),
        ("title=", None),
    ],
)
def test_a_condition_compares_metadata(
    tagged_snapshot: Snapshot, encoder: Encoder, condition: str, rows: set[int] | None
) -> None:
    if rows is None:  # the first two letters of the first title
        titles = [passage.title for passage in tagged_snapshot.passages(range(tagged_snapshot.n))]
        condition += titles[0][:2]
        rows = {row for row, title in enumerate(titles) if title.startswith(titles[0][:2])}
        assert 0 < len(rows) < tagged_snapshot.n
    retriever = open_retriever(tagged_snapshot, add_condition("exact", condition), encoder=encoder)
    (hits,) = retriever.search(["what relieves pain?"], tagged_snapshot.n)
    assert {hit.row for hit in hits} == rows
    expression = "where(exact, kind=prose, language=en, category=Drugs)"
    (hits,) = open_retriever(tagged_snapshot, expression, encoder=encoder).search(["pain"], tagged_snapshot.n)
    assert {hit.row for hit in hits} == {row for row in TABLES if row % 2 == 0}
    assert hits[0].to_json()["categories"] == ["Drugs", "Pain, acute"]
    assert (hits[0].to_json()["language"], Hit.from_fields(hits[0].to_json()).wikidata) == ("en", "Q6")


def test_a_snapshot_without_kinds_is_prose(snapshot: Snapshot, encoder: Encoder) -> None:
    assert snapshot.match_rows("kind", ("prose",)).all()
    retriever = open_retriever(snapshot, "where(exact, kind=[table, list])", encoder=encoder)
    with pytest.raises(UsageError, match=r"no passages of kind table or list, only prose: .*--structures lists,tables"):
        retriever.search(["pain"], 3)
    assert len(open_retriever(snapshot, "where(kind=prose)", encoder=encoder).search(["pain"], 3)[0]) == 3


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("where(exact)", "has no condition: add kind= and one of prose, table, infobox, list"),
        ("where(exact, kind=box)", "no kind 'box' of passages: choose from prose, table"),
        ("where(exact, hnsw, kind=table)", "where filters one retriever"),
        ("where(exact, size=3)", "where has no option 'size'"),
        ("where(exact, language=de)", r'no language: add metadata = \["language"\] to \[chunk\] of the recipe'),
    ],
)
def test_a_wrong_condition_is_refused(snapshot: Snapshot, expression: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_retriever(snapshot, expression)


def test_condition_of_a_request_wraps_its_expression() -> None:
    request = SearchRequest(questions=["q"], k=None, index=None, retriever="rrf(bm25,hnsw)", where="kind=table")
    assert request.expression == "where(rrf(bm25, hnsw), kind=table)"
    assert SearchRequest(questions=["q"], k=1, index=None, where=None).expression is None
    assert add_condition(None, "category=Pain, acute") == "where(category='Pain, acute')"
    with pytest.raises(UsageError, match="'size=3' is not a condition: give kind="):
        add_condition("bm25", "size=3")


def test_question_counts_for_the_kind_of_its_best_relevant_passage(passages: list[Passage]) -> None:
    def hit(rank: int, row: int, kind: str) -> Hit:
        return Hit(rank, 1 / rank, row, replace(passages[row], kind=kind), "", "")

    hits = [hit(1, 0, "prose"), hit(2, 10, "table"), hit(3, 3, "infobox")]
    questions = [Question("1", "pain?", ("pain",)), Question("2", "who?", ("Orwell",)), Question("3", "?", ("none",))]
    outcomes = [match_hits(question, hits) for question in questions]
    judge = RetrievalJudge("answers")
    assert judge.compute_shares_by_kind(outcomes, 3) == {"prose": 1 / 3, "table": 1 / 3, "infobox": 0.0}
    assert judge.compute_shares_by_kind(outcomes, 1) == {"prose": 1 / 3, "table": 0.0, "infobox": 0.0}
    assert judge.compute_shares_by_kind([match_hits(questions[0], hits[:1])], 3) == {}
    id_judge = RetrievalJudge("passages", {"1": {passages[3].id: 1}, "2": {passages[0].id: 0}, "3": {}})
    assert id_judge.compute_shares_by_kind(outcomes, 3) == {"prose": 0.0, "table": 0.0, "infobox": 1 / 3}
