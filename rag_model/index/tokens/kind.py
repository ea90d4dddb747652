"""The index kind `tokens`: encoded token vectors, ranked by MaxSim: all of them, or candidates of
other indexes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from rag_model.errors import UsageError
from rag_model.index.exact_search import select_top_k
from rag_model.index.files.engine import Rows, Vectors
from rag_model.index.files.pieces import Opener
from rag_model.index.kind import (
    IndexEntry,
    IndexFiles,
    IndexMeasurement,
    RepresentationType,
    TokenQuerySet,
    UnshardedKind,
)
from rag_model.index.plan import IndexStats
from rag_model.index.quality.fit import SAMPLE_VECTORS
from rag_model.index.quality.results import (
    PROCESS_BYTES,
    FitResult,
    RecallFloor,
    ResourceEstimate,
    TuningResult,
    compute_recall,
)
from rag_model.index.recipe import IndexRecipe, check_search_parameters
from rag_model.index.tokens import build, codec
from rag_model.index.tokens.build import TokenPlan, TokenRows
from rag_model.index.tokens.codec import is_token_factory, parse_codec_factory, read_codec
from rag_model.index.tokens.search import TokenIndexFile, maxsim

TOKENS_PER_PASSAGE = 120  # for estimates: of 100 words and the title, without punctuation
# Measured on 1,581 paragraphs (a MiniLM without training, 128 dimensions): of the best 20, PQ32
# keeps .84, Bits2 .69.
_RECALL_FLOOR = RecallFloor(mean=0.60, p5=0.25)
# Multiply-adds per second of one core: 2.6e10 to 5e10 measured, including those of the codes.
_MULTIPLY_RATE = 4e10
_MERGE_RATE = 5e7  # bytes of codes that one core copies per second
_DEFAULT_PART_ROWS = 1 << 16  # if the size of the parts is unknown
_KMEANS_ROUNDS = 20  # including those of the codes


class TokenKind(UnshardedKind[TokenPlan]):
    """The kind of `MaxSim`, `MaxSim,PQ32`, `MaxSim,Bits2`: one codec for all parts, and the codes
    of each part.
    """

    name: ClassVar[str] = "tokens"
    represents: ClassVar[RepresentationType] = "tokens"
    suffix: ClassVar[str] = "safetensors"
    learns: ClassVar[bool] = True
    libraries: ClassVar[tuple[str, ...]] = ("faiss-cpu", "numpy")
    VERSION: ClassVar[int] = build.VERSION

    def takes(self, factory: str) -> bool:
        """Whether a factory string describes a token-vector index."""
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
        return build.train_codec(plan, rows, out)

    def scatter(self, plan: TokenPlan, trained: Path, rows: Path, number: int, out: Path) -> IndexStats:
        """Encode a part."""
        return build.encode_part(plan, trained, rows, number, out)

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
        return build.merge_parts(plan, trained, scattered, out)

    def losses(self, plan: TokenPlan, trained: Path, vectors: Vectors) -> dict[str, float]:
        """Return the mean squared distance of token vectors from their reconstructions."""
        return {"codes": build.reconstruction_loss(read_codec(trained), vectors)}

    def fit(
        self,
        plan: TokenPlan,
        trained: Path,
        losses: Mapping[str, float],
        changed: Sequence[tuple[Path, Sequence[Path]]],
        same: Sequence[Path],
    ) -> FitResult:
        """Compare the loss of the changed parts' tokens with that of the training sample."""
        vectors = TokenRows([path for path, _ in changed], plan.d).sample(SAMPLE_VECTORS, plan.seed)
        if not len(vectors):
            return FitResult(0, {})
        current_losses = self.losses(plan, trained, vectors)
        return FitResult(
            len(vectors), {name: (current_losses[name], losses[name]) for name in current_losses if name in losses}
        )

    def follow(self, plan: TokenPlan, trained: Path, rows: Sequence[Path], out: Path) -> IndexStats:
        """Train from scratch: a reused file that does not fit is of no use."""
        return self.train(plan, rows, out)

    def open(self, files: IndexFiles, entry: IndexEntry, *, mmap: bool = True) -> TokenIndexFile:
        """Map the file."""
        return TokenIndexFile.open(files.index, mmap=mmap)

    def measure(self, files: IndexFiles, entry: IndexEntry, trial: TokenQuerySet) -> IndexMeasurement:
        """Compare the ranking of sampled passages with that by their original vectors."""
        index, token_rows = self.open(files, entry), TokenRows(files.rows(), entry["d"])
        k = min(trial.k, len(trial.rows))
        tokens, decoded = token_rows.take(trial.rows), index.decode(trial.rows)
        scores, exact = _rank(maxsim(trial.queries, tokens.vectors, tokens.offsets))
        approximate = _rank(maxsim(trial.queries, decoded.vectors, decoded.offsets))[1][:, :k]
        metrics = {
            "tokens_a_passage": round(token_rows.tokens / max(1, token_rows.n), 1),
            "bytes_a_passage": round(files.index.stat().st_size / max(1, token_rows.n)),
            "loss": round(float(np.square(tokens.vectors - decoded.vectors).sum(axis=1).mean()), 4),
        }
        return IndexMeasurement(compute_recall(approximate, exact, scores, k), metrics=metrics)

    def check_search(self, entry: IndexEntry, parameters: Mapping[str, Any]) -> None:
        """Reject every parameter, because all rows are compared."""
        check_search_parameters(parameters, ())

    def tune(self, files: IndexFiles, entry: IndexEntry, trial: Any, target: float) -> TuningResult:
        """Return the search parameters of the entry, because `check` rejects recall targets."""
        return TuningResult(dict(entry["search"]), 1.0)

    def floor(self, factory: str) -> RecallFloor:
        """Return the minimum recall of all codecs."""
        return _RECALL_FLOOR

    def estimate(self, plan: TokenPlan, part_rows: int | None = None) -> ResourceEstimate:
        """Estimate the resources of a build, with 120 tokens per passage."""
        tokens = plan.n * TOKENS_PER_PASSAGE
        sample = plan.train_sample or codec.sample_size(tokens)
        code = bytes_per_token(plan)
        centroid_bytes = 4 * plan.d * codec.centroid_count(tokens, sample)
        size = tokens * code + 8 * plan.n + centroid_bytes
        part_bytes = min(plan.n, part_rows or _DEFAULT_PART_ROWS) * TOKENS_PER_PASSAGE * code
        stages = {
            "train": 3 * 4 * plan.d * sample,
            "scatter": 2 * part_bytes + centroid_bytes + (64 << 20),
            "merge": 32 << 20,
        }
        memory = {stage: round(amount) + PROCESS_BYTES for stage, amount in stages.items()}
        return ResourceEstimate(memory, size + PROCESS_BYTES, size, 3 * size)

    def seconds(self, plan: TokenPlan, stage: str, rows: int, size: int, *, inherited: bool = False) -> float:
        """Estimate the seconds that a task of a stage takes on one core."""
        tokens = plan.n * TOKENS_PER_PASSAGE
        sample = plan.train_sample or codec.sample_size(tokens)
        clusters = codec.centroid_count(tokens, sample)
        if stage == "train":
            return 1 if inherited else 1 + 2.0 * _KMEANS_ROUNDS * sample * clusters * plan.d / _MULTIPLY_RATE
        if stage == "scatter":
            return size / (2 * plan.d) * (clusters + 256) * plan.d / _MULTIPLY_RATE
        return tokens * bytes_per_token(plan) / _MERGE_RATE


def bytes_per_token(plan: TokenPlan) -> int:
    """Return the bytes per token in the index file: the centroid id, and the code of the
    residual.
    """
    tokens = plan.n * TOKENS_PER_PASSAGE
    sample = plan.train_sample or codec.sample_size(tokens)
    has_wide_ids = codec.centroid_count(tokens, sample) > 1 << 16
    return (4 if has_wide_ids else 2) + parse_codec_factory(plan.factory, plan.d).width(plan.d)


def _rank(scores: Vectors) -> tuple[Vectors, Rows]:
    """Sort (q, m) scores, best first; return them with their columns."""
    return select_top_k(scores, np.broadcast_to(np.arange(scores.shape[1]), scores.shape), scores.shape[1])


KIND = TokenKind()
