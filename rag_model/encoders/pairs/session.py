"""Logits of pairs by onnxruntime, from an ONNX graph; torch is not needed.

A graph is a program: it may loop for ever, or ask for any amount of time and memory. Loops are refused, and a child
process opens the graph and scores pairs first, once a process.
"""

import mmap
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from rag_model.child import DiedError, answer, call
from rag_model.digest import digest_file
from rag_model.encoders.files import longest_input
from rag_model.encoders.pairs.tokens import MOST_TOKENS, PairBatch, check_scores_pairs, no_cross_encoder
from rag_model.errors import InputError, UsageError
from rag_model.extras import require

_FILES = ("model.onnx", "onnx/model.onnx")  # of an export; of a hub folder
_INPUTS = {"input_ids": "ids", "attention_mask": "mask", "token_type_ids": "types"}
_CPU_DEVICE = "cpu"
_CPU, _CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
_CPU_BATCH_TOKENS = 1024  # padding included; a float32 MiniLM is 15 % slower with 2,048
_CUDA_BATCH_TOKENS = 65_536
_ONE_PAIR = 1
_THREADS = "OMP_NUM_THREADS"  # which torch obeys as well
# Such a graph scales activations by their range over the whole batch, so scores would depend on the batch.
_QUANTISES_BATCHES = re.compile(rb"DynamicQuantize")
# Operators whose graph decides how often they run. Before a name stands the last byte of its length.
_LOOPS = re.compile(rb"[\x04\x00](?:Loop|Scan)")
# The key of a tensor whose numbers lie in another file (TensorProto.external_data), behind its length as above.
_ELSEWHERE = re.compile(rb"[\x08\x00]location")
_SECONDS = 60.0  # for a small graph in the child, on a busy machine
_RATE = 20e6  # bytes of a graph per second
_MEMORY = 2 << 30  # bytes
_COPIES = 4  # of the weights, laid out for the processor
_SHORT = 8  # tokens of a pair
_NO_MEMORY = "bad_alloc"  # in onnxruntime's errors


@dataclass(frozen=True, slots=True)
class OnnxModel:
    """An ONNX graph of a sequence classifier with one label; make it with `load`."""

    session: Any  # an onnxruntime.InferenceSession
    inputs: tuple[str, ...]  # of the graph
    output: str
    batch_tokens: int  # padding included; 1: one pair a batch

    @classmethod
    def load(cls, folder: Path, device: str | None = None) -> Self:
        """Load the graph of `folder`; `device` is `cpu` or `cuda:1`, by default a GPU if onnxruntime has one.

        A graph that quantises activations as it goes reads one pair at a time, so that a score depends on its pair
        alone.

        Raises:
            InputError: the file is missing or corrupt, the graph does not give one score a pair, or a process that
                scored pairs with it died or took too long.
            MissingExtraError: the onnx extra is not installed.
            UsageError: this build of onnxruntime has no such device.
        """
        file = onnx_file(folder)
        if file is None:
            raise InputError(f"cross-encoder {folder} has no {_FILES[0]}: give the folder of an ONNX export")
        check_scores_pairs(folder)
        if _contains(file, _LOOPS):
            raise no_cross_encoder(folder, "has a graph with loops, which may never end")
        _tried(folder, file, digest_file(file))
        return cls._opened(folder, file, device)

    @classmethod
    def _opened(cls, folder: Path, file: Path, device: str | None) -> Self:
        session = _session(file, device)
        inputs, output = tuple(one.name for one in session.get_inputs()), session.get_outputs()[0]
        if strange := [name for name in inputs if name not in _INPUTS]:
            raise no_cross_encoder(folder, f"has a graph with the input {strange[0]}, which a pair does not give")
        if len(output.shape) != 2 or (isinstance(output.shape[1], int) and output.shape[1] != 1):
            raise no_cross_encoder(folder, f"has a graph whose output {output.name} is no score a pair")
        return cls(session, inputs, output.name, _batch_tokens(file, session))

    def logits(self, batch: PairBatch) -> npt.NDArray[np.float32]:
        """Return the (b,) float32 logits of a batch.

        Raises:
            InputError: the graph gives something else than one number a pair, or does not fit its tokenizer.
        """
        given = {name: getattr(batch, _INPUTS[name]) for name in self.inputs}
        try:
            (told,) = self.session.run([self.output], given)
        except Exception as failed:  # onnxruntime's own errors have no common base but this
            sentence = str(failed).partition("\n")[0]
            raise InputError(f"an ONNX model cannot score pairs ({sentence}): fetch its folder again") from failed
        if told.shape != (len(batch.ids), 1):
            raise InputError(f"an ONNX model gives {told.shape} scores for {len(batch.ids)} pairs: give another model")
        logits: npt.NDArray[np.float32] = told[:, 0].astype(np.float32)  # (b, 1) -> (b,)
        return logits


def onnx_file(folder: Path) -> Path | None:
    """Return the ONNX file of a model's folder, or None."""
    return next((folder / name for name in _FILES if (folder / name).is_file()), None)


def weights_beside(folder: Path) -> bool:
    """Return whether the weights of a folder's ONNX graph may lie in other files, which it names (external data).

    onnxruntime reads them only from the graph's own folder, and not where a link leads to another one. A graph without
    such files may be taken for one that has them; none that has them is missed.
    """
    file = onnx_file(folder)
    return file is not None and _contains(file, _ELSEWHERE)


def reaches_gpu() -> bool:
    """Return whether this build of onnxruntime can use a GPU.

    Raises:
        MissingExtraError: the onnx extra is not installed.
    """
    return _CUDA in require("onnxruntime", "onnx").get_available_providers()


@cache
def _tried(folder: Path, file: Path, digest: str) -> None:
    """Score two pairs in a child process, once a process and graph."""
    require("onnxruntime", "onnx")
    size = sum(path.stat().st_size for path in file.parent.iterdir() if path.is_file())  # with external weights
    seconds, memory = _SECONDS + size / _RATE, _MEMORY + _COPIES * size
    try:
        call(__name__, {"folder": str(folder), "file": str(file)}, seconds=seconds, memory=memory)
    except DiedError as died:
        raise InputError(
            f"a process that scored pairs with the graph {file} {died}: fetch the model again, or give another one"
        ) from died


def _score(given: Mapping[str, str]) -> None:
    folder = Path(given["folder"])
    model = OnnxModel._opened(folder, Path(given["file"]), _CPU_DEVICE)
    for length in (_SHORT, min(MOST_TOKENS, longest_input(folder))):
        ids = np.ones((1, length), np.int64)
        try:
            model.logits(PairBatch(ids, ids, np.zeros_like(ids)))
        except InputError as failed:  # a graph of other shapes is refused when it scores
            if _NO_MEMORY in str(failed):
                raise MemoryError from failed


def _session(file: Path, device: str | None) -> Any:
    runtime = require("onnxruntime", "onnx")
    options = runtime.SessionOptions()
    options.enable_cpu_mem_arena = False  # it would keep the memory of the largest batch
    options.enable_mem_pattern = False  # every batch has another shape
    options.log_severity_level = 3  # errors
    threads = os.environ.get(_THREADS, "")
    options.intra_op_num_threads = int(threads) if threads.isdigit() else 0  # 0: all cores
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # waiting threads leave cores to others
    providers = _providers(device, runtime.get_available_providers())
    try:
        return runtime.InferenceSession(str(file), options, providers=providers)
    except Exception as broken:  # onnxruntime's own errors have no common base but this
        sentence = str(broken).partition("\n")[0]
        raise InputError(f"model file {file} cannot be read ({sentence}): fetch the model again") from broken


def _providers(device: str | None, available: list[str]) -> list[Any]:
    kind, _, number = (device or ("cuda" if _CUDA in available else "cpu")).partition(":")
    if kind == "cpu":
        return [_CPU]
    if kind != "cuda" or _CUDA not in available or not (number or "0").isdigit():
        raise UsageError(f"onnxruntime has no device {device} here: install onnxruntime-gpu, or use cpu")
    return [(_CUDA, {"device_id": int(number or 0)}), _CPU]


def _contains(file: Path, pattern: re.Pattern[bytes]) -> bool:
    if not file.stat().st_size:
        return False  # an empty file cannot be mapped
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as graph:
        return pattern.search(graph) is not None


def _batch_tokens(file: Path, session: Any) -> int:
    if _contains(file, _QUANTISES_BATCHES):
        return _ONE_PAIR
    return _CUDA_BATCH_TOKENS if _CUDA in session.get_providers() else _CPU_BATCH_TOKENS


if __name__ == "__main__":
    answer(_score)
