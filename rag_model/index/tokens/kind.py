"""The index kind `tokens`: encoded token vectors, ranked by MaxSim.

A search ranks all passages, or the candidates of other indexes. The kind's stages train the codec,
encode each part, and concatenate the codes as a stream.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from rag_model.arrays import RowPartition
from rag_model.corpus.ragged_file import TokenFile, TokenVectors, compute_offsets
from rag_model.errors import InputError, UsageError
from rag_model.index.exact_search import select_top_k
from rag_model.index.files.engine import Rows, Vectors
from rag_model.index.files.pieces import Array, Opener, PieceReader, compute_stamp, write_piece
from rag_model.index.files.tensors import TensorStream, write_tensors
from rag_model.index.files.vectors import map_parts, open_row_files
from rag_model.index.kind import (
    IndexEntry,
    IndexFiles,
    IndexMeasurement,
    RepresentationType,
    TokenQuerySet,
    UnshardedKind,
)
from rag_model.index.plan import IndexPlan, IndexStats
from rag_model.index.quality.health import SAMPLE_VECTORS
from rag_model.index.quality.results import (
    PROCESS_BYTES,
    FitResult,
    RecallFloor,
    ResourceEstimate,
    compute_recall,
)
from rag_model.index.recipe import IndexRecipe, check_search_parameters
from rag_model.index.tokens.codec import (
    Codec,
    choose_centroid_count,
    choose_sample_size,
    is_token_factory,
    list_codec_streams,
    parse_codec_factory,
    read_codec,
    train_centroids,
    write_codec,
)
from rag_model.index.tokens.search import TokenIndexFile, maxsim

# Arrays of a piece: number of tokens of each passage, and centroid id and code of each token.
_LENGTHS, _IDS, _CODES = range(3)
_BLOCK_TOKENS = 1 << 18  # number of tokens that are copied at a time
TOKENS_PER_PASSAGE = 120  # for estimates: tokens of 100 words and a title, without punctuation
# Measured on 1,581 paragraphs (a MiniLM without training, 128 dimensions): of the best 20, PQ32
# keeps .84, Bits2 .69.
_RECALL_FLOOR = RecallFloor(mean=0.60, p5=0.25)
# multiply-adds per second of one core, including the decoding of codes; 2.6e10 to 5e10 measured
_MULTIPLY_RATE = 4e10
_MERGE_RATE = 5e7  # bytes of codes that one core copies per second
_DEFAULT_PART_ROWS = 1 << 16  # assumed number of rows of a part if it is unknown
_KMEANS_ROUNDS = 20  # rounds of k-means for the centroids and the codes together


class TokenRows:
    """The token vectors of all parts; rows are numbered through all parts in order."""

    def __init__(self, paths: Sequence[Path], dim: int | None = None) -> None:
        """Open the files of the parts, in order; `dim` is the dimension that a plan requires.

        Raises:
            InputError: a file is missing, damaged or has another dimension.
            UsageError: no file is given.
        """
        if not paths:
            raise UsageError("there are no token vectors to index: give at least one file")
        self._files = open_row_files(paths, TokenFile)
        self.dim = self._files[0].dim if dim is None else dim
        for file in self._files:
            if file.dim != self.dim:
                mismatch = f"{file.path} has {file.dim} dimensions, not {self.dim}"
                raise InputError(f"{mismatch}: encode all parts with one encoder")
        self._partition = RowPartition(file.n for file in self._files)
        self.n = self._partition.n
        self.lengths = np.concatenate([file.lengths for file in self._files])

    @property
    def n_tokens(self) -> int:
        """The number of token vectors."""
        return int(self.lengths.sum())

    def blocks(self) -> Iterator[TokenVectors]:
        """Yield the passages in row order, as float32, in blocks."""
        for file in self._files:
            yield from file.iter_batches()

    def take(self, rows: Rows) -> TokenVectors:
        """Return the passages at ascending global `rows`, float32."""
        part_vectors = map_parts(lambda part: self._files[part[0]].take(part[2]), self._partition.split(rows))
        return TokenVectors.concatenate(part_vectors or [self._files[0].take(np.empty(0, np.int64))])

    def sample(self, n_tokens: int, seed: int) -> Vectors:
        """Return the (t, d) float32 vectors of passages that are drawn at random until they have
        `n_tokens` tokens.
        """
        shuffled_passages = np.random.default_rng(seed).permutation(self.n)
        n_passages = np.searchsorted(np.cumsum(self.lengths[shuffled_passages]), n_tokens) + 1
        vectors: Vectors = self.take(np.sort(shuffled_passages[:n_passages])).vectors
        return vectors


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPlan(IndexPlan):
    """A recipe resolved for n passages of token vectors."""

    d: int  # components of a vector
    # number of tokens to train with; the default depends on the number of all tokens
    train_sample: int | None = None

    def entry(self) -> dict[str, Any]:
        """Return the plan's fields in a manifest, with `d`."""
        return {**IndexPlan.entry(self), "d": self.d}


def compute_reconstruction_loss(codec: Codec, vectors: Vectors) -> float:
    """Return the mean squared distance of (t, d) unit vectors from their reconstructions."""
    sample = vectors[:: max(1, len(vectors) // 8192)]
    return round(float(np.square(sample - codec.decode(*codec.encode(sample))).sum(axis=1).mean()), 6)


def _iter_blocks(pieces: Sequence[PieceReader], array_number: int) -> Iterator[Array]:
    for piece in pieces:
        for first_row in range(0, piece.count_rows(array_number), _BLOCK_TOKENS):
            yield piece.read(array_number, first_row, min(first_row + _BLOCK_TOKENS, piece.count_rows(array_number)))


class TokenKind(UnshardedKind[TokenPlan]):
    """The kind of `MaxSim`, `MaxSim,PQ32`, `MaxSim,Bits2`: one codec for all parts, and the codes
    of each part.
    """

    name: ClassVar[str] = "tokens"
    represents: ClassVar[RepresentationType] = "tokens"
    suffix: ClassVar[str] = "safetensors"
    learns: ClassVar[bool] = True
    libraries: ClassVar[tuple[str, ...]] = ("faiss-cpu", "numpy")
    VERSION: ClassVar[int] = 2

    def takes(self, factory: str) -> bool:
        """Return whether a factory string describes a token-vector index."""
        return is_token_factory(factory)

    def check(self, recipe: IndexRecipe) -> None:
        """Check the codec, and that no inapplicable setting is given."""
        if recipe.recall_target is not None:
            raise UsageError(f"recall_target does not apply to {recipe.factory}: leave it out")
        parse_codec_factory(recipe.factory)
        check_search_parameters(recipe.search, ())
        if recipe.settings:
            raise UsageError(f"settings do not apply to {recipe.factory}: name the codec in the factory")
        if recipe.train_sample is not None and recipe.train_sample < 1:
            raise UsageError(f"train_sample must be at least 1, not {recipe.train_sample}")

    def plan(
        self, recipe: IndexRecipe, n: int, width: int, *, memory: int | None = None, part_rows: int | None = None
    ) -> TokenPlan:
        """Choose the codec for vectors of `width` components."""
        return TokenPlan(
            kind=self.name,
            factory=str(parse_codec_factory(recipe.factory, width)),
            n=n,
            d=width,
            search={},
            seed=recipe.seed,
            over=recipe.over,
            drift=recipe.drift,
            train_sample=recipe.train_sample,
        )

    def train(self, plan: TokenPlan, rows: Sequence[Path], out: Path) -> IndexStats:
        """Train centroids and codes with a sample of the tokens."""
        token_rows = TokenRows(rows, plan.d)
        n_samples = plan.train_sample or choose_sample_size(token_rows.n_tokens)
        sample = token_rows.sample(n_samples, plan.seed)
        centroid_vectors = train_centroids(sample, choose_centroid_count(token_rows.n_tokens, len(sample)), plan.seed)
        codec = parse_codec_factory(plan.factory, plan.d).train(sample, centroid_vectors)
        write_codec(codec, out)
        return {
            "losses": {"codes": compute_reconstruction_loss(codec, sample)},
            "tokens": token_rows.n_tokens,
            "centroids": len(centroid_vectors),
        }

    def scatter(self, plan: TokenPlan, trained: Path, rows: Path, number: int, out: Path) -> IndexStats:
        """Encode a part."""
        codec, part_tokens = read_codec(trained), TokenRows([rows], plan.d)
        blocks = [codec.encode(token_block.vectors) for token_block in part_tokens.blocks()]
        empty_codes = codec.encode(np.empty((0, plan.d), np.float32))
        ids, codes = (np.concatenate(arrays) for arrays in zip(empty_codes, *blocks, strict=True))
        write_piece(out, compute_stamp(plan, trained, "tokens", number), [part_tokens.lengths, ids, codes])
        return {"rows": part_tokens.n, "tokens": part_tokens.n_tokens}

    def merge(
        self,
        plan: TokenPlan,
        trained: Path,
        rows: Sequence[Path],
        scattered: Sequence[Opener],
        shards: Sequence[Opener],
        out: Path,
    ) -> IndexStats:
        """Concatenate the codes of all parts as a stream."""
        codec = read_codec(trained)
        with ExitStack() as stack:
            pieces = [
                stack.enter_context(
                    PieceReader.open(piece, compute_stamp(plan, trained, "tokens", i), 3, f"the codes of part {i}")
                )
                for i, piece in enumerate(scattered)
            ]
            offsets = compute_offsets(
                np.concatenate([np.zeros(0, np.int64), *(piece.read(_LENGTHS) for piece in pieces)])
            )
            n_tokens = int(offsets[-1])
            id_dtype = codec.encode(np.empty((0, plan.d), np.float32))[0].dtype
            streams = [
                TensorStream("offsets", offsets.dtype, offsets.shape, [offsets]),
                TensorStream("ids", id_dtype, (n_tokens,), _iter_blocks(pieces, _IDS)),
                TensorStream("codes", np.dtype(np.uint8), (n_tokens, codec.width), _iter_blocks(pieces, _CODES)),
            ]
            write_tensors(
                out, [*list_codec_streams(codec), *streams], {"codec": type(codec).__name__, "factory": plan.factory}
            )
        return {"rows": len(offsets) - 1, "tokens": n_tokens}

    def losses(self, plan: TokenPlan, trained: Path, vectors: Vectors) -> dict[str, float]:
        """Return the mean squared distance of token vectors from their reconstructions."""
        return {"codes": compute_reconstruction_loss(read_codec(trained), vectors)}

    def fit(
        self,
        plan: TokenPlan,
        trained: Path,
        losses: Mapping[str, float],
        changed_files: Sequence[tuple[Path, Sequence[Path]]],
        unchanged_files: Sequence[Path],
    ) -> FitResult:
        """Compare the losses of the changed parts' tokens and of the training sample."""
        vectors = TokenRows([path for path, _ in changed_files], plan.d).sample(SAMPLE_VECTORS, plan.seed)
        if not len(vectors):
            return FitResult(0, {})
        current_losses = self.losses(plan, trained, vectors)
        return FitResult(
            len(vectors), {name: (current_losses[name], losses[name]) for name in current_losses if name in losses}
        )

    def open(self, files: IndexFiles, entry: IndexEntry, *, mmap: bool = True) -> TokenIndexFile:
        """Map the file."""
        return TokenIndexFile.open(files.index, mmap=mmap)

    def measure(self, files: IndexFiles, entry: IndexEntry, query_set: TokenQuerySet) -> IndexMeasurement:
        """Compare the ranking of sampled passages with their ranking by the original vectors."""
        index, token_rows = self.open(files, entry), TokenRows(files.rows(), entry["d"])
        k = min(query_set.k, len(query_set.rows))
        tokens, decoded_tokens = token_rows.take(query_set.rows), index.decode(query_set.rows)
        scores, exact_rows = _rank(maxsim(query_set.queries, tokens.vectors, tokens.offsets))
        approximate_rows = _rank(maxsim(query_set.queries, decoded_tokens.vectors, decoded_tokens.offsets))[1][:, :k]
        metrics = {
            "tokens_a_passage": round(token_rows.n_tokens / max(1, token_rows.n), 1),
            "bytes_a_passage": round(files.index.stat().st_size / max(1, token_rows.n)),
            "loss": round(float(np.square(tokens.vectors - decoded_tokens.vectors).sum(axis=1).mean()), 4),
        }
        return IndexMeasurement(compute_recall(approximate_rows, exact_rows, scores, k), metrics=metrics)

    def check_search(self, entry: IndexEntry, parameters: Mapping[str, Any]) -> None:
        """Refuse every parameter, because a search compares all rows."""
        check_search_parameters(parameters, ())

    def floor(self, factory: str) -> RecallFloor:
        """Return the minimum recall of all codecs."""
        return _RECALL_FLOOR

    def estimate(self, plan: TokenPlan, part_rows: int | None = None) -> ResourceEstimate:
        """Estimate the resources of a build, with 120 tokens per passage."""
        n_tokens = plan.n * TOKENS_PER_PASSAGE
        n_samples = plan.train_sample or choose_sample_size(n_tokens)
        token_bytes = count_bytes_per_token(plan)
        centroid_bytes = 4 * plan.d * choose_centroid_count(n_tokens, n_samples)
        size = n_tokens * token_bytes + 8 * plan.n + centroid_bytes
        part_bytes = min(plan.n, part_rows or _DEFAULT_PART_ROWS) * TOKENS_PER_PASSAGE * token_bytes
        bytes_by_stage = {
            "train": 3 * 4 * plan.d * n_samples,
            "scatter": 2 * part_bytes + centroid_bytes + (64 << 20),
            "merge": 32 << 20,
        }
        memory_by_stage = {stage: round(data_bytes) + PROCESS_BYTES for stage, data_bytes in bytes_by_stage.items()}
        return ResourceEstimate(memory_by_stage, size + PROCESS_BYTES, size, 3 * size)

    def seconds(self, plan: TokenPlan, stage: str, rows: int, size: int, *, inherited: bool = False) -> float:
        """Estimate the seconds that a task of a stage takes on one core."""
        n_tokens = plan.n * TOKENS_PER_PASSAGE
        n_samples = plan.train_sample or choose_sample_size(n_tokens)
        n_centroids = choose_centroid_count(n_tokens, n_samples)
        if stage == "train":
            return 1 if inherited else 1 + 2.0 * _KMEANS_ROUNDS * n_samples * n_centroids * plan.d / _MULTIPLY_RATE
        if stage == "scatter":
            return size / (2 * plan.d) * (n_centroids + 256) * plan.d / _MULTIPLY_RATE
        return n_tokens * count_bytes_per_token(plan) / _MERGE_RATE


def count_bytes_per_token(plan: TokenPlan) -> int:
    """Return the bytes per token in the index file: the centroid id, and the code of the
    residual.
    """
    n_tokens = plan.n * TOKENS_PER_PASSAGE
    n_samples = plan.train_sample or choose_sample_size(n_tokens)
    has_wide_ids = choose_centroid_count(n_tokens, n_samples) > 1 << 16
    return (4 if has_wide_ids else 2) + parse_codec_factory(plan.factory, plan.d).width(plan.d)


def _rank(scores: Vectors) -> tuple[Vectors, Rows]:
    """Sort (q, m) scores, best first; return them with their columns."""
    return select_top_k(scores, np.broadcast_to(np.arange(scores.shape[1]), scores.shape), scores.shape[1])


KIND = TokenKind()
