"""The kind `tokens`: token vectors in codes, searched by MaxSim, alone or over the candidates of other indexes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from rag_model.errors import UsageError
from rag_model.index.exact.scan import best_of
from rag_model.index.files.engine import Rows, Vectors
from rag_model.index.files.pieces import Opener
from rag_model.index.kind import Entry, IndexFiles, Measurement, PlainKind, Represents, TokenTrial
from rag_model.index.plan import Facts
from rag_model.index.quality.fit import SAMPLE, Fit
from rag_model.index.quality.recall import Floor, recall_at
from rag_model.index.quality.tune import Tuned
from rag_model.index.recipe import IndexRecipe, check_search
from rag_model.index.sizing.estimate import PROCESS, Estimate
from rag_model.index.tokens import build, centroids
from rag_model.index.tokens.build import TokenPlan
from rag_model.index.tokens.codec import form_of, read_codec, takes
from rag_model.index.tokens.maxsim import maxsim
from rag_model.index.tokens.rows import TokenRows
from rag_model.index.tokens.search import TokenIndexFile

TOKENS = 120  # vectors of a passage of 100 words and its title, punctuation dropped: for estimates
# Measured on 1,581 paragraphs (a MiniLM without training, 128 dimensions): of the best 20, PQ32 keeps .84, Bits2 .69.
_CODED = Floor(mean=0.60, p5=0.25)
_PRODUCTS = 4e10  # multiplications and additions per second of one core: 2.6e10 to 5e10 measured, codes included
_MOVED = 5e7  # bytes of codes per second that one core joins
_PART = 1 << 16  # passages of a part, if it is not known
_ROUNDS = 20  # of k-means, the codes' included


class TokenKind(PlainKind[TokenPlan]):
    """`MaxSim`, `MaxSim,PQ32`, `MaxSim,Bits2`: a codec that is trained once, and codes part by part."""

    name: ClassVar[str] = "tokens"
    represents: ClassVar[Represents] = "tokens"
    suffix: ClassVar[str] = "safetensors"
    learns: ClassVar[bool] = True
    libraries: ClassVar[tuple[str, ...]] = ("faiss-cpu", "numpy")
    VERSION: ClassVar[int] = build.VERSION

    def takes(self, factory: str) -> bool:
        """Whether a factory string asks for codes of token vectors."""
        return takes(factory)

    def check(self, recipe: IndexRecipe) -> None:
        """Check the codec, and that nothing is set that does not apply."""
        if recipe.recall_target is not None:
            raise UsageError(f"recall_target does not apply to {recipe.factory}: leave it out")
        form_of(recipe.factory)
        check_search(recipe.search, ())
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
            factory=str(form_of(recipe.factory, width)),
            n=n,
            d=width,
            search={},
            seed=recipe.seed,
            over=recipe.over,
            drift=recipe.drift,
            train_sample=recipe.train_sample,
        )

    def train(self, plan: TokenPlan, rows: Sequence[Path], out: Path) -> Facts:
        """Learn centroids and codes from a sample of the tokens."""
        return build.train(plan, rows, out)

    def scatter(self, plan: TokenPlan, trained: Path, rows: Path, number: int, out: Path) -> Facts:
        """Encode a part."""
        return build.scatter(plan, trained, rows, number, out)

    def merge(
        self,
        plan: TokenPlan,
        trained: Path,
        rows: Sequence[Path],
        scattered: Sequence[Opener],
        shards: Sequence[Opener],
        out: Path,
    ) -> Facts:
        """Join the parts' codes as a stream."""
        return build.merge(plan, trained, scattered, out)

    def losses(self, plan: TokenPlan, trained: Path, vectors: Vectors) -> dict[str, float]:
        """Return how far token vectors lie from what is rebuilt of them."""
        return {"codes": build.loss(read_codec(trained), vectors)}

    def fit(
        self,
        plan: TokenPlan,
        trained: Path,
        losses: Mapping[str, float],
        changed: Sequence[tuple[Path, Sequence[Path]]],
        same: Sequence[Path],
    ) -> Fit:
        """Compare the loss of the changed parts' tokens with that of the training."""
        vectors = TokenRows([path for path, _ in changed], plan.d).sample(SAMPLE, plan.seed)
        if not len(vectors):
            return Fit(0, {})
        now = self.losses(plan, trained, vectors)
        return Fit(len(vectors), {name: (now[name], losses[name]) for name in now if name in losses})

    def follow(self, plan: TokenPlan, trained: Path, rows: Sequence[Path], out: Path) -> Facts:
        """Train: nothing is kept of an inherited file that does not fit."""
        return self.train(plan, rows, out)

    def open(self, files: IndexFiles, entry: Entry, *, mmap: bool = True) -> TokenIndexFile:
        """Map the file."""
        return TokenIndexFile.open(files.index, mmap=mmap)

    def measure(self, files: IndexFiles, entry: Entry, trial: TokenTrial) -> Measurement:
        """Compare with MaxSim over the vectors as they were encoded, among a sample of the passages."""
        index, every = self.open(files, entry), TokenRows(files.rows(), entry["d"])
        k = min(trial.k, len(trial.rows))
        tokens, coded = every.take(trial.rows), index.decoded(trial.rows)
        scores, exact = _ranked(maxsim(trial.questions, tokens.vectors, tokens.offsets))
        found = _ranked(maxsim(trial.questions, coded.vectors, coded.offsets))[1][:, :k]
        figures = {
            "tokens_a_passage": round(every.tokens / max(1, every.n), 1),
            "bytes_a_passage": round(files.index.stat().st_size / max(1, every.n)),
            "loss": round(float(np.square(tokens.vectors - coded.vectors).sum(axis=1).mean()), 4),
        }
        return Measurement(recall_at(found, exact, scores, k), figures=figures)

    def check_search(self, entry: Entry, parameters: Mapping[str, Any]) -> None:
        """Refuse every parameter: all rows are compared."""
        check_search(parameters, ())

    def tune(self, files: IndexFiles, entry: Entry, trial: Any, target: float) -> Tuned:
        """Return the entry's own search setting: `check` refuses a target."""
        return Tuned(dict(entry["search"]), 1.0)

    def floor(self, factory: str) -> Floor:
        """Return the floor of codes."""
        return _CODED

    def estimate(self, plan: TokenPlan, part_rows: int | None = None) -> Estimate:
        """Return memory by stage, and bytes on disk, at 120 tokens a passage."""
        tokens = plan.n * TOKENS
        sample = plan.train_sample or centroids.sample_size(tokens)
        code = bytes_a_token(plan)
        cells = 4 * plan.d * centroids.affordable(tokens, sample)
        size = tokens * code + 8 * plan.n + cells
        part = min(plan.n, part_rows or _PART) * TOKENS * code
        stages = {"train": 3 * 4 * plan.d * sample, "scatter": 2 * part + cells + (64 << 20), "merge": 32 << 20}
        held = {stage: round(amount) + PROCESS for stage, amount in stages.items()}
        return Estimate(held, size + PROCESS, size, 3 * size)

    def seconds(self, plan: TokenPlan, stage: str, rows: int, size: int, *, inherited: bool = False) -> float:
        """Return about how many seconds of one core a task of a stage takes."""
        tokens = plan.n * TOKENS
        sample = plan.train_sample or centroids.sample_size(tokens)
        cells = centroids.affordable(tokens, sample)
        if stage == "train":
            return 1 if inherited else 1 + 2.0 * _ROUNDS * sample * cells * plan.d / _PRODUCTS
        if stage == "scatter":
            return size / (2 * plan.d) * (cells + 256) * plan.d / _PRODUCTS
        return tokens * bytes_a_token(plan) / _MOVED


def bytes_a_token(plan: TokenPlan) -> int:
    """Return the bytes of a token in the index file: the centroid's id, and the residual's code."""
    tokens = plan.n * TOKENS
    sample = plan.train_sample or centroids.sample_size(tokens)
    wide = centroids.affordable(tokens, sample) > 1 << 16
    return (4 if wide else 2) + form_of(plan.factory, plan.d).width(plan.d)


def _ranked(scores: Vectors) -> tuple[Vectors, Rows]:
    """Return scores, (q, m), and places, best first."""
    return best_of(scores, np.broadcast_to(np.arange(scores.shape[1]), scores.shape), scores.shape[1])


KIND = TokenKind()
