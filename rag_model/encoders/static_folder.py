"""Read and run static encoders, whose vector of a text is the mean of its tokens' vectors.

Two layouts are read, with the semantics of the packages that write them:

* model2vec: the tensor `embeddings` in fp32, fp16 or int8. After vocabulary quantization, `mapping`
  contains the row of each token. `weights`, with or without a mapping, are factors of the token
  vectors. Unknown tokens are ignored.
* sentence-transformers' `StaticEmbedding`: the tensor `embedding.weight`, in the top folder or in
  the folder that `modules.json` names. All tokens count.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self

import numpy as np
import numpy.typing as npt

from rag_model.digest import digest_chunks, digest_json
from rag_model.encoders.files import (
    CONFIG,
    MODULES,
    TOKENIZER,
    read_json_object,
    read_modules,
    read_optional_json,
    read_prompts,
    read_supported_modules,
    read_vector_settings,
)
from rag_model.encoders.weights import WEIGHTS, StoredTensor, read_tensor_headers
from rag_model.errors import InputError

StaticPooling = Literal["static", "static-known"]
# `static` is the mean of all tokens, `static-known` the mean of the known tokens.
STATIC_POOLINGS: Final[tuple[StaticPooling, ...]] = "static", "static-known"
_EMBEDDINGS, _MAPPING, _WEIGHTS = "embeddings", "mapping", "weights"  # tensors of model2vec
_MODULE_EMBEDDINGS = "embedding.weight"  # tensor of a `StaticEmbedding` module
_STATIC_MODULE = "StaticEmbedding"
_DEFAULT_MAX_TOKENS = 512  # maximum tokens per text, the default of model2vec's `encode`
# A limit that no text reaches, because sentence-transformers does not truncate either.
_UNLIMITED_TOKENS = 1_000_000
_MAX_DIM = 1 << 16
_MIN_NORM = 1e-12  # minimum divisor in a normalization, as in torch's `normalize`
_ROWS_PER_BLOCK = 1 << 14  # number of rows that are cast and hashed at a time
_FETCH_AGAIN = "fetch the model again"
_MODEL2VEC_TYPE = "model2vec"  # `model_type` in the configs of model2vec


@dataclass(frozen=True, slots=True)
class StaticTable:
    """The token vectors of a static encoder, as stored in its folder."""

    folder: Path
    embeddings: StoredTensor  # (r, d)
    # (v,) row of each token id; None if the row is the token id
    mapping: npt.NDArray[np.int32] | None
    weights: npt.NDArray[np.float32] | None  # (v,) factor of each token vector; None if all are 1

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open the tensors in a folder from `find_static_body`, without reading the embeddings.

        Raises:
            InputError: a tensor is missing, or has a wrong shape or dtype.
        """
        tensors = read_tensor_headers(folder)
        embeddings = tensors.get(_EMBEDDINGS) or tensors.get(_MODULE_EMBEDDINGS)
        if embeddings is None:
            raise InputError(
                f"encoder {folder} has no tensor {_EMBEDDINGS} or {_MODULE_EMBEDDINGS}: give the folder of "
                "a static encoder, as model2vec or sentence-transformers saves it"
            )
        if len(embeddings.shape) != 2 or not 0 < embeddings.shape[1] <= _MAX_DIM or not embeddings.shape[0]:
            raise InputError(
                f"the embeddings of encoder {folder} have the shape {list(embeddings.shape)}, "
                f"which is not tokens by dimensions: {_FETCH_AGAIN}"
            )
        n_rows = embeddings.shape[0]
        token_rows = tensors[_MAPPING].memory_map_integers().reshape(-1) if _MAPPING in tensors else None
        if token_rows is not None and not (len(token_rows) and token_rows.min() >= 0 and token_rows.max() < n_rows):
            raise InputError(
                f"the mapping of encoder {folder} refers to rows that its {n_rows} embeddings lack: {_FETCH_AGAIN}"
            )
        token_weights = tensors[_WEIGHTS].read().reshape(-1) if _WEIGHTS in tensors else None
        n_tokens = n_rows if token_rows is None else len(token_rows)
        if token_weights is not None and len(token_weights) != n_tokens:
            raise InputError(f"encoder {folder} has {len(token_weights)} weights for {n_tokens} tokens: {_FETCH_AGAIN}")
        if token_weights is not None:
            _check_finite(token_weights, folder)
        return cls(folder, embeddings, None if token_rows is None else token_rows.astype(np.int32), token_weights)

    @property
    def dim(self) -> int:
        """Dimension of a vector."""
        return self.embeddings.shape[1]

    @property
    def size(self) -> int:
        """Number of tokens that have a vector."""
        return self.embeddings.shape[0] if self.mapping is None else len(self.mapping)

    def read_vectors(self) -> npt.NDArray[np.float32]:
        """Return the (r, d) embeddings; float32 embeddings stay memory-mapped.

        Raises:
            InputError: the dtype is unknown, or the file is truncated.
        """
        if self.embeddings.dtype == "F32":
            return np.require(self.embeddings.memory_map(), np.float32, "A")
        return np.concatenate([*self._iter_blocks()])

    def digest(self) -> str:
        """Return the digest of all values, which are read once.

        Raises:
            InputError: a value is not finite, all vectors are zero, the dtype is unknown, or the
                file is truncated.
        """
        optional_arrays = {_MAPPING: self.mapping, _WEIGHTS: self.weights}
        array_digests = {
            name: None if array is None else digest_chunks([array.tobytes()]) for name, array in optional_arrays.items()
        }
        return digest_json(
            {**array_digests, _EMBEDDINGS: [list(self.embeddings.shape), digest_chunks(self._iter_checked_blocks())]}
        )

    def _iter_checked_blocks(self) -> Iterator[bytes]:
        is_nonzero_by_block = []  # whether each row is nonzero, block by block
        for block in self._iter_blocks():
            _check_finite(block, self.folder)
            is_nonzero_by_block.append(block.any(axis=1))
            yield block.tobytes()
        is_token_nonzero = np.concatenate(is_nonzero_by_block)[slice(None) if self.mapping is None else self.mapping]
        if not (is_token_nonzero if self.weights is None else is_token_nonzero & (self.weights != 0)).any():
            raise InputError(
                f"encoder {self.folder} has a zero vector for every token, so that all texts have "
                f"the same vector: {_FETCH_AGAIN}, or save it after its training"
            )

    def _iter_blocks(self) -> Iterator[npt.NDArray[np.float32]]:
        tensor = self.embeddings
        stored_table = tensor.memory_map_integers() if tensor.is_integer else tensor.memory_map()
        for first_row in range(0, len(stored_table), _ROWS_PER_BLOCK):
            yield tensor.as_float32(stored_table[first_row : first_row + _ROWS_PER_BLOCK])


@dataclass(frozen=True, slots=True)
class StaticModel:
    """A static model, which maps token ids to vectors with numpy only, because importing torch
    takes longer than encoding a hundred thousand texts.

    A float32 table stays memory-mapped, so that processes share it.
    """

    table: npt.NDArray[np.float32]  # (r, d)
    # (v,) table row of each token id; None if the row is the token id
    mapping: npt.NDArray[np.int32] | None
    weights: npt.NDArray[np.float32] | None  # (v,) weight of each token; None if all are 1
    dim: int  # dimension of a vector: the table's, or `truncate_dim` of the spec
    normalize: bool  # whether vectors have unit length
    device: Literal["cpu"] = "cpu"
    dtype: Literal["float32"] = "float32"
    transformers_model: None = None  # a static encoder cannot be trained

    @classmethod
    def from_table(cls, table: StaticTable, *, truncate_dim: int | None, normalize: bool) -> Self:
        """Read the vectors of an opened table."""
        return cls(table.read_vectors(), table.mapping, table.weights, truncate_dim or table.dim, normalize)

    def encode(
        self, token_ids: Sequence[npt.NDArray[np.int32]], *, batch_invariant: bool = False
    ) -> npt.NDArray[np.float32]:
        """Return the (n, d) float32 vectors of inputs, in order; an input without tokens has a zero
        vector.

        Vectors never depend on the other inputs, so `batch_invariant` has no effect. The first
        tokens of all inputs are added to the sums at once, then the second ones, and so on. The
        inputs are sorted by length, longest first, so that the inputs with a token at a given
        position come first.
        """
        counts = np.array([len(ids) for ids in token_ids], np.int64)  # (n,)
        longest_first = np.argsort(-counts, kind="stable")
        all_token_ids = np.concatenate([np.zeros(0, np.int32), *token_ids])  # ragged -> (t,)
        text_starts = (np.cumsum(counts) - counts)[longest_first]
        n_active_by_position = np.searchsorted(
            -counts[longest_first], -np.arange(counts.max(initial=0))
        )  # for each position, the number of inputs that are longer
        totals = np.zeros((len(token_ids), self.table.shape[1]), np.float32)
        for position, n_active in enumerate(n_active_by_position.tolist()):
            column_ids = all_token_ids[text_starts[:n_active] + position]  # (b,)
            # (b, d)
            token_vectors = self.table[column_ids if self.mapping is None else self.mapping[column_ids]]
            if self.weights is not None:
                token_vectors *= self.weights[column_ids, None]
            totals[:n_active] += token_vectors
        means = np.empty((len(token_ids), self.dim), np.float32)
        means[longest_first] = totals[:, : self.dim] / np.maximum(counts[longest_first], 1).astype(np.float32)[:, None]
        if self.normalize:
            means /= np.maximum(np.linalg.norm(means, axis=1, keepdims=True), np.float32(_MIN_NORM))
        return means


def has_static_layout(folder: Path) -> bool:
    """Return whether a folder contains a static encoder, by its modules, its tensors or, without
    tensors, its config.

    Raises:
        InputError: `modules.json`, the config or the header of the weights is damaged.
    """
    if (folder / MODULES).is_file():
        return _STATIC_MODULE in read_modules(folder)
    if not (folder / WEIGHTS).is_file():
        return read_optional_json(folder / CONFIG).get("model_type") == _MODEL2VEC_TYPE
    tensors = read_tensor_headers(folder)
    return _EMBEDDINGS in tensors or tensors.keys() == {_MODULE_EMBEDDINGS}


def find_static_body(folder: Path) -> Path:
    """Return the folder with a static encoder's weights and tokenizer: its own, or the one in
    `modules.json`.

    Raises:
        InputError: `modules.json` is damaged, or names a folder outside of the encoder.
    """
    module_path = read_modules(folder).get(_STATIC_MODULE, "") if (folder / MODULES).is_file() else ""
    if module_path in {"", "."}:
        return folder
    if "/" in module_path or module_path.startswith("."):
        raise InputError(f"encoder file {folder / MODULES} refers to a folder outside of the encoder: {_FETCH_AGAIN}")
    return folder / module_path


def read_static_settings(folder: Path) -> dict[str, Any]:
    """Read the fields of `EncoderSpec` that the folder of a static encoder sets.

    Raises:
        InputError: a file is missing or corrupt, or the model has an unsupported part.
    """
    modules = read_supported_modules(folder, (_STATIC_MODULE, "Normalize")) if (folder / MODULES).is_file() else {}
    body_folder = find_static_body(folder)
    is_model2vec = _EMBEDDINGS in read_tensor_headers(body_folder)
    normalize = read_optional_json(folder / CONFIG).get("normalize") if is_model2vec else None
    tokenizer_limit = (read_json_object(body_folder / TOKENIZER).get("truncation") or {}).get("max_length")
    default_limit = _DEFAULT_MAX_TOKENS if is_model2vec else _UNLIMITED_TOKENS
    # Folders that model2vec wrote declare no similarity.
    is_plain_model2vec = is_model2vec and not modules
    vector_settings = {"normalize": bool(normalize)} if is_plain_model2vec else read_vector_settings(folder, modules)
    return {
        **vector_settings,
        "pooling": STATIC_POOLINGS[is_model2vec],
        "max_length": min(default_limit, tokenizer_limit) if isinstance(tokenizer_limit, int) else default_limit,
        **read_prompts(folder),
    }


def _check_finite(table: npt.NDArray[np.float32], folder: Path) -> None:
    if not np.isfinite(table).all():
        raise InputError(f"encoder {folder} has embeddings that are not finite: {_FETCH_AGAIN}")
