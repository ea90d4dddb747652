"""The kind `tokens`: build, search, measurement and reuse of its index, and refused damage."""

import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from rag_model.corpus.ragged_file import TokenVectors, TokenWriter, compute_offsets
from rag_model.errors import InputError, UsageError
from rag_model.index.build import run_stages
from rag_model.index.files.tensors import Array, TensorStream, read_tensors, write_tensors
from rag_model.index.files.vectors import RemoteRowFiles
from rag_model.index.kind import IndexFiles, TokenQuerySet, get_kind_for_factory
from rag_model.index.recipe import IndexRecipe
from rag_model.index.tokens.kind import TokenRows
from rag_model.index.tokens.search import TokenIndexFile, maxsim
from rag_model.ranges import RangeFile

D = 16
KIND = get_kind_for_factory("MaxSim")


def write_tokens(path: Path, lengths: Sequence[int], seed: int) -> Path:
    random = np.random.default_rng(seed)
    vectors = random.normal(size=(sum(lengths), D)) + random.normal(size=(1, D))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    with TokenWriter(path, D, "float16") as writer:
        writer.write(TokenVectors(vectors.astype(np.float32), compute_offsets(np.array(lengths))))
    return path


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Write three parts; some passages have no tokens."""
    folder = tmp_path_factory.mktemp("tokens")
    lengths = [[5, 9, 3, 0] * 10, [7], [12, 4] * 15]
    return [write_tokens(folder / f"{number}.arrow", lengths[number], number) for number in range(3)]


def build(parts: Sequence[Path], folder: Path, factory: str = "MaxSim,PQ4") -> Path:
    folder.mkdir(exist_ok=True)
    plan = KIND.plan(IndexRecipe(factory), TokenRows(parts).n, D)
    run_stages(plan, parts, folder / "index", folder)
    return folder / "index"


@pytest.mark.parametrize("factory", ["MaxSim,PQ4", "MaxSim,Bits2"])
def test_search_and_score_are_maxsim_over_decoded_vectors(parts: list[Path], tmp_path: Path, factory: str) -> None:
    index = TokenIndexFile.open(build(parts, tmp_path, factory))
    decoded = index.decode(np.arange(index.n))
    assert index.n == TokenRows(parts).n == 71
    assert (decoded.offsets == compute_offsets(TokenRows(parts).lengths)).all()
    questions = np.random.default_rng(9).normal(size=(11, 6, D)).astype(np.float32)
    expected = maxsim(questions, decoded.vectors, decoded.offsets)
    scores, rows = index.search(questions, 5)
    order = np.lexsort((np.broadcast_to(np.arange(71), expected.shape), -expected), axis=1)[:, :5]
    assert (rows == order).all()
    assert np.allclose(scores, np.take_along_axis(expected, order, 1), atol=1e-5)
    candidates = np.array([70, 3, 0, 41, 40])  # passage 3 has no tokens, so its score is -inf
    assert np.allclose(index.score(questions[0], candidates), expected[0, candidates], atol=1e-5)
    assert expected[0, 3] == -np.inf


def test_equal_input_gives_equal_bytes_and_parts_are_encoded_alone(parts: list[Path], tmp_path: Path) -> None:
    assert build(parts, tmp_path / "a").read_bytes() == build(parts, tmp_path / "b").read_bytes()
    decoded = TokenIndexFile.open(tmp_path / "a" / "index").decode(np.arange(40, 71))
    trained, plan = tmp_path / "a" / "trained", KIND.plan(IndexRecipe("MaxSim,PQ4"), 31, D)
    pieces = [tmp_path / "c0", tmp_path / "c1"]
    for number, (part, piece) in enumerate(zip(parts[1:], pieces, strict=True)):
        KIND.scatter(plan, trained, part, number, piece)
    openers = [lambda path=piece: path.open("rb") for piece in pieces]
    KIND.merge(plan, trained, parts[1:], openers, [], tmp_path / "fewer")
    fewer = TokenIndexFile.open(tmp_path / "fewer").decode(np.arange(31))
    assert (fewer.vectors == decoded.vectors).all()


def test_measurement_compares_with_the_original_vectors(parts: list[Path], tmp_path: Path) -> None:
    path = build(parts, tmp_path, "MaxSim,Bits8")
    queries = np.random.default_rng(9).normal(size=(8, 6, D)).astype(np.float32)
    query_set = TokenQuerySet(queries, 5, np.arange(0, 71, 2))
    entry = KIND.plan(IndexRecipe("MaxSim,Bits8"), 71, D).entry()
    result = KIND.measure(IndexFiles(path, lambda: parts, 71), entry, query_set)

    def fetch(part: Path) -> Path:
        raise AssertionError(f"{part} is copied")

    def read_range(part: Path, start: int, end: int) -> bytes:
        return part.read_bytes()[start:end]

    def open_part(part: Path) -> io.BufferedReader:
        return io.BufferedReader(RangeFile(str(part), part.stat().st_size, partial(read_range, part)), 1 << 20)

    remote = RemoteRowFiles(parts, fetch, read_range, open_part)
    by_range = KIND.measure(IndexFiles(path, lambda: remote, 71), entry, query_set)
    assert (by_range.recalls.tolist(), by_range.metrics) == (result.recalls.tolist(), result.metrics)
    plan = KIND.plan(IndexRecipe("MaxSim,Bits8"), 71, D)
    assert KIND.train(plan, remote, tmp_path / "remote") == KIND.train(plan, parts, tmp_path / "local")
    assert (tmp_path / "remote").read_bytes() == (tmp_path / "local").read_bytes()
    assert result.recalls.mean() > 0.9
    assert result.metrics["tokens_a_passage"] == round(TokenRows(parts).n_tokens / 71, 1)
    assert result.metrics["loss"] < 0.01


def test_a_trained_file_fits_the_same_topics_and_not_others(parts: list[Path], tmp_path: Path) -> None:
    build(parts, tmp_path)
    plan = KIND.plan(IndexRecipe("MaxSim,PQ4"), 71, D)
    losses = KIND.train(plan, parts, tmp_path / "again")["losses"]
    assert KIND.fit(plan, tmp_path / "trained", losses, [(parts[0], [])], []).explain_misfit(1.2) is None
    other_part = write_tokens(tmp_path / "other.arrow", [30] * 20, 99)
    assert KIND.fit(plan, tmp_path / "trained", losses, [(other_part, [])], []).explain_misfit(1.2)


def test_damage_is_refused(parts: list[Path], tmp_path: Path) -> None:
    path = build(parts, tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match="truncated or damaged"):
        TokenIndexFile.open(path)
    index = np.frombuffer(data, np.uint8).copy()
    offsets = data.index(b"\x00" * 8 + (5).to_bytes(8, "little"))  # the first two offsets
    index[offsets + 8 : offsets + 16] = 255
    path.write_bytes(index.tobytes())
    with pytest.raises(InputError, match="do not fit each other"):
        TokenIndexFile.open(path)


def change_array(name: str, change: Callable[[Array], Array]) -> Callable[[dict[str, Array]], None]:
    return lambda arrays: arrays.__setitem__(name, change(arrays[name]))


INVALID_ARRAYS = {
    "offsets that overflow": change_array("offsets", lambda old: np.array([0, 2**62, -(2**63), -(2**62), 0, old[-1]])),
    "offsets that fall": change_array("offsets", lambda old: np.array([0, 5, 2, old[-1]])),
    "unsigned offsets": change_array("offsets", lambda old: np.array([0, 5, 2, old[-1]], np.uint32)),
    "offsets of floats": change_array("offsets", lambda old: old.astype(np.float32)),
    "negative ids": change_array("ids", lambda old: -1 - old.astype(np.int64)),
    "ids of floats": change_array("ids", lambda old: old.astype(np.float32)),
    "codes of floats": change_array("codes", lambda old: old.astype(np.float32)),
    "centroids of integers": change_array("centroids", lambda old: old.astype(np.int64)),
    "centroids that are no numbers": change_array("centroids", lambda old: np.full_like(old, np.nan)),
    "3 weights": change_array("weights", lambda old: old[:3]),
    "infinite weights": change_array("weights", lambda old: np.full_like(old, np.inf)),
}


@pytest.mark.parametrize("name", INVALID_ARRAYS)
def test_invalid_array_is_refused(parts: list[Path], tmp_path: Path, name: str) -> None:
    arrays, metadata = read_tensors(build(parts, tmp_path, "MaxSim,Bits2"), mmap=False)
    INVALID_ARRAYS[name](arrays)
    if name == "3 weights":
        arrays["cutoffs"] = arrays["cutoffs"][:2]
    path = tmp_path / "invalid"
    streams = [TensorStream(key, array.dtype, array.shape, [array]) for key, array in arrays.items()]
    write_tensors(path, streams, metadata)
    with pytest.raises(InputError, match="build it again"):
        TokenIndexFile.open(path)


def test_wrong_requests_and_settings_are_refused(parts: list[Path], tmp_path: Path) -> None:
    index = TokenIndexFile.open(build(parts, tmp_path))
    zeros = np.zeros((1, 4, D), np.float32)
    for invalid_questions, k in ((zeros, 0), (zeros, 72), (zeros[:, :, :3], 1), (zeros * np.nan, 1)):
        with pytest.raises(UsageError):
            index.search(invalid_questions, k)
    with pytest.raises(UsageError, match="search parameter"):
        index.search(zeros, 1, efSearch=3)
    for fields in ({"recall_target": 0.9}, {"search": {"nprobe": 1}}, {"settings": {"a": 1}}, {"train_sample": 0}):
        with pytest.raises(UsageError):
            IndexRecipe("MaxSim", **fields)  # type: ignore[arg-type]
    other_part = tmp_path / "other.arrow"
    with TokenWriter(other_part, 8, "float16") as writer:
        writer.write(TokenVectors(np.ones((2, 8), np.float32), np.array([0, 2])))
    with pytest.raises(InputError, match="has 8 dimensions, not 16"):
        TokenRows([*parts, other_part])
