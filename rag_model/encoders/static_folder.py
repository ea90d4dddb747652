"""The folders of static encoders: one vector a token of the vocabulary, and a text's is the mean of its tokens'.

Two layouts are read, as the packages that write them read them:

* model2vec's: the tensor `embeddings`, of fp32, fp16 or int8. After vocabulary quantisation `mapping` has the row of
  each token, and `weights` (also without a mapping) what its vector is multiplied by. Unknown tokens do not count.
* sentence-transformers' `StaticEmbedding`: the tensor `embedding.weight`, in the top folder or in the one that
  `modules.json` names. All tokens count.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self

import numpy as np
import numpy.typing as npt

from rag_model.digest import digest_chunks, digest_json
from rag_model.encoders.files import CONFIG, TOKENIZER, optional_object, read_object
from rag_model.encoders.sentence_transformers import MODULES, modules_of, prompts_of, supported
from rag_model.encoders.weights import WEIGHTS, StoredTensor, stored_tensors
from rag_model.errors import InputError

StaticPooling = Literal["static", "static-known"]
STATIC: Final[tuple[StaticPooling, ...]] = ("static", "static-known")  # with unknown tokens, and without
_EMBEDDINGS, _MAPPING, _WEIGHTS = "embeddings", "mapping", "weights"  # tensors of model2vec
_EMBEDDING = "embedding.weight"  # of sentence-transformers
_MODULE = "StaticEmbedding"
_MOST_TOKENS = 512  # of a text: the default of model2vec's `encode`
_WHOLE = 1_000_000  # tokens of a text where nothing is cut, as by sentence-transformers
_MOST_DIM = 1 << 16
_BLOCK = 1 << 14  # rows that are cast and hashed at a time
_AGAIN = "fetch the model again"
_MODEL2VEC = "model2vec"  # the `model_type` of its configs


@dataclass(frozen=True, slots=True)
class StaticTable:
    """The vectors of the tokens of a vocabulary, as a folder stores them."""

    folder: Path
    embeddings: StoredTensor  # (r, d)
    mapping: npt.NDArray[np.int32] | None  # (v,): the row of each token; None: its own number
    weights: npt.NDArray[np.float32] | None  # (v,): what the vector of each token is multiplied by; None: 1

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open the tensors of `static_body`; the embeddings are not yet read.

        Raises:
            InputError: a tensor is missing, or has another shape or type than it must.
        """
        stored = stored_tensors(folder)
        embeddings = stored.get(_EMBEDDINGS) or stored.get(_EMBEDDING)
        if embeddings is None:
            raise InputError(
                f"encoder {folder} has no tensor {_EMBEDDINGS} or {_EMBEDDING}: give the folder of a static encoder, "
                "as model2vec or sentence-transformers saves it"
            )
        if len(embeddings.shape) != 2 or not 0 < embeddings.shape[1] <= _MOST_DIM or not embeddings.shape[0]:
            raise InputError(
                f"the embeddings of encoder {folder} have the shape {list(embeddings.shape)}, which is not tokens by "
                f"dimensions: {_AGAIN}"
            )
        rows = embeddings.shape[0]
        mapping = _flat(stored[_MAPPING].integers()) if _MAPPING in stored else None
        if mapping is not None and not (len(mapping) and mapping.min() >= 0 and mapping.max() < rows):
            raise InputError(f"the mapping of encoder {folder} names rows that its {rows} embeddings lack: {_AGAIN}")
        weights = _flat(stored[_WEIGHTS].read()) if _WEIGHTS in stored else None
        size = rows if mapping is None else len(mapping)
        if weights is not None and len(weights) != size:
            raise InputError(f"encoder {folder} has {len(weights)} weights for {size} tokens: {_AGAIN}")
        if weights is not None:
            _check_finite(weights, folder)
        return cls(folder, embeddings, None if mapping is None else mapping.astype(np.int32), weights)

    @property
    def dim(self) -> int:
        """Return the length of a vector."""
        return self.embeddings.shape[1]

    @property
    def size(self) -> int:
        """Return how many tokens have a vector."""
        return self.embeddings.shape[0] if self.mapping is None else len(self.mapping)

    def vectors(self) -> npt.NDArray[np.float32]:
        """Return the (r, d) embeddings; float32 ones stay mapped from their file.

        Raises:
            InputError: they are of an unknown type, or cut off.
        """
        if self.embeddings.dtype == "F32":
            return np.require(self.embeddings.mapped(), np.float32, "A")
        return np.concatenate([*self._blocks()])

    def digest(self) -> str:
        """Return the digest of the numbers; reads all of them once.

        Raises:
            InputError: one is not finite, all vectors are zero, or they are of an unknown type or cut off.
        """
        others = {_MAPPING: self.mapping, _WEIGHTS: self.weights}
        told = {name: None if own is None else digest_chunks([own.tobytes()]) for name, own in others.items()}
        return digest_json({**told, _EMBEDDINGS: [list(self.embeddings.shape), digest_chunks(self._checked())]})

    def _checked(self) -> Iterator[bytes]:
        told = []  # for each row, whether it is no zero vector
        for block in self._blocks():
            _check_finite(block, self.folder)
            told.append(block.any(axis=1))
            yield block.tobytes()
        tokens = np.concatenate(told)[slice(None) if self.mapping is None else self.mapping]
        if not (tokens if self.weights is None else tokens & (self.weights != 0)).any():
            raise InputError(
                f"encoder {self.folder} has a zero vector for every token, so that all texts are alike: {_AGAIN}, or "
                "save it after its training"
            )

    def _blocks(self) -> Iterator[npt.NDArray[np.float32]]:
        stored = self.embeddings
        codes = stored.integers() if stored.is_integer else stored.mapped()
        for start in range(0, len(codes), _BLOCK):
            yield stored.as_float32(codes[start : start + _BLOCK])


def has_static_layout(folder: Path) -> bool:
    """Whether a folder is one of a static encoder, by its modules, its tensors or, where they are missing, its config.

    Raises:
        InputError: `modules.json`, the config or the header of the weights is damaged.
    """
    if (folder / MODULES).is_file():
        return _MODULE in modules_of(folder)
    if not (folder / WEIGHTS).is_file():
        return optional_object(folder / CONFIG).get("model_type") == _MODEL2VEC
    stored = stored_tensors(folder)
    return _EMBEDDINGS in stored or stored.keys() == {_EMBEDDING}


def static_body(folder: Path) -> Path:
    """Return the folder of a static encoder's weights and tokenizer: its own, or the one that its modules name.

    Raises:
        InputError: `modules.json` is damaged, or names a folder elsewhere.
    """
    path = modules_of(folder).get(_MODULE, "") if (folder / MODULES).is_file() else ""
    if path in {"", "."}:
        return folder
    if "/" in path or path.startswith("."):
        raise InputError(f"encoder file {folder / MODULES} names a folder outside of the encoder: {_AGAIN}")
    return folder / path


def read_static(folder: Path) -> dict[str, Any]:
    """Return the fields of `EncoderSpec` that the folder of a static encoder sets.

    Raises:
        InputError: a file is missing or corrupt, or the model has an unsupported part.
    """
    modules = supported(folder, (_MODULE, "Normalize")) if (folder / MODULES).is_file() else {}
    body = static_body(folder)
    known = _EMBEDDINGS in stored_tensors(body)
    normalize = optional_object(folder / CONFIG).get("normalize") if known else None
    given = (read_object(body / TOKENIZER).get("truncation") or {}).get("max_length")
    most = _MOST_TOKENS if known else _WHOLE
    return {
        "pooling": STATIC[known],
        "normalize": bool(normalize) if normalize is not None else "Normalize" in modules,
        "max_length": min(most, given) if isinstance(given, int) else most,
        **prompts_of(folder),
    }


def _flat(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return values.reshape(-1)


def _check_finite(values: npt.NDArray[np.float32], folder: Path) -> None:
    if not np.isfinite(values).all():
        raise InputError(f"encoder {folder} has embeddings that are not finite: {_AGAIN}")
