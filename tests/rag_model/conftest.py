"""A small snapshot: two parts of hand-written passages, encoded by a real encoder."""

import multiprocessing
import os
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from multiprocessing.dummy import DummyProcess, Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rag_model.corpus.passages import PassageWriter
from rag_model.corpus.records import Passage
from rag_model.encoders.encoder import Encoder, collect_question_encoder_files
from rag_model.index.build import run_stages
from rag_model.index.recipe import IndexRecipe, resolve
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content, Manifest, PartEntry, embeddings_in_space
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.benchmarks import FOLDER
from tests.fixtures.tiny import embed_part

ARTICLES = {
    "Animal Farm": "Animal Farm is an allegorical novella by George Orwell, first published in August 1945.",
    "Aardvark": "The aardvark is a nocturnal mammal of Africa that feeds on ants and termites.",
    "Ampere": "The ampere is the unit of electric current, named after the physicist André-Marie Ampère.",
    "Alabama": "The capital of Alabama is Montgomery; its largest city by population is Birmingham.",
    "Apollo 8": "Apollo 8 was the first crewed spacecraft to orbit the Moon; Frank Borman commanded it.",
    "Alphabet": "The Greek alphabet was the first script with letters for vowels as well as consonants.",
    "Abacus": "The Japanese abacus is called soroban; it was imported from China in the 14th century.",
    "Aikido": "Aikido is a modern Japanese martial art developed by Morihei Ueshiba.",
    "Alaska": "The United States bought Alaska from Russia in 1867 for 7.2 million dollars.",
    "Algeria": "Algiers is the capital and the most populous city of Algeria, on the Mediterranean coast.",
    "Aspirin": "Aspirin relieves pain, fever and inflammation, and thins the blood.",
    "Albedo": "Albedo is the share of sunlight that a surface reflects; fresh snow has a high albedo.",
}
PARTS = (0, 5, 12)  # rows at which the parts begin and end
ENWIKI = {
    "kind": "wiki",
    "dbname": "enwiki",
    "language": "en",
    "base": "https://en.wikipedia.org/wiki/Main_Page",
    "licence": "CC BY-SA 4.0",
    "newest_revision": "2026-11-01T00:00:00Z",
}


def _passage(page: int, title: str, text: str) -> Passage:
    words = len(text.split())
    return Passage(f"{page}-0", str(page), 1000 + page, title, "", text, 0, words, Passage.hash_of(title, text))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A new local store."""
    return Store.open(str(tmp_path / "store"), create=True)


@pytest.fixture(scope="session")
def passages() -> list[Passage]:
    """The passages of `ARTICLES` in row order."""
    return [_passage(page, *article) for page, article in enumerate(ARTICLES.items(), start=1)]


@pytest.fixture(scope="session")
def sentence_transformers() -> Any:
    """The package; its import takes more than a second, so only tests that use it import it."""
    return import_module("sentence_transformers")


@pytest.fixture(scope="session")
def encoder(minilm: Path) -> Encoder:
    """The real encoder, on one thread."""
    return Encoder.load(minilm, threads=1)


@pytest.fixture(scope="session")
def content(
    tmp_path_factory: pytest.TempPathFactory, passages: list[Passage], encoder: Encoder
) -> tuple[Store, Content]:
    """A store with all blobs of a snapshot, and its content: two indexes and the question encoder."""
    work = tmp_path_factory.mktemp("build")
    store = Store.open(str(tmp_path_factory.mktemp("store")), create=True)
    files: dict[str, BlobRef] = {}
    entries, arrays = [], []
    for number, (first, last) in enumerate(pairwise(PARTS)):
        part, rows, array = f"part-{number:05}", work / f"{number}.parquet", work / f"{number}.npy"
        with PassageWriter(rows) as writer:
            for passage in passages[first:last]:
                writer.write(passage)
        embed_part(rows, array, encoder)
        files[f"passages/{part}.parquet"] = store.blobs.put_file(rows)
        files[f"embeddings/{part}.npy"] = store.blobs.put_file(array)
        entries.append(PartEntry(part, first + 1, last, last - first))
        arrays.append(array)
    space = encoder.space()
    for name, path in collect_question_encoder_files(encoder.folder, encoder.spec, space, work).items():
        files[f"encoder/question/{name}"] = store.blobs.put_file(path)
    indexes = {}
    for name, factory in (("hnsw", "HNSW32"), ("ivfpq", "IVF,PQ")):
        plan = resolve(IndexRecipe(factory), len(passages), encoder.dim)
        run_stages(plan, arrays, work / f"{name}.faiss", work)
        files[f"index/{name}.faiss"] = store.blobs.put_file(work / f"{name}.faiss")
        indexes[name] = plan.entry()
    return store, Content(ENWIKI, tuple(entries), files, {}, embeddings_in_space(space.to_json()), indexes)


@pytest.fixture(scope="session")
def snapshot(content: tuple[Store, Content]) -> Snapshot:
    """The published snapshot, opened from its store."""
    store, snapshot_content = content
    return Snapshot.from_store(store, store.snapshots.publish(Manifest(snapshot_content)))


class WorkerThread(DummyProcess):
    """A thread instead of a worker process of a benchmark, because this process has imported the modules."""

    pid = os.getpid()

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...], daemon: bool = False) -> None:
        """Create the thread; the first argument of `target` is the pipe, to which an error is sent."""
        super().__init__(target=self._serve, args=(target, *args))

    @staticmethod
    def _serve(target: Callable[..., None], pipe: Any, *arguments: Any) -> None:
        try:
            target(pipe, *arguments)
        except Exception as error:
            pipe.send(error)


@pytest.fixture
def worker_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run workers of benchmarks as threads; the test of a GPU build starts them as processes."""
    monkeypatch.syspath_prepend(FOLDER)
    context = SimpleNamespace(Pipe=Pipe, Process=WorkerThread)
    for module in (import_module("isolated_run"), multiprocessing):
        monkeypatch.setattr(module, "get_context", lambda _: context)
