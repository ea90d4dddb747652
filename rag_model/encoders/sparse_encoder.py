"""Text to weighted terms: the sparse encoder of all stages, beside `encoder.Encoder`, which makes one vector a text."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from rag_model.corpus.ragged_file import offsets_of
from rag_model.corpus.sparse_file import MOST_WEIGHT, QUESTION_UNITS, SparseVectors
from rag_model.digest import digest_json
from rag_model.encoders.batches import LENGTH_MULTIPLE, STEADY_TOKENS, by_length, padded
from rag_model.encoders.encoder import Vectors
from rag_model.encoders.files import CONFIG
from rag_model.encoders.resolve import resolve_folder
from rag_model.encoders.room import halved
from rag_model.encoders.space import Space, asked_space, digest_tokenizer, tokenizer_files
from rag_model.encoders.sparse_spec import RECORDED, SIDR, SparseSpec, read_sparse_spec, vocabulary_of
from rag_model.encoders.spec import RECORD_FILE
from rag_model.encoders.tokens import TokenIds, load_tokenizer, tokenize
from rag_model.encoders.weights import digest_tensors, stored_tensors, weight_files
from rag_model.errors import InputError
from rag_model.extras import require

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

    from rag_model.encoders.sidr_model import SidrModel
    from rag_model.encoders.sparse_model import SparseModel

# Tokens of a batch, padding included: each has a logit for every term, 125 MB of float32 at 30,522 terms.
_CPU_BATCH_TOKENS = STEADY_TOKENS
_CUDA_BATCH_TOKENS = 16_384
_MOST_UNITS = 1 << 24  # of a question's term: a float32 holds it exactly
_HEADS = frozenset({"cls", "lm_head"})  # parts of the names of a masked-language model's head
_JOINED = "joined"  # the layout of a passage: `title text`
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SparseEncoder:
    """A loaded sparse encoder; make one with `load`."""

    name: str  # as the user gave it
    folder: Path
    spec: SparseSpec
    tokenizer: "Tokenizer"
    model: "SparseModel | SidrModel"
    budget: int  # tokens of a batch

    @classmethod
    def load(
        cls,
        name: str | Path,
        overrides: Mapping[str, Any] | None = None,
        *,
        device: str | None = None,
        dtype: str | None = None,
    ) -> Self:
        """Load the encoder in folder `name`, or of that hub name; `device` and `dtype` as `Encoder.load` takes them.

        Raises:
            InputError: it is not found, a file is missing or corrupt, or it is no masked-language model.
            MissingExtraError: the model extra is not installed.
            UsageError: an override is unknown, or this machine has no such device.
        """
        folder = resolve_folder(name)
        require("torch", "model")
        require("transformers", "model")
        spec = read_sparse_spec(folder, overrides)
        where, kind = import_module("rag_model.encoders.model").arithmetic(device, dtype)
        if spec.activation == SIDR:
            sidr = import_module("rag_model.encoders.sidr_model")
            model = sidr.SidrModel.load(folder, device=device, dtype=kind)
        else:
            sparse = import_module("rag_model.encoders.sparse_model")
            model = sparse.SparseModel.load(folder, spec, device=device, dtype=kind)
        return cls(str(name), folder, spec, load_tokenizer(folder, spec.max_length), model, batch_tokens(where))

    @property
    def dim(self) -> int:
        """The number of terms of the vocabulary."""
        return vocabulary_of(self.folder)

    @property
    def arithmetic(self) -> tuple[str, str]:
        """The device (cpu, cuda:0) and the arithmetic (bfloat16), which are recorded and never compared."""
        return str(self.model.device), str(self.model.dtype).removeprefix("torch.")

    def space(self) -> Space:
        """Return the space of its questions: the one that its folder declares, else that of its own passages.

        Raises:
            InputError: the declaration or a file of the encoder is corrupt.
        """
        return asked_space(self.folder) or sparse_space(self.folder, self.spec, self.name)

    def encode_questions(self, questions: Sequence[str], *, steady: bool = True) -> Vectors:
        """Return (q, l, 2) float32 of questions, in order: terms and their weights, the heaviest first.

        l is the most terms of a question, at least 1 and at most the spec's; a shorter one ends in weights of 0.
        Weights are multiples of 1 / 4096. `steady` as of `weighed`.

        Raises:
            InputError: a weight is not finite.
        """
        texts = [self.spec.question(question) for question in questions]
        terms, units = self._heaviest(texts, self.spec.question_terms, QUESTION_UNITS, _MOST_UNITS, steady=steady)
        width = max(1, int((units > 0).sum(axis=1).max(initial=0)))
        weights = (units / QUESTION_UNITS)[:, :width]
        return np.stack([np.where(weights > 0, terms[:, :width], 0), weights], axis=2).astype(np.float32)

    def encode_passages(self, titles: Sequence[str], texts: Sequence[str]) -> SparseVectors:
        """Return the weighted terms of passages, `title text` each, in order; they do not depend on one another.

        Raises:
            InputError: a weight is not finite.
        """
        inputs = [self.spec.passage(*both) for both in zip(titles, texts, strict=True)]
        terms, units = self._heaviest(inputs, self.spec.passage_terms, self.spec.scale, MOST_WEIGHT)
        order = np.argsort(np.where(units > 0, terms, self.dim), axis=1)  # by term, and what is none at the end
        terms, units = np.take_along_axis(terms, order, 1), np.take_along_axis(units, order, 1)
        held = units > 0  # (n, c)
        lengths = held.sum(axis=1, dtype=np.int64)
        return SparseVectors(terms[held].astype(np.int32), units[held].astype(np.uint8), offsets_of(lengths))

    def weights(self, texts: Sequence[str]) -> Vectors:
        """Return the (n, V) float32 weights of texts over the whole vocabulary, without prompts, quantising nothing.

        Raises:
            InputError: a weight is not finite.
        """
        out = np.zeros((len(texts), self.dim), np.float32)
        for rows, weights, _ in self._finite(texts):
            out[rows] = weights.cpu().numpy()
        return out

    def _heaviest(
        self, texts: Sequence[str], count: int, units: int, most: int, *, steady: bool = True
    ) -> tuple[Ints, Ints]:
        """Return terms and units, both (n, c), as `sparse_model.heaviest`."""
        heaviest = import_module("rag_model.encoders.sparse_model").heaviest
        model: Any = self.model
        shape = len(texts), min(count + (self.spec.max_length if self.spec.own_terms else 0), self.dim)
        terms, held = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for rows, weights, ids in self._finite(texts, steady=steady):
            own = model.own(ids) if self.spec.own_terms else None
            for out, found in zip((terms, held), heaviest(weights, count, units, most, own), strict=True):
                out[rows, : found.shape[1]] = found.cpu().numpy()
        return terms, held

    def weighed(self, texts: Sequence[str], *, steady: bool = True) -> Iterator[tuple[Ints, Any, Any]]:
        """Yield rows, their (b, V) float32 weights and their (b, t) ids, the longest texts first, without prompts.

        `steady` weights depend on no other text: a batch of too few texts repeats them (`batches.STEADY_TOKENS`).
        They may be not finite.
        """
        torch = require("torch", "model")
        lines = tokenize(self.tokenizer, texts)

        def of(rows: Ints) -> tuple[Any, Any]:
            ids, real = rectangle([lines[row] for row in rows], self.model.pad_id)
            with torch.inference_mode():
                inputs = [torch.from_numpy(one).to(self.model.device) for one in (ids, real)]
                return self.model(*inputs), inputs[0]

        least = min(STEADY_TOKENS, self.budget) if steady else 0
        for rows, (weights, ids) in halved(by_length([len(line) for line in lines], self.budget, least), of):
            with torch.inference_mode():
                yield rows, weights, ids

    def _finite(self, texts: Sequence[str], *, steady: bool = True) -> Iterator[tuple[Ints, Any, Any]]:
        for rows, weights, ids in self.weighed(texts, steady=steady):
            if not bool(weights.isfinite().all()):
                raise InputError(f"encoder {self.name} gave a weight that is not finite: fetch the model again")
            yield rows, weights, ids


def batch_tokens(device: "torch.device") -> int:
    """Return how many tokens a batch has on a device, padding included."""
    return _CUDA_BATCH_TOKENS if device.type == "cuda" else _CPU_BATCH_TOKENS


def sparse_space(folder: Path, spec: SparseSpec, name: str = "") -> Space:
    """Compute the space of the passages of the sparse encoder in `folder`; reads all weights once, the head's too.

    Raises:
        InputError: a file of the encoder is missing or corrupt.
    """
    stored = stored_tensors(folder)
    head = {name: tensor for name, tensor in stored.items() if _HEADS & {*name.split(".")}}
    body = {name: tensor for name, tensor in stored.items() if name not in head}
    known = {tensor.digest() for name, tensor in body.items() if name.endswith("embeddings.weight")}  # tied to it
    weighing = sorted({tensor.digest() for tensor in head.values()} - known)  # a bias may be stored twice
    return Space(
        name=name or folder.name,
        weights=digest_json([digest_tensors(body), weighing]),
        tokenizer=digest_tokenizer(folder),
        pooling=spec.weighing,
        normalize=False,
        max_length=spec.max_length,
        layout=_JOINED,
        passage_prompt=spec.passage_prompt,
        dim=vocabulary_of(folder),
    )


def sparse_files(folder: Path, spec: SparseSpec, space: Space, workdir: Path) -> dict[str, Path]:
    """Return, by name, the files that form, in one flat folder, a sparse encoder for questions in `space`.

    Its record, `bookwheel.json`, is written into `workdir`; the others are files of `folder`.

    Raises:
        InputError: `folder` has no weights or no tokenizer.
    """
    record = workdir / RECORD_FILE
    told = {"asks": space.to_json(), RECORDED: spec.to_json()}
    record.write_text(json.dumps(told, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    return {path.name: path for path in [folder / CONFIG, *tokenizer_files(folder), *weight_files(folder), record]}


def rectangle(
    lines: Sequence[TokenIds], fill: int, multiple: int = LENGTH_MULTIPLE
) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Return (b, t) ids, padded with `fill`, and (b, t) what is no padding; t is a multiple of `multiple`."""
    width = padded(max(map(len, lines)), multiple)
    real = np.arange(width) < np.array([len(line) for line in lines])[:, None]  # (t,) < (b, 1) -> (b, t)
    ids = np.full(real.shape, fill, np.int64)
    ids[real] = np.concatenate(lines)
    return ids, real
