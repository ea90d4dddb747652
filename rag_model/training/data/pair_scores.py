"""Score pairs of a question and a passage with a cross-encoder (the teacher).

A pair takes about 45 ms on one core. 64 passages for each of 14,000 questions take half a day,
which is too long for one process. Therefore `WorkerPairScorer` scores blocks of pairs on workers.

`CachedPairScorer` caches scores in a file, so that a training that was killed and resumed scores no
block again. `scores.jsonl` in the work folder has one line per block with the fields `key` (digest
of the teacher and the pairs), `scores`, and `digest` (digest of `key` and `scores`). A damaged or
incomplete line is dropped, and its block is scored again.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from rag_model.atomic_write import atomic_write
from rag_model.digest import digest_json
from rag_model.encoders.cross_encoder import CrossEncoder, list_cross_encoder_files
from rag_model.encoders.onnx_cross_encoder import has_onnx_gpu
from rag_model.errors import InputError
from rag_model.retrieve.models import PairScorer
from rag_model.store.objects.cache import build_link_tree
from rag_model.store.recorded_tasks import OnProgress, TaskRunner
from rag_model.store.store import Store
from rag_model.training.data.blocks import (
    ONNX_LIBRARIES,
    TORCH_LIBRARIES,
    Files,
    ScoreBlock,
    put_blocks,
    score_blocks,
)

_Pairs = tuple[list[str], list[str], list[str]]  # questions, titles and texts of a block
SCORES_FILE = "scores.jsonl"
# Number of pairs per block. A cross-encoder sorts the pairs of each window of this size, so that
# scores do not depend on the division into blocks.
BLOCK_SIZE = 1_024


class CachedPairScorer:
    """A `PairScorer` that caches the scores of another `PairScorer` in a folder."""

    def __init__(
        self,
        teacher: PairScorer,
        identity: str,
        folder: Path,
        on_progress: OnProgress = lambda _, __: None,
        block_size: int = BLOCK_SIZE,
        *,
        joins_blocks: bool = False,
    ) -> None:
        """Read the cache in `folder`; `identity` is the digest of the teacher's files.

        `block_size` is the number of pairs per line of the cache. If `joins_blocks` is True, the
        teacher is called once for all missing blocks of a call.
        """
        self._teacher, self._identity, self._on_progress = teacher, identity, on_progress
        self._block_size, self._joins_blocks = block_size, joins_blocks
        self._path = folder / SCORES_FILE
        lines = self._path.read_bytes().splitlines(keepends=True) if self._path.is_file() else []
        valid_lines = [line for line in lines if _parse_line(line)]
        if len(valid_lines) < len(lines):
            with atomic_write(self._path) as temp_path:
                temp_path.write_bytes(b"".join(valid_lines))
        self._scores_by_key = dict(key_and_scores for line in valid_lines for key_and_scores in _parse_line(line))

    def scores(self, questions: Sequence[str], titles: Sequence[str], texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return (n,) float32 scores of n pairs, in order; score and cache the missing blocks."""
        spans = [slice(i, i + self._block_size) for i in range(0, len(questions), self._block_size)]
        pairs = [(list(questions[span]), list(titles[span]), list(texts[span])) for span in spans]
        keys = [digest_json([self._identity, *block_pairs]) for block_pairs in pairs]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            if self._joins_blocks:
                file.write("".join(self._score_blocks(dict(zip(keys, pairs, strict=True)))))
            for span, key, block_pairs in zip(spans, keys, pairs, strict=True):
                file.write("".join(self._score_blocks({key: block_pairs})))
                file.flush()  # Flushed lines survive if the process is killed later.
                self._on_progress(min(span.stop, len(questions)), len(questions))
        return np.array([score for key in keys for score in self._scores_by_key[key]], np.float32)

    def _score_blocks(self, pairs_by_key: Mapping[str, _Pairs]) -> list[str]:
        """Score all blocks that are not cached in one call, and return their lines for the file."""
        new_pairs = {key: block_pairs for key, block_pairs in pairs_by_key.items() if key not in self._scores_by_key}
        if not new_pairs:
            return []
        questions, titles, texts = (
            [text for pairs in new_pairs.values() for text in pairs[column]] for column in range(3)
        )
        scores = iter(self._teacher.scores(questions, titles, texts).tolist())
        for key, block_pairs in new_pairs.items():
            self._scores_by_key[key] = list(islice(scores, len(block_pairs[0])))
        return [_format_line(key, self._scores_by_key[key]) for key in new_pairs]


def _format_line(key: str, scores: list[float]) -> str:
    return json.dumps({"key": key, "scores": scores, "digest": _digest_scores(key, scores)}) + "\n"


def _parse_line(line: bytes) -> list[tuple[str, list[float]]]:
    """Return the key and the scores of a line; an empty list if the line is damaged."""
    try:
        row = json.loads(line)
        key, scores = row["key"], row["scores"]
        return [(key, scores)] if line.endswith(b"\n") and row["digest"] == _digest_scores(key, scores) else []
    except (ValueError, KeyError, TypeError):
        return []


def _digest_scores(key: str, scores: list[float]) -> str:
    # Scores are digested as text, because one may be NaN, which `check_teacher_scores` refuses.
    return digest_json([key, json.dumps(scores)])


@dataclass(frozen=True, slots=True)
class PairBlock(ScoreBlock):
    """A block of question-passage pairs to score with a cross-encoder."""

    onnx: bool = False  # whether onnxruntime runs the cross-encoder instead of torch

    stage: ClassVar[str] = "teach"
    code: ClassVar[Any] = 2  # Since version 2, tokenizer_config.json is read.

    @property
    def uses_gpu(self) -> bool:
        """Whether `cpu` is False and, for an ONNX graph, onnxruntime supports the GPU."""
        return not self.cpu and (not self.onnx or has_onnx_gpu())

    @property
    def libraries(self) -> tuple[str, ...]:
        """The libraries that compute the scores."""
        return ONNX_LIBRARIES if self.onnx else TORCH_LIBRARIES

    def compute(self, store: Store) -> list[float]:
        """Return the score of each pair.

        Raises:
            InputError: the cross-encoder's files are damaged, or a score is not finite. Then no
                score of the block is recorded.
        """
        scores = _load_cross_encoder(store.url, self.model, self.cpu, self.dtype).scores(
            *json.loads(store.blobs.read(self.content))
        )
        check_teacher_scores(scores)
        return [float(score) for score in scores]


@dataclass(frozen=True, slots=True)
class WorkerPairScorer:
    """A `PairScorer` that scores blocks of pairs on workers; the store's memo records them."""

    store: Store
    folder: Path  # folder of the cross-encoder
    identity: str  # digest of the cross-encoder's files
    runner: TaskRunner
    on_progress: OnProgress = lambda _, __: None
    cpu: bool = False  # whether to run without a GPU
    block_size: int = BLOCK_SIZE  # pairs per block
    onnx: bool = False  # result of `runs_on_onnx(folder)`; an ONNX graph must be a single file
    dtype: str = "float32"

    def scores(self, questions: Sequence[str], titles: Sequence[str], texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return the (n,) float32 scores of n pairs, in order.

        Raises:
            InputError: the cross-encoder's files are damaged, or a score is not finite.
        """
        n_pairs = len(questions)
        spans = [slice(i, i + self.block_size) for i in range(0, n_pairs, self.block_size)]
        blocks = put_blocks(partial(self._put_block, questions, titles, texts), spans)

        def report(n_finished: int, _: int) -> None:
            self.on_progress(min(n_finished * self.block_size, n_pairs), n_pairs)

        block_scores = score_blocks(self.store, blocks, self._put_files, self.runner, report)
        _load_cross_encoder.cache_clear()  # This frees the model if this process ran the blocks.
        return np.array([score for scores in block_scores for score in scores], np.float32)

    def _put_block(
        self, questions: Sequence[str], titles: Sequence[str], texts: Sequence[str], span: slice
    ) -> PairBlock:
        block_pairs = [list(questions[span]), list(titles[span]), list(texts[span])]
        pairs_ref = self.store.blobs.put_bytes(json.dumps(block_pairs, ensure_ascii=False).encode())
        return PairBlock(pairs_ref, self.identity, len(block_pairs[0]), cpu=self.cpu, onnx=self.onnx, dtype=self.dtype)

    def _put_files(self) -> Files:
        files = list_cross_encoder_files(self.folder)
        return tuple((name, self.store.blobs.put_file(path)) for name, path in files.items())


@lru_cache(maxsize=1)  # A worker process loads the cross-encoder only once.
def _load_cross_encoder(store_url: str, files: Files, cpu: bool, dtype: str) -> CrossEncoder:
    blobs = Store.open(store_url).blobs
    folder = build_link_tree({name: blobs.get_local_path(ref) for name, ref in files})
    return CrossEncoder.load(folder, device="cpu" if cpu else None, dtype=dtype)


def check_teacher_scores(scores: npt.NDArray[np.float32]) -> None:
    """Check that a teacher's scores are finite.

    Raises:
        InputError: a score is not finite.
    """
    if not np.isfinite(scores).all():
        raise InputError("a score of the teacher is not finite: its model is broken, fetch it again")
