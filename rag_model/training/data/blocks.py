"""Score training data with a model before the training, block by block, on workers.

The store's memo records each block. Therefore a resumed or repeated run scores no block again, and
does not load the model if all blocks are recorded.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any, ClassVar, TypeVar

from rag_model.extras import require
from rag_model.resources import CORE_FLOPS
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.recorded_tasks import OnProgress, RecordedTask, TaskRunner, run_tasks
from rag_model.store.store import Store

# (name, blob) of each file of a model. The type is hashable, because it is part of a cache key.
Files = tuple[tuple[str, BlobRef], ...]

Content = TypeVar("Content")
Block = TypeVar("Block")
TORCH_LIBRARIES = "torch", "transformers", "tokenizers"
ONNX_LIBRARIES = "onnxruntime", "tokenizers"
# libraries that several packages contain: onnxruntime is also in onnxruntime-gpu
_MULTIPLE_DISTRIBUTIONS = {"onnxruntime"}
_THREADS = 32  # Many threads are useful, because requests to an object store mostly wait.
_TOKENS_PER_CONTEXT = 320  # upper bound of the tokens of a passage, an input and an output together
_OPERATIONS_PER_TOKEN_BYTE = 2 / 4  # two operations per token and weight, which has four bytes
# memory of a worker without the weights: torch, transformers, and the logits of a batch
_WORKER_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class ScoreBlock(RecordedTask):
    """A task for a worker: a block of data to score, and the model that scores it."""

    content: BlobRef  # data to score, as JSON
    identity: str  # digest of the model
    contexts: int  # number of texts that the model reads
    model: Files = ()  # files of the model; empty if the scores are already recorded
    dtype: str = "float32"  # dtype of the model's weights; ignored by ONNX graphs
    cpu: bool = False  # whether to run without a GPU

    output: ClassVar[str] = "scores"
    code: ClassVar[Any]  # version of the code, as JSON; change it if equal inputs give new scores

    @property
    def weight_bytes(self) -> int:
        """Size of the model's files in bytes."""
        return sum(ref.size for _, ref in self.model)

    @property
    def memory_bytes(self) -> int:
        """Memory in bytes of a worker that has loaded the model."""
        return 2 * self.weight_bytes + _WORKER_BYTES

    @property
    def uses_gpu(self) -> bool:
        """Whether a GPU may be used."""
        return not self.cpu

    @property
    def libraries(self) -> tuple[str, ...]:
        """The libraries that compute the scores."""
        return TORCH_LIBRARIES

    def inputs(self) -> dict[str, Any]:
        """Return all inputs that determine the scores, except for rounding.

        Raises:
            MissingExtraError: onnxruntime computes the scores, but the onnx extra is not installed.
        """
        libraries = {name: _get_library_version(name) for name in self.libraries}
        inputs = {"content": self.content.id, "model": self.identity, "code": self.code, "libraries": libraries}
        return inputs if self.dtype == "float32" else {**inputs, "dtype": self.dtype}

    def estimate_seconds(self) -> float:
        """Return the estimated seconds of the model's operations on one core."""
        n_tokens = self.contexts * _TOKENS_PER_CONTEXT
        return n_tokens * _OPERATIONS_PER_TOKEN_BYTE * self.weight_bytes / CORE_FLOPS

    @abstractmethod
    def compute(self, store: Store) -> Sequence[Any]:
        """Return the scores, as JSON values.

        Raises:
            InputError: the model's files are damaged, or a score is not finite.
        """


def put_blocks(put_block: Callable[[Content], Block], contents: Iterable[Content]) -> list[Block]:
    """Call `put_block` for each content, in several threads, and return the blocks in order."""
    with ThreadPoolExecutor(_THREADS) as executor:
        return list(executor.map(put_block, contents))


def score_blocks(
    store: Store,
    blocks: Sequence[ScoreBlock],
    put_model_files: Callable[[], Files],
    runner: TaskRunner | None,
    on_progress: OnProgress,
) -> list[Any]:
    """Score blocks, and return the scores of each block in order.

    Args:
        store: store that has the data of the blocks; its memo records the scores.
        blocks: the blocks, without the files of the model.
        put_model_files: puts the model's files into the store; only called if a block is not
            recorded yet.
        runner: runs the blocks on workers; if None, this process runs them.
        on_progress: called with the number of finished blocks and the number of all blocks.

    Raises:
        InputError: see `ScoreBlock.compute`.
    """
    with ThreadPoolExecutor(_THREADS) as executor:
        are_all_recorded = all(executor.map(partial(_is_recorded, store), blocks))
    if not are_all_recorded:
        model_files = put_model_files()
        blocks = [replace(block, model=model_files) for block in blocks]
    return list(run_tasks(store, blocks, runner, on_progress))


def _get_library_version(library: str) -> str:
    return str(require(library, "onnx").__version__) if library in _MULTIPLE_DISTRIBUTIONS else version(library)


def _is_recorded(store: Store, block: ScoreBlock) -> bool:
    return store.memo.find(block.stage, store.memo.compute_key(block.inputs())) is not None
