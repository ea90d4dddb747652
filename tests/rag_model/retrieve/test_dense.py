"""Dense retrieval from a small real snapshot: passages, order, credit and refused requests."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rag_model.corpus.records import Passage
from rag_model.encoders.encoder import Encoder
from rag_model.encoders.space import Space
from rag_model.errors import RefusedError, StoreError, UsageError
from rag_model.retrieve.dense import DenseRetriever
from rag_model.store.pulling.pull import pull
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content, Manifest, embeddings_in_space, select_files
from rag_model.store.versions.snapshot import Snapshot

QUESTIONS = {
    "who wrote animal farm?": "Animal Farm",
    "what do you call a japanese abacus": "Abacus",
    "how much did the us pay for alaska": "Alaska",
    "which unit measures electric current": "Ampere",
}
INDEXES = ["hnsw", "ivfpq", "exact"]


@pytest.mark.parametrize("index", INDEXES)
def test_questions_find_their_passages(snapshot: Snapshot, encoder: Encoder, index: str) -> None:
    results = DenseRetriever(snapshot, encoder, index).search(list(QUESTIONS), 3)
    assert [hits[0].passage.title for hits in results] == list(QUESTIONS.values())
    for hits in results:
        assert [hit.rank for hit in hits] == [1, 2, 3]
        assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


def test_exact_scores_are_inner_products_with_the_rows(
    snapshot: Snapshot, encoder: Encoder, passages: list[Passage]
) -> None:
    rows = np.concatenate([snapshot.embeddings(part.name) for part in snapshot.parts]).astype(np.float32)
    question = "what relieves pain?"
    hits = DenseRetriever(snapshot, encoder, "exact").search([question], snapshot.n)[0]
    scores = rows @ encoder.encode_questions([question])[0]
    assert [hit.row for hit in hits] == np.argsort(-scores).tolist()
    assert [hit.score for hit in hits] == pytest.approx(sorted(scores, reverse=True), abs=1e-5)
    assert [hit.passage for hit in hits] == [passages[hit.row] for hit in hits]


def test_hit_has_its_revision_and_its_credit(snapshot: Snapshot, encoder: Encoder) -> None:
    hit = DenseRetriever(snapshot, encoder).search(["who commanded apollo 8"], 1)[0][0]
    assert hit.url == f"https://en.wikipedia.org/w/index.php?oldid={hit.passage.rev_id}"
    assert hit.url in hit.licence
    assert "CC BY-SA 4.0" in hit.licence


def test_snapshot_contains_its_question_encoder(snapshot: Snapshot, encoder: Encoder) -> None:
    results = DenseRetriever.from_snapshot(snapshot).search(list(QUESTIONS), 2)
    expected = DenseRetriever(snapshot, encoder).search(list(QUESTIONS), 2)
    assert [[hit.row for hit in hits] for hits in results] == [[hit.row for hit in hits] for hits in expected]


def test_search_by_vector_equals_search_by_question(snapshot: Snapshot, encoder: Encoder) -> None:
    vectors = encoder.encode_questions(list(QUESTIONS))
    by_vector = DenseRetriever(snapshot).search_vectors(vectors, 2)
    assert by_vector == DenseRetriever(snapshot, encoder).search(list(QUESTIONS), 2)


def test_no_questions_give_no_hits(snapshot: Snapshot, encoder: Encoder) -> None:
    assert DenseRetriever(snapshot, encoder).search([], 2) == []
    assert DenseRetriever(snapshot).search_vectors(np.empty((0, snapshot.dim), np.float32), 2) == []


@pytest.mark.parametrize(
    ("questions", "k", "message"),
    [
        (["a", " \n"], 1, "question 2 is empty"),
        ([""], 1, "question 1 is empty"),
        (["caf\udce9"], 1, "question 1 is not UTF-8"),
        (["a"], 0, "at least 1"),
        (["a"], -3, "at least 1"),
        (["a"], 13, "12 passages"),
    ],
)
def test_wrong_requests_are_refused(
    snapshot: Snapshot, encoder: Encoder, questions: list[str], k: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        DenseRetriever(snapshot, encoder).search(questions, k)


def test_wrong_vectors_are_refused(snapshot: Snapshot) -> None:
    retriever = DenseRetriever(snapshot)
    with pytest.raises(UsageError, match="384"):
        retriever.search_vectors(np.zeros((1, 3), np.float32), 1)
    with pytest.raises(UsageError, match="NaN"):
        retriever.search_vectors(np.full((1, 384), np.nan, np.float32), 1)
    with pytest.raises(UsageError, match="has no encoder"):
        retriever.search(["a"], 1)


def test_error_of_an_unknown_index_names_the_indexes(snapshot: Snapshot) -> None:
    with pytest.raises(UsageError, match=r"bm25.*hnsw.*ivfpq.*exact"):
        DenseRetriever(snapshot, index="bm25")


def test_questions_of_another_space_are_refused(content: tuple[Store, Content], encoder: Encoder) -> None:
    store, base_content = content
    other_space = replace(encoder.space(), weights="sha256:" + "0" * 64)
    representations = embeddings_in_space(other_space.to_json())
    foreign_id = store.snapshots.publish(Manifest(replace(base_content, representations=representations)))
    with pytest.raises(RefusedError, match="weights"):
        DenseRetriever(Snapshot.from_store(store, foreign_id), encoder)
    vectorless_id = store.snapshots.publish(Manifest(replace(base_content, representations={})))
    with pytest.raises(UsageError, match="no vectors"):
        DenseRetriever(Snapshot.from_store(store, vectorless_id), encoder)
    assert Space.from_json(base_content.space or {}) == encoder.space()


def test_a_pulled_folder_answers_like_the_store(
    content: tuple[Store, Content], snapshot: Snapshot, encoder: Encoder, tmp_path: Path
) -> None:
    pull(content[0], snapshot.id, tmp_path)
    pulled = DenseRetriever(Snapshot.from_folder(tmp_path), encoder)
    assert pulled.search(list(QUESTIONS), 4) == DenseRetriever(snapshot, encoder).search(list(QUESTIONS), 4)


def test_an_index_that_ranks_by_the_embeddings_needs_them(
    content: tuple[Store, Content], snapshot: Snapshot, encoder: Encoder, tmp_path: Path
) -> None:
    store, base_content = content
    entry = {**base_content.indexes["ivfpq"], "refine": "vectors", "search": {"nprobe": 1, "refine": 2}}
    indexes = {**base_content.indexes, "ivfpq": entry}
    refined_id = store.snapshots.publish(Manifest(replace(base_content, indexes=indexes)))
    results = DenseRetriever(Snapshot.from_store(store, refined_id), encoder, "ivfpq").search(list(QUESTIONS), 4)
    truth = DenseRetriever(snapshot, encoder, "exact").search(list(QUESTIONS), 4)
    for hits, exact in zip(results, truth, strict=True):
        assert [hit.row for hit in hits] == [hit.row for hit in exact]
        assert [hit.score for hit in hits] == pytest.approx([hit.score for hit in exact], abs=1e-6)
    pull(store, refined_id, tmp_path, select=select_files(base_content, embeddings=False))
    DenseRetriever(Snapshot.from_folder(tmp_path), encoder, "hnsw")
    with pytest.raises(StoreError, match=r"index ivfpq reranks .* with the embeddings, but .* was not pulled"):
        DenseRetriever(Snapshot.from_folder(tmp_path), encoder, "ivfpq")


CORE_ONLY = """
import sys
class Absent:
    def find_spec(self, name, *rest):
        if name.split(".")[0] in {"torch", "transformers", "tokenizers", "safetensors", "lxml", "mwparserfromhell",
                                  "prefect", "apache_beam", "pydantic", "ir_measures", "regex", "huggingface_hub"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import numpy as np
from pathlib import Path
from rag_model.errors import MissingExtraError
from rag_model.retrieve.dense import DenseRetriever
from rag_model.store.versions.snapshot import Snapshot
snapshot = Snapshot.open(sys.argv[1], sys.argv[2])
vectors = np.asarray(snapshot.embeddings(snapshot.parts[0].name), np.float32)
print([hits[0].row for hits in DenseRetriever(snapshot).search_vectors(vectors, 1)])
try:
    DenseRetriever.from_snapshot(snapshot)
except MissingExtraError as error:
    print(error)
"""


def test_core_without_extras_searches_by_vector(snapshot: Snapshot) -> None:
    command = [sys.executable, "-c", CORE_ONLY, snapshot.location, snapshot.id]
    process = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    rows, error_message = process.stdout.splitlines()
    assert rows == "[0, 1, 2, 3, 4]"
    assert "pip install 'bookwheel[model]'" in error_message
