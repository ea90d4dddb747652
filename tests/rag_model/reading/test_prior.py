"""p(z|x) is one: what an answer weighs its passages by is what the model was trained with, whatever finds them."""

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
ITSELF = ("hnsw", "exact", "refined")  # these give the products themselves, as float32 sums of faiss
ASKED = [f"who was the king of city {number}?" for number in range(0, 1_100, 200)]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def shelf(encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    store = Store.open(str(tmp_path_factory.mktemp("store")), create=True)
    return publish_tiny(store, encoder, CITIES, tmp_path_factory.mktemp("work"), more=INDEXES)


@pytest.fixture(scope="module")
def asker(encoder: Path) -> Callable[[], TrainableEncoder]:
    return lambda: TrainableEncoder.load(encoder, "question", device="cpu")


@pytest.mark.parametrize("retriever", ["hnsw", "exact", *INDEXES, "ivfpq(nprobe=1)", "rrf(pca, ivfpq, hnsw)"])
def test_answers_weigh_passages_as_training_did(
    retriever: str, shelf: Snapshot, asker: Callable[[], TrainableEncoder], tmp_path: Path
) -> None:
    question = asker()
    settings = RagSettings("sequence", k=4, temperature=0.05)
    rag = Rag(question, load_generator(save_bart(tmp_path / "bart"), device="cpu"), settings).eval()
    save_rag(rag, tmp_path / "rag", question.space())
    _, reader = open_reader(
        shelf,
        str(shelf.location),
        str(tmp_path / "rag"),
        retriever,
        ReaderSettings(decoding=DecodingSettings(max_new_tokens=2)),
    )
    answers = reader.answer(ASKED)

    examples = [Example(str(place), text, ("x",)) for place, text in enumerate(ASKED)]
    recipe = RagRecipe(k=4, temperature=0.05, retriever=retriever, answered=0, refuse_collapse=False)
    task = RagTask(rag, shelf, examples, examples, recipe)
    with torch.no_grad():
        recalled = task._retrieve_questions(ASKED)
        prior = rag.prior(task._compute_logits(rag.embed_questions(ASKED), recalled)).exp()
    for answer, hits, weights in zip(answers, recalled.hits, prior.tolist(), strict=True):
        assert [one.hit.row for one in answer.support] == [hit.row for hit in hits]
        near = 5e-6 if retriever in ITSELF else 1e-6
        assert [one.weight for one in answer.support] == pytest.approx(weights, abs=near)


@pytest.mark.parametrize("index", ["ivfpq", "pca", "sq"])
def test_scores_of_codes_are_not_the_inner_products(
    index: str, shelf: Snapshot, asker: Callable[[], TrainableEncoder]
) -> None:
    question = asker()
    vectors = np.concatenate([shelf.embeddings(part.name) for part in shelf.parts]).astype(np.float32)
    query_vectors = question.encode_questions(ASKED)
    found = open_retriever(shelf, index, encoder=question, products=True).search(ASKED, 4)
    apart = 0.0
    for vector, hits in zip(query_vectors, found, strict=True):
        for hit in hits:
            assert hit.inner_product == pytest.approx(float(vectors[hit.row] @ vector), abs=1e-6)
            apart = max(apart, abs(hit.score - float(vectors[hit.row] @ vector)))
    assert apart > 1e-4
