"""ColBERT: encode passages and questions as one vector per token.

Token pooling represents a passage by fewer vectors, each the mean of similar tokens: Clavié,
Chaffin and Adams 2024, "Reducing the Footprint of Multi-Vector Retrieval with Minimal Performance
Impact via Token Pooling" (arXiv 2409.14683), section 2. The tokens are clustered hierarchically
by Ward's criterion, and each cluster is represented by its mean, which is normalized here because
MaxSim compares cosines.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from rag_model.corpus.ragged_file import TokenVectors, compute_offsets
from rag_model.digest import digest_json
from rag_model.encoders.encoder import Vectors
from rag_model.encoders.files import CONFIG, MODULES, list_tokenizer_files, resolve_folder
from rag_model.encoders.space import Space, describe_unusual_settings, digest_tokenizer, read_declared_space
from rag_model.encoders.spec import (
    JOINED,
    PYLATE_CONFIG,
    STANFORD_METADATA,
    TOKENS_KEY,
    TokenSpec,
    find_dense_folder,
    read_token_spec,
    write_encoder_record,
)
from rag_model.encoders.tokens import (
    BATCH_INVARIANT_TOKENS,
    TokenIds,
    batch_by_length,
    count_truncated,
    load_tokenizer,
    pad_length,
    pad_rows,
    run_batches,
    tokenize,
)
from rag_model.encoders.weights import WEIGHTS, digest_tensors, list_weight_files
from rag_model.errors import InputError
from rag_model.extras import require

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

    from rag_model.encoders.token_model import TokenModel


def pool_tokens(vectors: Vectors, factor: int) -> Vectors:
    """Pool (t, d) unit vectors to (ceil(t / factor), d) float32 unit vectors, in the order of their
    first tokens.
    """
    n_clusters = -(-len(vectors) // factor)
    if n_clusters == len(vectors):
        return vectors
    sums = np.zeros((n_clusters, vectors.shape[1]), np.float32)
    np.add.at(sums, cluster_tokens(vectors, n_clusters), vectors)  # (t,), (t, d) -> (n_clusters, d)
    pooled_vectors: Vectors = sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), np.float32(1e-12))
    return pooled_vectors


def cluster_tokens(vectors: Vectors, n_clusters: int) -> npt.NDArray[np.int64]:
    """Return the (t,) cluster number of each token; clusters are numbered from 0 in the order of
    their first tokens.

    Every token starts as one cluster. Each step merges two clusters so that the sum of squared
    distances from the means increases least (Ward 1963), until `n_clusters` clusters are left; ties
    go to the first pair. The new distances follow from the old ones (Lance and Williams 1967), with
    cluster sizes k, i and j: d(k, i+j) = ((k + i) d(k, i) + (k + j) d(k, j) - k d(i, j)) / (k + i +
    j).
    """
    n = len(vectors)
    float64_vectors = vectors.astype(np.float64)
    squared_norms = np.einsum("td,td->t", float64_vectors, float64_vectors)
    # (t, t) squared distances.
    distances = squared_norms[:, None] + squared_norms[None, :] - 2 * float64_vectors @ float64_vectors.T
    np.fill_diagonal(distances, np.inf)
    sizes, cluster_ids = np.ones(n), np.arange(n)
    for _ in range(n - n_clusters):
        i, j = sorted(divmod(int(distances.argmin()), n))
        merged_distances = (
            (sizes + sizes[i]) * distances[i] + (sizes + sizes[j]) * distances[j] - sizes * distances[i, j]
        )
        merged_distances /= sizes + sizes[i] + sizes[j]
        # The distances of i to itself and to merged clusters stay infinite.
        distances[i] = distances[:, i] = merged_distances
        distances[j] = distances[:, j] = np.inf
        sizes[i] += sizes[j]
        cluster_ids[cluster_ids == j] = i
    cluster_numbers: npt.NDArray[np.int64] = np.unique(cluster_ids, return_inverse=True)[1]
    return cluster_numbers


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """A padded batch of questions, or of passages, with their marker tokens."""

    ids: npt.NDArray[np.int64]  # (b, t) token ids, padded with [MASK]
    attention_mask: npt.NDArray[np.bool_]  # (b, t) whether other tokens attend to each token
    output_mask: npt.NDArray[np.bool_]  # (b, t) whether each token gets an output vector


@dataclass(frozen=True, slots=True)
class ColbertTokenizer:
    """A tokenizer that adds the marker tokens and the mask tokens of a spec."""

    spec: TokenSpec
    question_tokenizer: "Tokenizer"
    passage_tokenizer: "Tokenizer"
    mark_ids: tuple[int, int]  # token ids of the marker tokens of questions and of passages
    mask_id: int  # token id of [MASK]
    skipped_ids: npt.NDArray[np.int32]  # ids of passage tokens without a vector

    @classmethod
    def load(cls, folder: Path, spec: TokenSpec) -> Self:
        """Load the tokenizer of `folder`.

        Raises:
            InputError: the tokenizer is missing or corrupt, or its vocabulary has no marker token.
        """
        question_tokenizer = load_tokenizer(folder, spec.question_length - 1)
        passage_tokenizer = load_tokenizer(folder, spec.passage_length - 1)

        def require_token_id(token: str) -> int:
            token_id: int | None = question_tokenizer.token_to_id(token)
            if token_id is None:
                raise InputError(
                    f"the vocabulary of encoder {folder} has no token {token!r}: choose marks from the vocabulary"
                )
            return token_id

        skipped_ids = [
            token_id for token_id in map(question_tokenizer.token_to_id, spec.skipped) if token_id is not None
        ]
        mark_ids = require_token_id(spec.question_mark), require_token_id(spec.passage_mark)
        return cls(
            spec,
            question_tokenizer,
            passage_tokenizer,
            mark_ids,
            require_token_id("[MASK]"),
            np.array(skipped_ids, np.int32),
        )

    def encode_questions(self, texts: Sequence[str]) -> TokenBatch:
        """Return a batch of questions, padded with [MASK] to `question_length`; every token gets a
        vector.
        """
        token_rows = tokenize(self.question_tokenizer, list(map(self.spec.format_question, texts)))
        marked_ids = [_insert_mark_id(ids, self.mark_ids[0]) for ids in token_rows]
        ids, is_token = pad_rows(marked_ids, self.spec.question_length, self.mask_id)
        all_true = np.ones_like(is_token)
        return TokenBatch(ids, all_true if self.spec.attend_to_masks else is_token, all_true)

    def encode_passages(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return the token ids of passages, each with the passages' marker token."""
        return [_insert_mark_id(ids, self.mark_ids[1]) for ids in tokenize(self.passage_tokenizer, texts)]

    def pad_passages(self, id_rows: Sequence[TokenIds]) -> TokenBatch:
        """Pad passages to one batch; skipped tokens, such as punctuation, get no vector."""
        ids, is_token = pad_rows(id_rows, pad_length(max(map(len, id_rows))), self.mask_id)
        return TokenBatch(ids, is_token, is_token & ~np.isin(ids, self.skipped_ids))


@dataclass(frozen=True, slots=True)
class TokenEncoder:
    """A loaded ColBERT; create one with `load`."""

    name: str  # name that the user gave
    folder: Path
    spec: TokenSpec
    tokenizer: ColbertTokenizer
    model: "TokenModel"
    batch_tokens: int  # maximum tokens per batch

    @classmethod
    def load(
        cls,
        name: str | Path,
        overrides: Mapping[str, Any] | None = None,
        *,
        device: str | None = None,
        dtype: str | None = None,
    ) -> Self:
        """Load a ColBERT from a folder, or by its hub name; for `device` and `dtype`, see
        `Encoder.load`.

        Raises:
            InputError: the model is not found, a file is missing or corrupt, or it is not a
                ColBERT.
            MissingExtraError: the model extra is not installed.
            UsageError: an override is unknown, or this machine has no such device.
        """
        folder = resolve_folder(name)
        spec = read_token_spec(folder, overrides)
        require("torch", "model")
        require("transformers", "model")
        model_module = import_module("rag_model.encoders.model")
        resolved_device, resolved_dtype = model_module.resolve_device_and_dtype(device, dtype)
        model = import_module("rag_model.encoders.token_model").TokenModel.load(
            folder, device=device, dtype=resolved_dtype
        )
        batch_tokens = model_module.get_max_batch_tokens(resolved_device)
        return cls(str(name), folder, spec, ColbertTokenizer.load(folder, spec), model, batch_tokens)

    @property
    def dim(self) -> int:
        """Dimension of a token vector."""
        return self.model.dim

    def space(self) -> Space:
        """Return the vector space of the encoder's questions: the space that the folder declares,
        or else the space of its own passages.

        Raises:
            InputError: the declaration or a file of the encoder is corrupt.
        """
        return read_declared_space(self.folder) or compute_token_space(self.folder, self.spec, self.name)

    def encode_questions(self, questions: Sequence[str]) -> Vectors:
        """Return the (q, l, d) float32 vectors of questions, in order; l is
        `spec.question_length`.
        """
        batch_size = max(1, self.batch_tokens // self.spec.question_length)
        vectors = np.empty((len(questions), self.spec.question_length, self.dim), np.float32)
        for i in range(0, len(questions), batch_size):
            batch = self.tokenizer.encode_questions(questions[i : i + batch_size])
            vectors[i : i + batch_size] = self._run_model(batch)
        return vectors

    def encode_passages(self, titles: Sequence[str], texts: Sequence[str]) -> TokenVectors:
        """Return the float32 vectors of passages (`title text`), in order, independent of the other
        passages.

        Every token that is not skipped has one vector; with token pooling there are fewer vectors.

        Raises:
            InputError: a vector is not finite.
        """
        return self.encode_inputs(list(map(self.spec.format_passage, titles, texts)))

    def count_truncated(self, titles: Sequence[str], texts: Sequence[str]) -> int:
        """Return the number of passages with more than `spec.passage_length` tokens."""
        return count_truncated(self.tokenizer.passage_tokenizer, list(map(self.spec.format_passage, titles, texts)))

    def encode_inputs(self, inputs: Sequence[str]) -> TokenVectors:
        """Encode passages as `encode_passages` does, given the results of `spec.format_passage`.

        Raises:
            InputError: a vector is not finite.
        """
        token_rows = self.tokenizer.encode_passages(inputs)
        if not token_rows:
            return TokenVectors(np.zeros((0, self.dim), np.float32), compute_offsets(np.zeros(0, np.int64)))
        vectors_by_passage = [np.empty((0, self.dim), np.float32)] * len(token_rows)
        for row, vectors in self._iter_vectors(token_rows):
            vectors_by_passage[row] = pool_tokens(vectors, self.spec.pool)
        vectors = np.concatenate(vectors_by_passage)
        if not np.isfinite(vectors).all():
            raise InputError(f"encoder {self.name} computed a vector that is not finite: fetch the model again")
        return TokenVectors(vectors, compute_offsets(np.array([*map(len, vectors_by_passage)], np.int64)))

    def _iter_vectors(self, token_rows: Sequence[TokenIds]) -> Iterator[tuple[int, Vectors]]:
        """Yield (row, (t, d) output vectors) of each passage."""
        min_tokens = min(BATCH_INVARIANT_TOKENS, self.batch_tokens)
        batches = batch_by_length([len(ids) for ids in token_rows], self.batch_tokens, min_tokens)
        for batch_rows, (batch, batch_vectors) in run_batches(
            batches, lambda rows: self._encode_batch([token_rows[row] for row in rows])
        ):
            for row, vectors, has_vector in zip(batch_rows.tolist(), batch_vectors, batch.output_mask, strict=True):
                yield row, vectors[has_vector]

    def _encode_batch(self, id_rows: Sequence[TokenIds]) -> tuple[TokenBatch, Vectors]:
        batch = self.tokenizer.pad_passages(id_rows)
        return batch, self._run_model(batch)

    def _run_model(self, batch: TokenBatch) -> Vectors:
        torch = require("torch", "model")
        with torch.inference_mode():
            vectors: Vectors = self.model(*as_tensors(batch, self.model.device)).cpu().numpy()
        return vectors


def as_tensors(batch: TokenBatch, device: "torch.device") -> "tuple[torch.Tensor, torch.Tensor]":
    """Return the (b, t) int64 token ids and the (b, t) bool attention mask on a device."""
    to_tensor = require("torch", "model").from_numpy
    return to_tensor(batch.ids).to(device), to_tensor(batch.attention_mask).to(device)


def compute_token_space(folder: Path, spec: TokenSpec, name: str = "") -> Space:
    """Compute the vector space of a ColBERT's passages with the settings `spec`; all weights are
    read once.

    Raises:
        InputError: a file of the encoder is missing or corrupt.
    """
    model_module = import_module("rag_model.encoders.token_model")
    projection = model_module.find_projection(folder)
    return Space(
        name=name or folder.name,
        weights=digest_json([digest_tensors(model_module.list_body_tensors(folder)), projection.digest()]),
        tokenizer=digest_tokenizer(folder),
        pooling=spec.space_pooling,
        normalize=True,
        max_length=spec.passage_length,
        layout=JOINED,
        passage_prompt=spec.passage_mark + spec.passage_prompt,
        dim=int(projection.shape[0]),
        config=describe_unusual_settings(folder),
    )


def collect_token_encoder_files(
    folder: Path, spec: TokenSpec, space: Space, workdir: Path, extra_fields: Mapping[str, Any] | None = None
) -> dict[str, Path]:
    """Return the paths of the files of a ColBERT for questions in `space`, by relative name.

    Writes the record `bookwheel.json` with `extra_fields` into `workdir`; the other files stay in
    `folder`.

    Raises:
        InputError: `folder` has no weights or no tokenizer.
    """
    record_path = write_encoder_record(workdir, {TOKENS_KEY: spec.to_json(), **(extra_fields or {})}, space)
    settings_paths = (folder / name for name in (STANFORD_METADATA, MODULES, PYLATE_CONFIG))
    paths = [folder / CONFIG, *list_tokenizer_files(folder), *list_weight_files(folder), record_path]
    file_by_name = {path.name: path for path in [*paths, *filter(Path.is_file, settings_paths)]}
    if dense_folder := find_dense_folder(folder):
        file_by_name |= {f"{dense_folder.name}/{name}": dense_folder / name for name in (CONFIG, WEIGHTS)}
    return file_by_name


def _insert_mark_id(ids: TokenIds, mark_id: int) -> TokenIds:
    return np.concatenate([ids[:1], [mark_id], ids[1:]]).astype(np.int32)
