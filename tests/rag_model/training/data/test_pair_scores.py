"""A teacher's scores by workers: those of the cross-encoder itself, and once for all trainings."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rag_model.encoders.crossencoder import CrossEncoder
from rag_model.errors import InputError
from rag_model.store.objects.memo import NotRecordedError
from rag_model.store.store import Store
from rag_model.training.data.blocks import Block, score
from rag_model.training.data.pair_scores import PairBlock, WorkerScores
from rag_model.training.data.teaching import BLOCK, Tell
from tests.fixtures.tiny import save_cross_encoder

N = 10
QUESTIONS = [f"who was king {number}?" for number in range(N)]
TITLES = ["york" if number % 2 else "" for number in range(N)]
TEXTS = ["the king was born in york " * number for number in range(N)]
PAIRS = QUESTIONS, TITLES, TEXTS


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_cross_encoder(tmp_path_factory.mktemp("teacher"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"), create=True)


class Workers:
    """Does blocks in this process, and keeps them."""

    def __init__(self, store: Store) -> None:
        self.store, self.blocks = store, list[Block]()

    def __call__(self, blocks: Sequence[Block], tell: Tell) -> list[Mapping[str, Any]]:
        self.blocks += blocks
        for done, _ in enumerate(blocks, start=1):
            tell(done, len(blocks))
        return [score(block, self.store) for block in blocks]


def test_they_are_those_of_the_cross_encoder(store: Store, teacher: Path) -> None:
    workers, told = Workers(store), list[tuple[int, int]]()
    kept = WorkerScores(store, teacher, "a", workers, lambda *both: told.append(both), cpu=True, block=4)
    found = kept.scores(*PAIRS)
    alone = CrossEncoder.load(teacher, device="cpu").scores(*PAIRS)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, alone, atol=1e-4)  # other batches
    assert told == [(4, N), (8, N), (N, N)]
    assert [block.contexts for block in workers.blocks] == [4, 4, 2]
    assert all(block.by_cpu and block.stage == "teach" for block in workers.blocks)
    whole = WorkerScores(store, teacher, "a", workers, cpu=True)
    assert whole.block == BLOCK
    assert (whole.scores(*PAIRS) == alone).all(), "a block is a window of the cross-encoder"
    assert not whole.scores([], [], []).size


def test_no_block_is_scored_twice(store: Store, teacher: Path) -> None:
    found = WorkerScores(store, teacher, "a", Workers(store), cpu=True, block=4).scores(*PAIRS)
    store.memo = replace(store.memo, makes=False)
    again = Workers(store)
    kept = WorkerScores(store, teacher / "absent", "a", again, cpu=True, block=4)
    assert (kept.scores(*PAIRS) == found).all(), "all of it was recorded, and the teacher is not needed"
    assert not any(block.model for block in again.blocks)
    store.memo = replace(store.memo, makes=False)
    for identity, pairs in (("b", PAIRS), ("a", (QUESTIONS, TITLES, [*TEXTS[:-1], "other"]))):
        with pytest.raises(NotRecordedError):
            WorkerScores(store, teacher, identity, Workers(store), cpu=True, block=4).scores(*pairs)


def test_what_is_not_finite_is_refused_and_not_recorded(store: Store, tmp_path: Path) -> None:
    broken = save_cross_encoder(tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    save_file({**weights, "classifier.bias": weights["classifier.bias"] * np.nan}, broken / "model.safetensors")
    with pytest.raises(InputError, match="the teacher gave a score that is not finite"):
        WorkerScores(store, broken, "a", Workers(store), cpu=True).scores(*PAIRS)
    assert not [*store.files.names("memo/teach")]


def test_an_element_names_files_and_holds_none(store: Store, teacher: Path) -> None:
    workers = Workers(store)
    WorkerScores(store, teacher, "a", workers, cpu=True).scores(*PAIRS)
    (block,) = workers.blocks
    assert isinstance(block, PairBlock)
    assert {name for name, _ in block.model} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert block.weights > (teacher / "model.safetensors").stat().st_size
    assert len(repr(block)) < 2_000
