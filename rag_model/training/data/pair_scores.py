"""A cross-encoder's scores of pairs on workers: the cost of learning from a teacher, some 45 ms of a core a pair.

64 passages for each of 14,000 questions take half a day of a core, so this is no work for one process.
"""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from rag_model.encoders.crossencoder import CrossEncoder, cross_encoder_files
from rag_model.encoders.pairs.session import reaches_gpu
from rag_model.store.objects.trees import linked_tree
from rag_model.store.store import Store
from rag_model.training.data.blocks import BY_ONNX, BY_TORCH, Block, Files, Scorer, score_blocks
from rag_model.training.data.lists import check_finite
from rag_model.training.data.teaching import BLOCK, Tell

_THREADS = 32  # blocks put at a time


@dataclass(frozen=True, slots=True)
class PairBlock(Block):
    """A block of pairs, and the cross-encoder that scores them."""

    cpu: bool = False  # leaves a GPU alone
    onnx: bool = False  # onnxruntime runs the cross-encoder, and not torch

    stage: ClassVar[str] = "teach"
    code: ClassVar[Any] = 2  # reads tokenizer_config.json

    @property
    def by_cpu(self) -> bool:
        """Whether a GPU is left alone, as also by an onnxruntime that cannot use one."""
        return self.cpu or (self.onnx and not reaches_gpu())

    @property
    def libraries(self) -> tuple[str, ...]:
        """The libraries that compute the scores."""
        return BY_ONNX if self.onnx else BY_TORCH

    def scored(self, store: Store) -> list[float]:
        """Return the score of each pair.

        Raises:
            InputError: the cross-encoder's files are damaged, or a score is not finite, and so is not recorded.
        """
        found = _cross_encoder(store.url, self.model, self.cpu).scores(*json.loads(store.blobs.read(self.content)))
        check_finite(found)
        return [float(one) for one in found]


@dataclass(frozen=True, slots=True)
class WorkerScores:
    """A `PairScorer` whose blocks of pairs are scored by workers, and recorded in the store's memo."""

    store: Store
    folder: Path  # of the cross-encoder
    identity: str  # digest of its files
    scorer: Scorer
    tell: Tell = lambda _, __: None
    cpu: bool = False
    block: int = BLOCK  # pairs
    onnx: bool = False  # `by_onnx` of the folder; its graph is one file

    def scores(self, questions: Sequence[str], titles: Sequence[str], texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return the (n,) float32 scores of n pairs, in order.

        Raises:
            InputError: the cross-encoder's files are damaged, or a score is not finite.
        """
        n = len(questions)
        some = [slice(first, first + self.block) for first in range(0, n, self.block)]
        with ThreadPoolExecutor(_THREADS) as threads:  # on an object store this is mostly waiting
            put = partial(self._block, questions, titles, texts)
            blocks = list(threads.map(put, some))

        def told(done: int, _: int) -> None:
            self.tell(min(done * self.block, n), n)

        found = score_blocks(self.store, blocks, self._files, self.scorer, told)
        _cross_encoder.cache_clear()  # this process may have done a small job itself
        return np.array([score for scores in found for score in scores], np.float32)

    def _block(self, questions: Sequence[str], titles: Sequence[str], texts: Sequence[str], part: slice) -> PairBlock:
        pairs = [list(questions[part]), list(titles[part]), list(texts[part])]
        blob = self.store.blobs.put_bytes(json.dumps(pairs, ensure_ascii=False).encode())
        return PairBlock(blob, self.identity, len(pairs[0]), cpu=self.cpu, onnx=self.onnx)

    def _files(self) -> Files:
        files = cross_encoder_files(self.folder)
        return tuple((name, self.store.blobs.put_file(path)) for name, path in files.items())


@lru_cache(maxsize=1)  # a worker loads the cross-encoder once
def _cross_encoder(store_url: str, files: Files, cpu: bool) -> CrossEncoder:
    blobs = Store.open(store_url).blobs
    folder = linked_tree({name: blobs.local(ref) for name, ref in files})
    return CrossEncoder.load(folder, device="cpu" if cpu else None)
