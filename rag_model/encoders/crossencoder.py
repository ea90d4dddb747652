"""Cross-encoders: question and passage through one transformer, one score out (Nogueira and Cho 2019).

The score is the logit, as the model gives it: it orders the passages of one question, and is no probability.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
import numpy.typing as npt

from rag_model.encoders.batches import by_length
from rag_model.encoders.files import CONFIG
from rag_model.encoders.pairs.session import OnnxModel, onnx_file
from rag_model.encoders.pairs.tokens import PairBatch, PairTokens
from rag_model.encoders.room import halved
from rag_model.encoders.space import tokenizer_files
from rag_model.encoders.weights import WEIGHTS, WEIGHTS_INDEX, weight_files
from rag_model.errors import InputError
from rag_model.extras import require

if TYPE_CHECKING:
    from tokenizers import Encoding

_SETTINGS = (CONFIG, "tokenizer_config.json")  # which may both limit a pair's tokens
_WINDOW = 1_024  # pairs that are tokenised and sorted by length together
Scores = npt.NDArray[np.float32]


class PairModel(Protocol):
    """What computes the logits of pairs."""

    @property
    def batch_tokens(self) -> int:
        """Return how many tokens a batch may have, padding included; a batch has one pair or more."""
        ...

    def logits(self, batch: PairBatch) -> Scores:
        """Return the (b,) float32 logits of a batch."""
        ...


@dataclass(frozen=True, slots=True)
class CrossEncoder:
    """A loaded cross-encoder; make one with `load`."""

    tokens: PairTokens
    model: PairModel
    folder: Path | None = None  # None: of a model in training

    @classmethod
    def load(cls, folder: Path, *, device: str | None = None) -> Self:
        """Load a folder of a sequence classifier with one label, in float32, or as its ONNX graph has it.

        `device` (`cpu`, `cuda:1`): by default a GPU, else the CPU. A folder with safetensors is run by torch; one with
        `model.onnx`, or both where torch is not installed, by onnxruntime.

        Raises:
            InputError: a file is missing or corrupt, or it is another kind of model, such as a bi-encoder.
            MissingExtraError: neither the model nor the onnx extra is installed.
            UsageError: this machine has no such device.
        """
        model: PairModel
        if by_onnx(folder):
            model = OnnxModel.load(folder, device)
        else:
            require("torch", "model")
            model = import_module("rag_model.encoders.pairs.classifier").TorchModel.load(folder, device)
        return cls(PairTokens.load(folder), model, folder)

    def scores(self, questions: Sequence[str], titles: Sequence[str], texts: Sequence[str]) -> Scores:
        """Return the (n,) float32 logits of n pairs of a question and a passage, in order; larger is better.

        A score does not depend on the other pairs, up to 1e-4. Pairs are cut as `PairTokens.encode` says, and batched
        by length: memory does not grow with n.
        """
        out = np.empty(len(questions), np.float32)
        for start in range(0, len(questions), _WINDOW):
            window = slice(start, start + _WINDOW)
            out[window] = self._scored(self.tokens.encode(questions[window], titles[window], texts[window]))
        return out

    def _scored(self, pairs: "Sequence[Encoding]") -> Scores:
        out = np.empty(len(pairs), np.float32)
        batches = by_length([len(pair.ids) for pair in pairs], self.model.batch_tokens)
        for rows, logits in halved(batches, lambda rows: self._logits([pairs[row] for row in rows.tolist()])):
            out[rows] = logits
        return out

    def _logits(self, pairs: "Sequence[Encoding]") -> Scores:
        return self.model.logits(self.tokens.batch(pairs))


def cross_encoder_files(folder: Path) -> dict[str, Path]:
    """Return the files of a cross-encoder by their relative names, sorted.

    They are those of the one library that runs it here (`by_onnx`), so that the same one runs them elsewhere. An ONNX
    graph is one file: what lies beside it (`weights_beside`) is left out.

    Raises:
        InputError: it has no weights, or no tokenizer.
    """
    graph = onnx_file(folder) if by_onnx(folder) else None
    settings = [path for name in _SETTINGS if (path := folder / name).is_file()]
    found = {*settings, *tokenizer_files(folder), *([graph] if graph else weight_files(folder))}
    return {path.relative_to(folder).as_posix(): path for path in sorted(found)}


def by_onnx(folder: Path) -> bool:
    """Return whether onnxruntime runs the cross-encoder of a folder, and not torch.

    Raises:
        InputError: it has no model.
    """
    by_torch = any((folder / name).is_file() for name in (WEIGHTS, WEIGHTS_INDEX))
    if onnx_file(folder) is None:
        if not by_torch:
            raise InputError(f"model {folder} has neither {WEIGHTS} nor an ONNX file: give a cross-encoder's folder")
        return False
    return not (by_torch and find_spec("torch"))
