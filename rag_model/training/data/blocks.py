"""What a model scores before a training, in blocks: each is a task for a worker, and recorded in the store's memo.

A run that resumes, or a second one, scores no block twice, and does not load the model if there is nothing to score.
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
from rag_model.store.objects.memo import Produced
from rag_model.store.store import Store
from rag_model.training.data.teaching import Tell

Files = tuple[tuple[str, BlobRef], ...]  # a model's files in the store, by name; hashable: a worker loads a model once

BY_TORCH = "torch", "transformers", "tokenizers"
BY_ONNX = "onnxruntime", "tokenizers"
_SEVERAL = {"onnxruntime"}  # modules that come by one of several distributions, such as onnxruntime-gpu
_LOOKS = 32  # look-ups at a time: on an object store they are mostly waiting


@dataclass(frozen=True, slots=True)
class Block(ABC):
    """The task of a worker: what to score, and the model that does it."""

    content: BlobRef  # what to score, as JSON
    identity: str  # digest of the model
    contexts: int  # texts that the model reads
    model: Files = ()  # not needed if the block is recorded

    stage: ClassVar[str]  # names the job and the records
    code: ClassVar[Any]  # JSON that changes when the same inputs would give other scores

    @property
    def weights(self) -> int:
        """The bytes of the model's files."""
        return sum(ref.size for _, ref in self.model)

    @property
    def by_cpu(self) -> bool:
        """Whether a GPU is left alone."""
        return False

    @property
    def libraries(self) -> tuple[str, ...]:
        """The libraries that compute the scores."""
        return BY_TORCH

    def inputs(self) -> dict[str, Any]:
        """Return all inputs that decide the scores, up to rounding.

        Raises:
            MissingExtraError: onnxruntime computes them, and the onnx extra is not installed.
        """
        libraries = {name: _version(name) for name in self.libraries}
        return {"content": self.content.id, "model": self.identity, "code": self.code, "libraries": libraries}

    @abstractmethod
    def scored(self, store: Store) -> Sequence[Any]:
        """Return the scores, as JSON values.

        Raises:
            InputError: the model's files are damaged, or its scores cannot be used.
        """


Scorer = Callable[[Sequence[Block], Tell], Sequence[Mapping[str, Any]]]
"""Does all blocks by `score`, on whatever workers; returns their reports, in order."""


def score(block: Block, store: Store) -> dict[str, Any]:
    """Score a block, once; return its report: `scores`, the blob of the scores as JSON.

    Raises:
        InputError: as `Block.scored`.
    """

    def produce(workdir: Path) -> Produced:
        (out := workdir / "scores.json").write_text(json.dumps(block.scored(store)))
        return Produced({"scores": out}, {})

    record, _ = store.memo.once(block.stage, block.inputs(), produce)
    return {"scores": record.outputs["scores"].to_json()}


def score_blocks(
    store: Store, blocks: Sequence[Block], model: Callable[[], Files], scorer: Scorer | None, tell: Tell
) -> list[Any]:
    """Score blocks; return the scores of each one, in order.

    Args:
        store: has the contents of the blocks, and gets their records.
        blocks: without their model.
        model: puts the model's files into the store; called if a block is not recorded yet.
        scorer: does the blocks; None: this process does them.
        tell: called with the number of blocks that are done, and of how many.

    Raises:
        InputError: as `Block.scored`.
    """
    with ThreadPoolExecutor(_LOOKS) as threads:
        recorded = all(threads.map(partial(_is_recorded, store), blocks))
    if not recorded:
        files = model()
        blocks = [replace(block, model=files) for block in blocks]
    reports = (scorer or partial(_here, store))(blocks, tell)
    blobs = [BlobRef.from_json(report["scores"]) for report in reports]
    return [json.loads(store.blobs.read(blob)) for blob in blobs]


def _version(library: str) -> str:
    return str(require(library, "onnx").__version__) if library in _SEVERAL else version(library)


def _is_recorded(store: Store, block: Block) -> bool:
    return store.memo.get(block.stage, store.memo.key(block.inputs())) is not None


def _here(store: Store, blocks: Sequence[Block], tell: Tell) -> list[Mapping[str, Any]]:
    reports = list[Mapping[str, Any]]()
    for block in blocks:
        reports.append(score(block, store))
        tell(len(reports), len(blocks))
    return reports
