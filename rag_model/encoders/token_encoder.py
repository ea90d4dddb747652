"""Text to token vectors: the ColBERT of all stages, beside `encoder.Encoder`, which makes one vector a text."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from rag_model.corpus.ragged_file import offsets_of
from rag_model.corpus.token_file import TokenVectors
from rag_model.digest import digest_json
from rag_model.encoders.batches import STEADY_TOKENS, by_length, padded
from rag_model.encoders.encoder import Vectors
from rag_model.encoders.files import CONFIG
from rag_model.encoders.resolve import resolve_folder
from rag_model.encoders.room import halved
from rag_model.encoders.sentence_transformers import MODULES
from rag_model.encoders.space import Space, asked_space, digest_tokenizer, tokenizer_files
from rag_model.encoders.spec import RECORD_FILE
from rag_model.encoders.token_pooling import pooled
from rag_model.encoders.token_spec import METADATA, PYLATE, RECORDED, TokenSpec, dense_folder, read_token_spec
from rag_model.encoders.tokens import TokenIds, load_tokenizer, tokenize
from rag_model.encoders.weights import WEIGHTS, digest_tensors, weight_files
from rag_model.errors import InputError
from rag_model.extras import require

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

    from rag_model.encoders.token_model import TokenModel

_JOINED = "joined"  # the layout of a passage: `title text`


@dataclass(frozen=True, slots=True)
class Marked:
    """Texts of one role as tokens with their mark."""

    ids: TokenIds  # (b, t): padded with [MASK]
    seen: npt.NDArray[np.bool_]  # (b, t): tokens that others attend to
    kept: npt.NDArray[np.bool_]  # (b, t): tokens that give a vector


@dataclass(frozen=True, slots=True)
class Marker:
    """Cuts texts into tokens and adds marks and masks, as a spec says."""

    spec: TokenSpec
    asked: "Tokenizer"
    read: "Tokenizer"
    marks: tuple[int, int]  # of questions and passages
    mask: int
    skipped: npt.NDArray[np.int32]

    @classmethod
    def load(cls, folder: Path, spec: TokenSpec) -> Self:
        """Load the tokenizer of `folder`.

        Raises:
            InputError: it is missing or corrupt, or has no token for a mark.
        """
        asked = load_tokenizer(folder, spec.question_length - 1)
        read = load_tokenizer(folder, spec.passage_length - 1)

        def number(token: str) -> int:
            found: int | None = asked.token_to_id(token)
            if found is None:
                raise InputError(f"the vocabulary of encoder {folder} has no token {token!r}: name marks that it has")
            return found

        skipped = [found for token in spec.skipped if (found := asked.token_to_id(token)) is not None]
        marks = number(spec.question_mark), number(spec.passage_mark)
        return cls(spec, asked, read, marks, number("[MASK]"), np.array(skipped, np.int32))

    def questions(self, texts: Sequence[str]) -> Marked:
        """Return questions, all of the spec's length; every token gives a vector, masks too."""
        lines = [_marked(ids, self.marks[0]) for ids in tokenize(self.asked, texts)]
        ids, real = _rectangle(lines, self.spec.question_length, self.mask)
        every = np.ones_like(real)
        return Marked(ids, every if self.spec.attend_to_masks else real, every)

    def passages(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return the tokens of passages, each with its mark."""
        return [_marked(ids, self.marks[1]) for ids in tokenize(self.read, texts)]

    def batch(self, lines: Sequence[TokenIds]) -> Marked:
        """Return passages as one batch; punctuation gives no vector."""
        ids, real = _rectangle(lines, padded(max(map(len, lines))), self.mask)
        return Marked(ids, real, real & ~np.isin(ids, self.skipped))


@dataclass(frozen=True, slots=True)
class TokenEncoder:
    """A loaded ColBERT; make one with `load`."""

    name: str  # as the user gave it
    folder: Path
    spec: TokenSpec
    marker: Marker
    model: "TokenModel"
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
        """Load the ColBERT in folder `name`, or of that hub name; `device` and `dtype` as `Encoder.load` takes them.

        Raises:
            InputError: it is not found, a file is missing or corrupt, or it is no ColBERT.
            MissingExtraError: the model extra is not installed.
            UsageError: an override is unknown, or this machine has no such device.
        """
        folder = resolve_folder(name)
        spec = read_token_spec(folder, overrides)
        require("torch", "model")
        require("transformers", "model")
        models = import_module("rag_model.encoders.model")
        where, kind = models.arithmetic(device, dtype)
        model = import_module("rag_model.encoders.token_model").TokenModel.load(folder, device=device, dtype=kind)
        budget = models.CUDA_BATCH_TOKENS if where.type == "cuda" else models.CPU_BATCH_TOKENS
        return cls(str(name), folder, spec, Marker.load(folder, spec), model, budget)

    @property
    def dim(self) -> int:
        """The number of components of a token's vector."""
        return self.model.dim

    @property
    def arithmetic(self) -> tuple[str, str]:
        """The device (cpu, cuda:0) and the arithmetic (bfloat16), which are recorded and never compared."""
        return str(self.model.device), str(self.model.linear.weight.dtype).removeprefix("torch.")

    def space(self) -> Space:
        """Return the space of its question vectors: the one that its folder declares, else that of its own passages.

        Raises:
            InputError: the declaration or a file of the encoder is corrupt.
        """
        return asked_space(self.folder) or token_space(self.folder, self.spec, self.name)

    def encode_questions(self, questions: Sequence[str]) -> Vectors:
        """Return (q, l, d) float32 vectors of questions, l the spec's question length, in order."""
        size = max(1, self.budget // self.spec.question_length)
        out = np.empty((len(questions), self.spec.question_length, self.dim), np.float32)
        for first in range(0, len(questions), size):
            batch = self.marker.questions(questions[first : first + size])
            out[first : first + size] = self._vectors(batch)
        return out

    def encode_passages(self, titles: Sequence[str], texts: Sequence[str]) -> TokenVectors:
        """Return the float32 vectors of passages, `title text` each, in order; they do not depend on one another.

        There is one a token that is kept, or fewer if the spec pools them.

        Raises:
            InputError: a vector is not finite.
        """
        return self.encode_inputs([self.spec.passage(*both) for both in zip(titles, texts, strict=True)])

    def encode_inputs(self, inputs: Sequence[str]) -> TokenVectors:
        """Return what `encode_passages` does, of passages as the spec joins them.

        Raises:
            InputError: a vector is not finite.
        """
        lines = self.marker.passages(inputs)
        if not lines:
            return TokenVectors(np.zeros((0, self.dim), np.float32), offsets_of(np.zeros(0, np.int64)))
        found: list[Vectors | None] = [None] * len(lines)
        for rows, vectors in self._batches(lines):
            found[rows] = pooled(vectors, self.spec.pool)
        whole = [one for one in found if one is not None]
        vectors = np.concatenate(whole)
        if not np.isfinite(vectors).all():
            raise InputError(f"encoder {self.name} made a vector that is not finite: fetch the model again")
        return TokenVectors(vectors, offsets_of(np.array([len(one) for one in whole], np.int64)))

    def _batches(self, lines: Sequence[TokenIds]) -> Iterator[tuple[int, Vectors]]:
        """Yield rows and their kept vectors, (t, d)."""
        least = min(STEADY_TOKENS, self.budget)
        batches = by_length([len(line) for line in lines], self.budget, least)
        for rows, (batch, found) in halved(batches, lambda rows: self._read([lines[row] for row in rows])):
            for row, vectors, kept in zip(rows.tolist(), found, batch.kept, strict=True):
                yield row, vectors[kept]

    def _read(self, lines: Sequence[TokenIds]) -> tuple[Marked, Vectors]:
        batch = self.marker.batch(lines)
        return batch, self._vectors(batch)

    def _vectors(self, batch: Marked) -> Vectors:
        torch = require("torch", "model")
        with torch.inference_mode():
            vectors: Vectors = self.model(*as_tensors(batch, self.model.device)).cpu().numpy()
        return vectors


def as_tensors(batch: Marked, device: "torch.device") -> "tuple[torch.Tensor, torch.Tensor]":
    """Return the ids (b, t) int64 and what is seen of them (b, t) bool, on a device."""
    tensor = require("torch", "model").from_numpy
    return tensor(batch.ids.astype(np.int64)).to(device), tensor(batch.seen).to(device)


def token_space(folder: Path, spec: TokenSpec, name: str = "") -> Space:
    """Compute the space of the passages of the ColBERT in `folder` as `spec` reads them; reads all weights once.

    Raises:
        InputError: a file of the encoder is missing or corrupt.
    """
    models = import_module("rag_model.encoders.token_model")
    projection = models.projection_of(folder)
    return Space(
        name=name or folder.name,
        weights=digest_json([digest_tensors(models.body_tensors(folder)), projection.digest()]),
        tokenizer=digest_tokenizer(folder),
        pooling=spec.pooling,
        normalize=True,
        max_length=spec.passage_length,
        layout=_JOINED,
        passage_prompt=spec.passage_mark,
        dim=int(projection.shape[0]),
    )


def token_files(
    folder: Path, spec: TokenSpec, space: Space, workdir: Path, more: Mapping[str, Any] | None = None
) -> dict[str, Path]:
    """Return, by relative name, the files that form a ColBERT for questions in `space`.

    Its record, `bookwheel.json`, is written into `workdir`, with `more` fields; the others are files of `folder`.

    Raises:
        InputError: `folder` has no weights or no tokenizer.
    """
    record = workdir / RECORD_FILE
    told = {"asks": space.to_json(), RECORDED: spec.to_json(), **(more or {})}
    record.write_text(json.dumps(told, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    files = {path.name: path for path in [folder / CONFIG, *tokenizer_files(folder), *weight_files(folder), record]}
    files |= {name: folder / name for name in (METADATA, MODULES, PYLATE) if (folder / name).is_file()}
    if dense := dense_folder(folder):
        files |= {f"{dense.name}/{name}": dense / name for name in (CONFIG, WEIGHTS)}
    return files


def _marked(ids: TokenIds, mark: int) -> TokenIds:
    return np.concatenate([ids[:1], [mark], ids[1:]]).astype(np.int32)


def _rectangle(lines: Sequence[TokenIds], width: int, fill: int) -> tuple[TokenIds, npt.NDArray[np.bool_]]:
    real = np.arange(width) < np.array([len(line) for line in lines])[:, None]  # (t,) < (b, 1) -> (b, t)
    ids = np.full(real.shape, fill, np.int32)
    ids[real] = np.concatenate(lines)
    return ids, real
