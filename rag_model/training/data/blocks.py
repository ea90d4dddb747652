"""Score data with a model before a training, block by block, on workers.

The store's memo records each block. A run that resumes, or a second run, therefore scores no block
twice, and does not load the model if there is nothing to score.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

from rag_model.extras import require
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.memo import StageResult
from rag_model.store.store import Store

OnProgress = Callable[[int, int], None]  # called with the finished and the total amount
# a model's files in the store, by name; hashable, as a cache key
Files = tuple[tuple[str, BlobRef], ...]

TORCH_LIBRARIES = "torch", "transformers", "tokenizers"
ONNX_LIBRARIES = "onnxruntime", "tokenizers"
# several distributions provide it, such as onnxruntime-gpu
_MULTIPLE_DISTRIBUTIONS = {"onnxruntime"}
_LOOKUP_THREADS = 32  # on an object store, look-ups mostly wait


@dataclass(frozen=True, slots=True)
class ScoreBlock(ABC):
    """The task of a worker: the data to score, and the model."""

    content: BlobRef  # the data, as JSON
    identity: str  # digest of the model
    contexts: int  # number of texts that the model reads
    model: Files = ()  # empty if the block is recorded

    stage: ClassVar[str]  # names the job and the records
    code: ClassVar[Any]  # JSON that changes when the same inputs would give other scores

    @property
    def weight_bytes(self) -> int:
        """Size of the model's files in bytes."""
        return sum(ref.size for _, ref in self.model)

    @property
    def uses_cpu_only(self) -> bool:
        """Whether the block must not use a GPU."""
        return False

    @property
    def libraries(self) -> tuple[str, ...]:
        """The libraries that compute the scores."""
        return TORCH_LIBRARIES

    def inputs(self) -> dict[str, Any]:
        """Return all inputs that determine the scores, up to rounding.

        Raises:
            MissingExtraError: onnxruntime computes the scores, but the onnx extra is not installed.
        """
        libraries = {name: _library_version(name) for name in self.libraries}
        return {"content": self.content.id, "model": self.identity, "code": self.code, "libraries": libraries}

    @abstractmethod
    def compute_scores(self, store: Store) -> Sequence[Any]:
        """Return the scores, as JSON values.

        Raises:
            InputError: the model's files are damaged, or a score is not finite.
        """


BlockScorer = Callable[[Sequence[ScoreBlock], OnProgress], Sequence[Mapping[str, Any]]]
"""Runs `score_block` on all blocks, for example on workers, and returns the reports in order."""


def score_block(block: ScoreBlock, store: Store) -> dict[str, Any]:
    """Score a block once; return its report, whose `scores` is the blob of the scores as JSON.

    Raises:
        InputError: see `ScoreBlock.compute_scores`.
    """

    def produce(workdir: Path) -> StageResult:
        (scores_path := workdir / "scores.json").write_text(json.dumps(block.compute_scores(store)))
        return StageResult({"scores": scores_path}, {})

    record, _ = store.memo.get_or_create(block.stage, block.inputs(), produce)
    return {"scores": record.outputs["scores"].to_json()}


def score_blocks(
    store: Store,
    blocks: Sequence[ScoreBlock],
    put_model_files: Callable[[], Files],
    scorer: BlockScorer | None,
    on_progress: OnProgress,
) -> list[Any]:
    """Score blocks, and return the scores of each block in order.

    Args:
        store: has the contents of the blocks, and gets their records.
        blocks: the blocks, without a model.
        put_model_files: puts the model's files into the store; called if a block is not recorded.
        scorer: scores the blocks; None: this process scores them.
        on_progress: called with the number of finished blocks and of all blocks.

    Raises:
        InputError: see `ScoreBlock.compute_scores`.
    """
    with ThreadPoolExecutor(_LOOKUP_THREADS) as threads:
        recorded = all(threads.map(partial(_is_recorded, store), blocks))
    if not recorded:
        files = put_model_files()
        blocks = [replace(block, model=files) for block in blocks]
    reports = (scorer or partial(_score_locally, store))(blocks, on_progress)
    blobs = [BlobRef.from_json(report["scores"]) for report in reports]
    return [json.loads(store.blobs.read(blob)) for blob in blobs]


def _library_version(library: str) -> str:
    return str(require(library, "onnx").__version__) if library in _MULTIPLE_DISTRIBUTIONS else version(library)


def _is_recorded(store: Store, block: ScoreBlock) -> bool:
    return store.memo.find(block.stage, store.memo.compute_key(block.inputs())) is not None


def _score_locally(store: Store, blocks: Sequence[ScoreBlock], tell: OnProgress) -> list[Mapping[str, Any]]:
    reports = list[Mapping[str, Any]]()
    for block in blocks:
        reports.append(score_block(block, store))
        tell(len(reports), len(blocks))
    return reports
