"""The last stages of every build, for passages and vectors of any origin: indexes, the gate, the snapshot, the ref."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from beam_jobs import delta, index
from beam_jobs.index_tasks import IndexBuild
from beam_jobs.launch import Launch, OnProgress
from flows import artifacts
from flows.outcome import Reindexed, gate_refused
from flows.progress import StageClock
from flows.stage import stage
from rag_model.errors import BookwheelError
from rag_model.evaluation.gate import judge
from rag_model.index.plan import IndexPlan
from rag_model.snapshots.content import BuiltIndex, counts, provenance, rows_of
from rag_model.snapshots.cut_part import CutPart
from rag_model.snapshots.earlier_index import EarlierIndex
from rag_model.snapshots.encoded_part import EncodedPart
from rag_model.snapshots.heritage import Heirloom
from rag_model.snapshots.measure import Measured, measure
from rag_model.snapshots.parent import Parent
from rag_model.snapshots.publish import Published, publish, vitals
from rag_model.snapshots.recipe import Recipe
from rag_model.snapshots.report import write_report
from rag_model.snapshots.tuning import tune_searches
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content, Manifest
from rag_model.store.versions.paths import EMBEDDINGS
from rag_model.store.versions.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Build:
    """A build whose passages have their representations."""

    store: Store
    launch: Launch
    clock: StageClock
    recipe: Recipe
    ref: str
    source: str  # where the passages come from
    encoder: str  # as the user named it
    passages: Sequence[CutPart]  # the chunk job's report of each part
    embeddings: Mapping[str, Sequence[EncodedPart]]  # the embed job's reports by representation
    plans: Mapping[str, IndexPlan]
    assembled: Callable[[Sequence[BuiltIndex]], Content]  # the snapshot's content, with these indexes
    derived: Mapping[str, Any] = field(default_factory=dict)  # provenance of a snapshot that is made from another
    heirlooms: Mapping[str, Heirloom] = field(
        default_factory=dict
    )  # by index: the parent's trained file that may be inherited
    base: str | None = None  # the ref that the gate compares with; None: `ref`
    parent: Content | None = None  # what indexes of words are made of, if it has them


def finish(build: Build) -> Reindexed:
    """Build the indexes, measure them, publish the snapshot, and move the ref if the gate allows it.

    Raises:
        GateRefusedError: the snapshot is published, but the ref did not move; the message says why.
        BookwheelError: a stage failed; finished work is recorded.
    """
    manifest, measured = indexed(build)
    if before := Parent.of(build.store, build.base or build.ref).manifest:
        offer_deltas(build, before.content, manifest.content)
    published = publish_snapshot(build.store, manifest, measured, build.recipe, build.ref, build.base)
    build.store.runs.clear(build.launch.run)
    outcome = reported(build, manifest, published, measured)
    if published.move is None:
        raise gate_refused(outcome, published.verdict.reason)
    return outcome


def indexed(build: Build) -> tuple[Manifest, Measured]:
    """Build the indexes and measure them; return the snapshot's manifest, not published yet.

    Raises:
        BookwheelError: a stage failed; finished work is recorded.
    """
    store, launch, clock, recipe = build.store, build.launch, build.clock, build.recipe
    earlier = earlier_indexes(build)
    with clock("train") as tell:
        indexes = train_indexes(store, build, earlier, launch, tell)
    with clock("scatter") as tell:
        indexes = scatter_vectors(indexes, launch, tell)
    with clock("shard") as tell:
        indexes = build_shards(indexes, launch, tell)
    with clock("merge") as tell:
        built = merge_shards(indexes, launch, tell)
    with clock("tune"):
        built = tune_indexes(store, build.assembled(built), built, recipe)
    content = build.assembled(built)
    with clock("gate"):
        measured = measure_indexes(store, Manifest(content), built, recipe)
    made = {**provenance(build.source, build.encoder, built, clock.seconds), **build.derived}
    return Manifest(content, measured.metrics(), provenance=made), measured


def offer_deltas(build: Build, before: Content, after: Content) -> None:
    """Make the deltas; without them the snapshot is published all the same, and pullers fetch whole files."""
    with build.clock("deltas") as tell:
        try:
            make_deltas(before, after, build.launch, tell)
        except (BookwheelError, OSError, ValueError, MemoryError) as failed:  # ValueError: of Arrow too
            tell.say(f"not made, so pullers fetch whole files: {failed}")


def embed_stage(representation: str) -> str:
    """Return the name of the stage that encodes a representation."""
    return "embed" if representation == EMBEDDINGS else f"embed {representation}"


def embed_reports(embeddings: Mapping[str, Sequence[EncodedPart]]) -> dict[str, Sequence[EncodedPart]]:
    """Return the embed job's reports by the name of their stage."""
    return {embed_stage(name): reports for name, reports in embeddings.items()}


def reported(build: Build, manifest: Manifest, published: Published, measured: Measured) -> Reindexed:
    """Write the report and the artifacts of a published snapshot, and return the outcome."""
    counted, seconds = counts(build.passages, build.embeddings), build.clock.seconds
    made = build.passages, embed_reports(build.embeddings)
    page = write_report(build.store, manifest, published, measured, counted, *made, seconds)
    outcome = Reindexed.of(published, build.ref, counted, measured.metrics(), seconds, page)
    artifacts.show(outcome)
    return outcome


def earlier_indexes(build: Build) -> dict[str, EarlierIndex]:
    """Return the parent's indexes of which others are made, by name; makes the deltas of passages, which tell how."""
    if build.parent is None:
        return {}
    draft = build.assembled(())
    of = partial(EarlierIndex.of, build.store, build.parent, draft)
    found = {name: index for name, plan in build.plans.items() if (index := of(name, plan))}
    if found:
        offer_deltas(build, build.parent, draft)
    return found


@stage
def train_indexes(
    store: Store, build: Build, earlier: Mapping[str, EarlierIndex], launch: Launch, tell: OnProgress
) -> list[IndexBuild]:
    """Make indexes of the parent's; train each of the others, or inherit the parent's trained file."""
    rows, heirlooms = rows_of(build.passages, build.embeddings), build.heirlooms
    builds = [
        index.start(store, name, plan, rows[plan.over], heirlooms.get(name), earlier.get(name))
        for name, plan in build.plans.items()
    ]
    return index.train(index.derive(builds, launch), launch, tell)


@stage
def scatter_vectors(indexes: Sequence[IndexBuild], launch: Launch, tell: OnProgress) -> list[IndexBuild]:
    """Sort every part's vectors by shard."""
    return index.scatter(indexes, launch, tell)


@stage
def build_shards(indexes: Sequence[IndexBuild], launch: Launch, tell: OnProgress) -> list[IndexBuild]:
    """Build every shard of every index."""
    return index.build_shards(indexes, launch, tell)


@stage
def merge_shards(indexes: Sequence[IndexBuild], launch: Launch, tell: OnProgress) -> list[BuiltIndex]:
    """Merge each index's shards."""
    return index.merge(indexes, launch, tell)


@stage
def tune_indexes(store: Store, draft: Content, built: Sequence[BuiltIndex], recipe: Recipe) -> list[BuiltIndex]:
    """Set the search parameters of indexes with a recall target."""
    return tune_searches(store, draft, built, recipe.gate)


@stage
def measure_indexes(store: Store, manifest: Manifest, built: Sequence[BuiltIndex], recipe: Recipe) -> Measured:
    """Compare every index with exact search, examine its file, and ask the user's questions that have a floor."""
    with Snapshot.of(store, manifest) as snapshot:
        return measure(snapshot, recipe.gate, {index.name: index.facts for index in built})


@stage
def make_deltas(before: Content, after: Content, launch: Launch, tell: OnProgress) -> int:
    """Make that of which pullers of the snapshot before make the files that changed; return the bytes."""
    return delta.run(before, after, launch, tell)


@stage
def publish_snapshot(
    store: Store, manifest: Manifest, measured: Measured, recipe: Recipe, ref: str, base: str | None = None
) -> Published:
    """Write the manifest, apply the gate, and move the ref if it passes."""
    judged = partial(judge, recipe.gate, vitals(manifest), measured.found, reached=measured.reached)
    return publish(store, manifest, ref, judged, base)
