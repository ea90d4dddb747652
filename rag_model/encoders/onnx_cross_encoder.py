"""Compute the logits of pairs with onnxruntime, without torch.

An ONNX graph is a program, which may loop forever or need any amount of time and memory. Graphs
with loops are rejected. Before a process uses a graph, a child process with limits opens the graph
and scores pairs.
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

from rag_model.digest import digest_file
from rag_model.encoders.cross_encoder import (
    MAX_PAIR_TOKENS,
    PairBatch,
    check_is_cross_encoder,
    not_a_cross_encoder_error,
)
from rag_model.encoders.files import find_onnx_file, read_max_tokens
from rag_model.errors import InputError, UsageError
from rag_model.extras import require
from rag_model.process import ChildDiedError, run_in_child, serve_call

_INPUT_NAMES = ("input_ids", "attention_mask", "token_type_ids")
_CPU_DEVICE = "cpu"
_CPU, _CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
# Maximum tokens per batch, including padding. With 2,048, a float32 MiniLM is 15 % slower on a CPU.
_CPU_BATCH_TOKENS = 1024
_CUDA_BATCH_TOKENS = 65_536
_ONE_PAIR_TOKENS = 1  # a limit that every pair exceeds, so that a batch is one pair
_THREADS_VARIABLE = "OMP_NUM_THREADS"  # torch reads this variable too
# Operator of a graph that scales activations by their range over the batch, so that a score depends
# on the batch.
_DYNAMIC_QUANTIZATION = re.compile(rb"DynamicQuantize")
# Operators that run a subgraph in a loop. In the file, each name follows the last byte of its
# length.
_LOOP_OPERATORS = re.compile(rb"[\x04\x00](?:Loop|Scan)")
# Key of a tensor whose values are in another file (TensorProto.external_data). In the graph's file,
# it follows the last byte of its length.
_EXTERNAL_DATA = re.compile(rb"[\x08\x00]location")
_SECONDS = 60.0  # CPU seconds of the child for a small graph
_BYTES_PER_SECOND = 20e6  # one more CPU second for each 20 MB of a graph
_MEMORY_BYTES = 2 << 30  # bytes that the child may allocate, besides the weights
_WEIGHT_COPIES = 4  # copies of the weights in memory; onnxruntime repacks them for the processor
_SHORT_PAIR_TOKENS = 8  # number of tokens of a short test pair
_NO_MEMORY_TEXT = "bad_alloc"  # text in onnxruntime's out-of-memory errors


@dataclass(frozen=True, slots=True)
class OnnxPairModel:
    """An ONNX graph of a sequence classifier with one label; create one with `load`."""

    session: Any  # an onnxruntime.InferenceSession
    inputs: tuple[str, ...]  # input names of the graph
    output: str  # output name of the graph
    batch_tokens: int  # maximum tokens per batch, including padding; with 1, a batch is one pair

    @classmethod
    def load(cls, folder: Path, device: str | None = None) -> Self:
        """Load the graph of `folder`; `device` is `cpu` or `cuda:1`, by default a GPU if
        onnxruntime has one.

        A graph that quantizes activations dynamically processes one pair at a time, so that a score
        depends only on its pair.

        Raises:
            InputError: the file is missing or corrupt, the graph does not compute one score per
                pair, or the child process that tested it died or took too long.
            MissingExtraError: the onnx extra is not installed.
            UsageError: this build of onnxruntime has no such device.
        """
        file = find_onnx_file(folder)
        if file is None:
            raise InputError(f"cross-encoder {folder} has no model.onnx: give the folder of an ONNX export")
        check_is_cross_encoder(folder)
        if _file_matches(file, _LOOP_OPERATORS):
            raise not_a_cross_encoder_error(folder, "has a graph with loops, which may never end")
        _test_in_child(folder, file, digest_file(file))
        return cls._open(folder, file, device)

    @classmethod
    def _open(cls, folder: Path, onnx_path: Path, device: str | None) -> Self:
        session = _create_session(onnx_path, device)
        input_names, output = tuple(node.name for node in session.get_inputs()), session.get_outputs()[0]
        if unknown_inputs := [name for name in input_names if name not in _INPUT_NAMES]:
            raise not_a_cross_encoder_error(
                folder, f"has a graph with the input {unknown_inputs[0]}, unlike a cross-encoder"
            )
        if len(output.shape) != 2 or (isinstance(output.shape[1], int) and output.shape[1] != 1):
            raise not_a_cross_encoder_error(folder, f"has a graph whose output {output.name} is not one score per pair")
        return cls(session, input_names, output.name, _choose_batch_tokens(onnx_path, session))

    def logits(self, batch: PairBatch) -> npt.NDArray[np.float32]:
        """Return the (b,) float32 logits of a batch.

        Raises:
            InputError: the graph does not compute one number per pair, or does not fit its
                tokenizer.
        """
        input_arrays = {name: getattr(batch, name) for name in self.inputs}
        try:
            (scores,) = self.session.run([self.output], input_arrays)
        except Exception as error:  # the only common base class of onnxruntime's errors
            error_summary = str(error).partition("\n")[0]
            raise InputError(f"an ONNX model cannot score pairs ({error_summary}): fetch its folder again") from error
        if scores.shape != (len(batch.input_ids), 1):
            raise InputError(
                f"an ONNX model computes {scores.shape} scores for {len(batch.input_ids)} pairs: give another model"
            )
        logits: npt.NDArray[np.float32] = scores[:, 0].astype(np.float32)  # (b, 1) -> (b,)
        return logits


def may_have_external_data(folder: Path) -> bool:
    """Return whether a folder's ONNX graph may have weights in other files (external data).

    onnxruntime reads external data only from the folder of the graph, not through a link to another
    folder. The check has no false negatives, but may have false positives.
    """
    onnx_path = find_onnx_file(folder)
    return onnx_path is not None and _file_matches(onnx_path, _EXTERNAL_DATA)


def has_onnx_gpu() -> bool:
    """Return whether this build of onnxruntime can use a GPU.

    Raises:
        MissingExtraError: the onnx extra is not installed.
    """
    return _CUDA in require("onnxruntime", "onnx").get_available_providers()


@cache
def _test_in_child(folder: Path, graph: Path, digest: str) -> None:
    """Score two pairs in a child process with limits, once for each graph that this process loads.

    A changed graph has another `digest`, so it is tested again.
    """
    require("onnxruntime", "onnx")
    # All files are added up, because weights may be outside of the graph.
    model_bytes = sum(path.stat().st_size for path in graph.parent.iterdir() if path.is_file())
    timeout_seconds, memory = _SECONDS + model_bytes / _BYTES_PER_SECOND, _MEMORY_BYTES + _WEIGHT_COPIES * model_bytes
    try:
        run_in_child(__name__, {"folder": str(folder), "file": str(graph)}, seconds=timeout_seconds, memory=memory)
    except ChildDiedError as error:
        raise InputError(
            f"a process that scored pairs with the graph {graph} {error}: fetch the model again, or give another one"
        ) from error


def _score_in_child(arguments: Mapping[str, str]) -> None:
    folder = Path(arguments["folder"])
    model = OnnxPairModel._open(folder, Path(arguments["file"]), _CPU_DEVICE)
    for pair_tokens in (_SHORT_PAIR_TOKENS, min(MAX_PAIR_TOKENS, read_max_tokens(folder))):
        placeholder_ids = np.ones((1, pair_tokens), np.int64)
        try:
            model.logits(PairBatch(placeholder_ids, placeholder_ids, np.zeros_like(placeholder_ids)))
        except InputError as error:  # other faults, such as wrong shapes, are reported at use
            if _NO_MEMORY_TEXT in str(error):
                raise MemoryError from error


def _create_session(onnx_path: Path, device: str | None) -> Any:
    runtime = require("onnxruntime", "onnx")
    options = runtime.SessionOptions()
    options.enable_cpu_mem_arena = False  # an arena would keep the memory of the largest batch
    options.enable_mem_pattern = False  # patterns help only batches of equal shape
    options.log_severity_level = 3  # log only errors
    thread_setting = os.environ.get(_THREADS_VARIABLE, "")
    # With 0, onnxruntime uses all cores.
    options.intra_op_num_threads = int(thread_setting) if thread_setting.isdigit() else 0
    # Leave cores to other processes.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    providers = _choose_providers(device, runtime.get_available_providers())
    try:
        return runtime.InferenceSession(str(onnx_path), options, providers=providers)
    except Exception as error:  # the only common base class of onnxruntime's errors
        error_summary = str(error).partition("\n")[0]
        raise InputError(f"model file {onnx_path} cannot be read ({error_summary}): fetch the model again") from error


def _choose_providers(device: str | None, available_providers: list[str]) -> list[Any]:
    device_type, _, device_number = (device or ("cuda" if _CUDA in available_providers else "cpu")).partition(":")
    if device_type == "cpu":
        return [_CPU]
    if device_type != "cuda" or _CUDA not in available_providers or not (device_number or "0").isdigit():
        raise UsageError(f"onnxruntime has no device {device}: install onnxruntime-gpu, or use cpu")
    return [(_CUDA, {"device_id": int(device_number or 0)}), _CPU]


def _file_matches(onnx_path: Path, pattern: re.Pattern[bytes]) -> bool:
    if not onnx_path.stat().st_size:
        return False  # an empty file cannot be mapped
    with onnx_path.open("rb") as graph_file, mmap.mmap(graph_file.fileno(), 0, access=mmap.ACCESS_READ) as graph_bytes:
        return pattern.search(graph_bytes) is not None


def _choose_batch_tokens(onnx_path: Path, session: Any) -> int:
    if _file_matches(onnx_path, _DYNAMIC_QUANTIZATION):
        return _ONE_PAIR_TOKENS
    return _CUDA_BATCH_TOKENS if _CUDA in session.get_providers() else _CPU_BATCH_TOKENS


if __name__ == "__main__":
    serve_call(_score_in_child)
