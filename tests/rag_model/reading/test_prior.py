"""An answer weighs its passages by the p(z|x) of training, for every retriever."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from rag_model.encoders.trainable import TrainableEncoder
from rag_model.generate.decoding import DecodingSettings
from rag_model.generate.load import load_generator
from rag_model.generate.rag import Rag, RagSettings
from rag_model.generate.rag_folder import save_rag
from rag_model.reading.model import open_reader
from rag_model.reading.settings import ReaderSettings
from rag_model.retrieve.factory import open_retriever
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.examples import Example
from rag_model.training.objectives.rag import RagRecipe, RagTask
from tests.fixtures.tiny import save_bert
from tests.fixtures.tiny_generators import save_bart
from tests.fixtures.tiny_snapshot import publish_tiny

CITIES = {f"City {number}": f"the king of city {number} was {number * 7}." for number in range(1_100)}
INDEXES = {"ivfpq": "IVF2,PQ4np", "pca": "PCA16,IVF2,Flat", "refined": "IVF2,PQ4np,Refine(vectors)", "sq": "IVF2,SQ8"}
FLOAT32_SUMS = ("hnsw", "exact", "refined")  # faiss sums the inner products in float32
QUESTIONS = [f"who was the king of city {number}?" for number in range(0, 1_100, 200)]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def snapshot(encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    store = Store.open(str(tmp_path_factory.mktemp("store")), create=True)
    return publish_tiny(store, encoder, CITIES, tmp_path_factory.mktemp("work"), more_indexes=INDEXES)


@pytest.fixture(scope="module")
def load_encoder(encoder: Path) -> Callable[[], TrainableEncoder]:
    return lambda: TrainableEncoder.load(encoder, "question", device="cpu")


@pytest.mark.parametrize("retriever", ["hnsw", "exact", *INDEXES, "ivfpq(nprobe=1)", "rrf(pca, ivfpq, hnsw)"])
def test_answers_weigh_passages_like_training(
    retriever: str, snapshot: Snapshot, load_encoder: Callable[[], TrainableEncoder], tmp_path: Path
) -> None:
    question = load_encoder()
    settings = RagSettings("sequence", k=4, temperature=0.05)
    rag = Rag(question, load_generator(save_bart(tmp_path / "bart"), device="cpu"), settings).eval()
    save_rag(rag, tmp_path / "rag", question.space())
    reader_settings = ReaderSettings(decoding=DecodingSettings(max_new_tokens=2))
    _, reader = open_reader(snapshot, str(snapshot.location), str(tmp_path / "rag"), retriever, reader_settings)
    answers = reader.answer(QUESTIONS)

    examples = [Example(str(row), text, ("x",)) for row, text in enumerate(QUESTIONS)]
    recipe = RagRecipe(k=4, temperature=0.05, retriever=retriever, answered=0, refuse_collapse=False)
    task = RagTask(rag, snapshot, examples, examples, recipe)
    with torch.no_grad():
        retrieved = task._retrieve_questions(QUESTIONS)
        prior = rag.prior(task._compute_logits(rag.embed_questions(QUESTIONS), retrieved)).exp()
    for answer, hits, weights in zip(answers, retrieved.hits, prior.tolist(), strict=True):
        assert [passage.hit.row for passage in answer.support] == [hit.row for hit in hits]
        tolerance = 5e-6 if retriever in FLOAT32_SUMS else 1e-6
        assert [passage.weight for passage in answer.support] == pytest.approx(weights, abs=tolerance)


@pytest.mark.parametrize("index", ["ivfpq", "pca", "sq"])
def test_scores_of_codes_are_not_the_inner_products(
    index: str, snapshot: Snapshot, load_encoder: Callable[[], TrainableEncoder]
) -> None:
    question = load_encoder()
    vectors = np.concatenate([snapshot.embeddings(part.name) for part in snapshot.parts]).astype(np.float32)
    query_vectors = question.encode_questions(QUESTIONS)
    results = open_retriever(snapshot, index, encoder=question, products=True).search(QUESTIONS, 4)
    max_difference = 0.0
    for vector, hits in zip(query_vectors, results, strict=True):
        for hit in hits:
            assert hit.inner_product == pytest.approx(float(vectors[hit.row] @ vector), abs=1e-6)
            max_difference = max(max_difference, abs(hit.score - float(vectors[hit.row] @ vector)))
    assert max_difference > 1e-4
