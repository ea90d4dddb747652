"""The score job: on Beam's workers the same scores as in one process, and recorded for whoever asks next."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from beam_jobs import score
from beam_jobs.launch import Launch
from rag_model.encoders.cross_encoder import CrossEncoder
from rag_model.errors import InputError
from rag_model.generate.load import load_generator
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store
from rag_model.training.data.answer_scores import BLOCK, ScoringExample, score_answers, score_example
from rag_model.training.data.pair_scores import PairBlock, WorkerPairScorer
from tests.fixtures.tiny import save_cross_encoder, save_onnx
from tests.fixtures.tiny_generators import save_llama

READINGS = [
    ScoringExample(str(n), f"who was king {n}?", f"king {n}", (("a", "the king"), ("b", f"{n}")))
    for n in range(BLOCK + 1)
]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"), create=True)


@pytest.fixture
def generator(tmp_path: Path) -> Any:
    return load_generator(save_llama(tmp_path / "llama"), device="cpu")


def test_workers_score_as_one_process_does(store: Store, generator: Any) -> None:
    told = list[tuple[int, int]]()
    by_workers = partial(score.run, launch=Launch.new(store.url, ["--runner=FnApiRunner"]))
    found = score_answers(store, lambda: generator, "a", READINGS, by_workers, lambda *both: told.append(both))
    assert found == [score_example(generator, one) for one in READINGS]
    assert told[-1] == (2, 2)
    store.memo = replace(store.memo, can_produce=False)
    assert score_answers(store, lambda: generator, "a", READINGS) == found
    again = partial(score.run, launch=Launch.new(store.url))
    assert score_answers(store, lambda: generator, "a", READINGS, again) == found


def test_a_worker_says_what_is_wrong(store: Store, generator: Any) -> None:
    generator.module.lm_head.weight.data[3] = float("nan")
    by_workers = partial(score.run, launch=Launch.new(store.url, ["--runner=FnApiRunner"]))
    with pytest.raises(InputError, match="the answer of example 0 is not finite"):
        score_answers(store, lambda: generator, "a", READINGS[:1], by_workers)


def test_a_long_job_is_known_to_be_long(store: Store, generator: Any) -> None:
    """A generator of 135 million weights takes a minute or so of a core for a block."""
    seen = list[Any]()

    def scorer(tasks: Any, _: Any) -> list[Any]:
        seen.extend(tasks)
        return []

    score_answers(store, lambda: generator, "a", READINGS, scorer)
    (block, rest) = seen
    assert (block.contexts, rest.contexts) == (2 * BLOCK, 2)
    weights = BlobRef(block.content.id, 540_000_000)
    large = replace(block, contexts=10 * BLOCK, model=(("model.safetensors", weights),))
    assert 30 < score._seconds(large) < 300
    assert score._seconds(rest) < 0.1


@pytest.mark.parametrize("onnx", [False, True])
def test_workers_teach_as_one_process_does(onnx: bool, store: Store, tmp_path: Path) -> None:
    teacher = save_cross_encoder(tmp_path / "teacher")
    teacher = save_onnx(teacher, tmp_path / "graph") if onnx else teacher
    pairs = [f"who was king {n}?" for n in range(6)], ["york"] * 6, ["the king " * n for n in range(6)]
    by_workers = partial(score.run, launch=Launch.new(store.url, ["--runner=FnApiRunner"]))
    found = WorkerPairScorer(store, teacher, "a", by_workers, cpu=True, block=4, onnx=onnx).scores(*pairs)
    np.testing.assert_allclose(found, CrossEncoder.load(teacher, device="cpu").scores(*pairs), atol=1e-4)
    assert len([*store.files.list_names("memo/teach")]) == 2


@pytest.mark.parametrize(("cpu", "workers"), [(False, ("--direct_num_workers=1",)), (True, ())])
def test_a_gpu_has_one_worker_that_scores(cpu: bool, workers: tuple[str, ...], store: Store) -> None:
    block = PairBlock(store.blobs.put_bytes(b"[[],[],[]]"), "a", 0, cpu=cpu)
    assert score.size_launch([block], Launch(store.url, "run"), 1).flags == workers


def test_nothing_is_no_job(store: Store) -> None:
    assert score.run([], launch=Launch.new(store.url)) == []
