"""Cross-encoders: score a question and a passage with one transformer (Nogueira and Cho 2019).

The score is the model's logit. A logit ranks the passages of one question and is not a probability.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
import numpy.typing as npt

from rag_model.encoders.files import CONFIG, find_onnx_file, list_tokenizer_files, read_max_tokens, read_optional_json
from rag_model.encoders.tokens import batch_by_length, find_pad_id, load_tokenizer, pad_length, pad_rows, run_batches
from rag_model.encoders.weights import WEIGHTS, WEIGHTS_INDEX, list_weight_files
from rag_model.errors import InputError
from rag_model.extras import require
from rag_model.tokenizer import explain_tokenizer_errors

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

MAX_PAIR_TOKENS = 512  # maximum tokens per pair, including special tokens
_ARCHITECTURE_SUFFIX = "ForSequenceClassification"
Ids = npt.NDArray[np.int64]
_SETTINGS_FILES = (CONFIG, "tokenizer_config.json")  # files with length limits
_WINDOW = 1_024  # number of pairs that are tokenized and sorted by length together
Scores = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PairBatch:
    """Model inputs of b pairs: three (b, t) int64 arrays, padded at the end."""

    input_ids: Ids
    attention_mask: Ids  # 1 for tokens, 0 for padding
    token_type_ids: Ids  # 0 for the question, 1 for the passage


@dataclass(frozen=True, slots=True)
class PairTokenizer:
    """The tokenizer of a cross-encoder; create one with `load`."""

    tokenizer: "Tokenizer"  # tokenizer that truncates pairs
    question_tokenizer: "Tokenizer"  # tokenizer that does not truncate
    max_length: int  # maximum tokens per pair
    pad_id: int

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load the tokenizer, which truncates a pair at 512 tokens, or at the model's lower limit.

        Raises:
            InputError: the tokenizer's files are missing or corrupt.
        """
        max_length = min(MAX_PAIR_TOKENS, read_max_tokens(folder))
        tokenizer, question_tokenizer = load_tokenizer(folder, max_length), load_tokenizer(folder, max_length)
        tokenizer.enable_truncation(max_length, strategy="only_second")
        question_tokenizer.no_truncation()
        return cls(tokenizer, question_tokenizer, max_length, find_pad_id(tokenizer, folder))

    @explain_tokenizer_errors()
    def encode(self, questions: Sequence[str], titles: Sequence[str], texts: Sequence[str]) -> "list[Encoding]":
        """Tokenize n pairs, in order.

        A passage is its title and its text, joined by a space; it is truncated if the pair is too
        long. A question is truncated only if less than a quarter of the tokens would be left for
        the passage.
        """
        truncated_questions = {question: self._truncate_question(question) for question in set(questions)}
        passages = [f"{title} {text}".strip() for title, text in zip(titles, texts, strict=True)]
        return self.tokenizer.encode_batch(
            [(truncated_questions[question], passage) for question, passage in zip(questions, passages, strict=True)]
        )

    def pad_batch(self, pairs: "Sequence[Encoding]", length_multiple: int = 1) -> PairBatch:
        """Pad encoded pairs to the length of the longest one, rounded up to a multiple of
        `length_multiple` tokens, but not beyond `max_length`.
        """
        width = min(pad_length(max(len(pair.ids) for pair in pairs), length_multiple), self.max_length)
        input_ids, is_token = pad_rows([pair.ids for pair in pairs], width, self.pad_id)
        return PairBatch(input_ids, is_token.astype(np.int64), pad_rows([pair.type_ids for pair in pairs], width, 0)[0])

    def _truncate_question(self, question: str) -> str:
        max_tokens = self.max_length - self.max_length // 4 - self.tokenizer.num_special_tokens_to_add(is_pair=True)
        token_spans = self.question_tokenizer.encode(question, add_special_tokens=False).offsets
        return question if len(token_spans) <= max_tokens else question[: token_spans[max_tokens - 1][1]]


def check_is_cross_encoder(folder: Path) -> None:
    """Check in the config, if there is one, that a folder contains a model with one score per pair.

    Raises:
        InputError: the folder contains a model of another kind, such as a bi-encoder or a
            classifier with several labels.
    """
    config = read_optional_json(folder / CONFIG)
    architecture = next(iter(config.get("architectures") or [""]))
    n_labels = len(config.get("id2label") or {}) or config.get("num_labels", 2)
    if config and not architecture.endswith(_ARCHITECTURE_SUFFIX):
        model_type = architecture or config.get("model_type")
        raise not_a_cross_encoder_error(folder, f"is a {model_type}, which does not score pairs")
    if config and n_labels != 1:
        raise InputError(
            f"{folder} computes {n_labels} scores per pair, but a cross-encoder computes 1: give another model"
        )


def not_a_cross_encoder_error(folder: Path, reason: str) -> InputError:
    """Return the error for a folder that does not contain a cross-encoder."""
    return InputError(
        f"{folder} {reason}: give a cross-encoder, a folder with a model for sequence "
        "classification, such as cross-encoder/ms-marco-MiniLM-L6-v2"
    )


class PairModel(Protocol):
    """A model that computes the logits of pairs: `TorchPairModel` or `OnnxPairModel`."""

    @property
    def batch_tokens(self) -> int:
        """The maximum number of tokens per batch, including padding; a batch has at least one
        pair.
        """
        ...

    def logits(self, batch: PairBatch) -> Scores:
        """Return the (b,) float32 logits of a batch."""
        ...


@dataclass(frozen=True, slots=True)
class CrossEncoder:
    """A loaded cross-encoder; create one with `load`."""

    tokenizer: PairTokenizer
    model: PairModel
    folder: Path | None = None  # None for a model in training

    @classmethod
    def load(cls, folder: Path, *, device: str | None = None, dtype: str | None = None) -> Self:
        """Load a sequence classifier with one label.

        `device` is a name such as `cpu` or `cuda:1`, by default a GPU, or else the CPU. `dtype` is
        by default the result of `choose_inference_dtype`; an ONNX graph has its own. A folder with
        safetensors is run by torch. A folder with only `model.onnx`, or with both if torch is not
        installed, is run by onnxruntime.

        Raises:
            InputError: a file is missing or corrupt, or it is another kind of model, such as a
                bi-encoder.
            MissingExtraError: neither the model nor the onnx extra is installed.
            UsageError: this machine has no such device, or torch has no such dtype.
        """
        model: PairModel
        if runs_on_onnx(folder):
            model = import_module("rag_model.encoders.onnx_cross_encoder").OnnxPairModel.load(folder, device)
        else:
            require("torch", "model")
            model = import_module("rag_model.encoders.torch_cross_encoder").TorchPairModel.load(folder, device, dtype)
        return cls(PairTokenizer.load(folder), model, folder)

    def scores(self, questions: Sequence[str], titles: Sequence[str], texts: Sequence[str]) -> Scores:
        """Return the (n,) float32 logits of n pairs of a question and a passage, in order; larger
        is better.

        In float32, a score depends on the other pairs by at most 1e-4. `PairTokenizer.encode`
        truncates pairs. Pairs are batched by length in windows, so memory does not grow with n.
        """
        scores = np.empty(len(questions), np.float32)
        for first_pair in range(0, len(questions), _WINDOW):
            span = slice(first_pair, first_pair + _WINDOW)
            scores[span] = self._score_window(self.tokenizer.encode(questions[span], titles[span], texts[span]))
        return scores

    def _score_window(self, pairs: "Sequence[Encoding]") -> Scores:
        scores = np.empty(len(pairs), np.float32)
        batches = batch_by_length([len(pair.ids) for pair in pairs], self.model.batch_tokens)
        for batch_rows, logits in run_batches(
            batches, lambda rows: self._compute_logits([pairs[row] for row in rows.tolist()])
        ):
            scores[batch_rows] = logits
        return scores

    def _compute_logits(self, pairs: "Sequence[Encoding]") -> Scores:
        return self.model.logits(self.tokenizer.pad_batch(pairs))


def list_cross_encoder_files(folder: Path) -> dict[str, Path]:
    """Return the paths of a cross-encoder's files by their relative names, sorted.

    Only the files for the library that runs the model on this machine (`runs_on_onnx`) are listed,
    so that other machines use the same library. For an ONNX model only the graph is listed, without
    external data (`may_have_external_data`).

    Raises:
        InputError: the folder has no weights, or no tokenizer.
    """
    onnx_path = find_onnx_file(folder) if runs_on_onnx(folder) else None
    settings_paths = [path for name in _SETTINGS_FILES if (path := folder / name).is_file()]
    paths = {*settings_paths, *list_tokenizer_files(folder), *([onnx_path] if onnx_path else list_weight_files(folder))}
    return {path.relative_to(folder).as_posix(): path for path in sorted(paths)}


def runs_on_onnx(folder: Path) -> bool:
    """Return whether onnxruntime, and not torch, runs the cross-encoder of a folder.

    Raises:
        InputError: the folder has no model.
    """
    has_safetensors = any((folder / name).is_file() for name in (WEIGHTS, WEIGHTS_INDEX))
    if find_onnx_file(folder) is None:
        if not has_safetensors:
            raise InputError(f"model {folder} has neither {WEIGHTS} nor an ONNX file: give a cross-encoder's folder")
        return False
    return not (has_safetensors and find_spec("torch"))
