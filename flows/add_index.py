"""Build indexes over an existing snapshot, without its dump: in addition to its indexes, or in place of them.

Purpose: another index, or another setting of one, at the cost of that index alone.
Caching: the store's memo: an index over these vectors that was built before is reused.
Requires: a store that this machine and the workers both reach.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial

from prefect import flow

from beam_jobs.launch import Launch
from beam_jobs.workers import worker_memory
from flows.admission import Url, admitted
from flows.finish import Build, finish
from flows.outcome import Reindexed
from flows.progress import StageClock
from flows.stage import stage
from rag_model.errors import UsageError
from rag_model.index.recipe import IndexRecipe
from rag_model.snapshots.content import with_indexes
from rag_model.snapshots.cut_part import CutPart
from rag_model.snapshots.encoded_part import EncodedPart
from rag_model.snapshots.existing import carried, facts_of, recipe_of, vectors_of, widths_of
from rag_model.snapshots.planning import plan_indexes
from rag_model.snapshots.recipe import Recipe, check_fit
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content
from rag_model.store.versions.snapshot import Snapshot


@flow(name="add-index", persist_result=False)
@admitted
def add_index(
    snapshot: str,
    store: Url,
    recipe: Recipe | None = None,
    indexes: Sequence[str] = (),
    ref: str = "latest",
    beam_options: Sequence[str] = (),
) -> Reindexed:
    """Publish a snapshot with the passages and vectors of another one and with new indexes, and move `ref` to it.

    Args:
        snapshot: a ref, ref@number, an id, or a unique prefix of one.
        store: URL or folder of the store.
        recipe: the indexes to build and the gate; by default those of the snapshot, which are built again.
        indexes: names of the recipe's indexes to build; by default all.
        ref: the ref to move to the new snapshot.
        beam_options: options of Beam and of its runner, as on their own command lines.

    Raises:
        GateRefusedError: the snapshot is published, but the ref did not move; the message says why.
        UsageError: the recipe has no such index.
        BookwheelError: a stage failed; finished work is recorded.
    """
    target, clock = Store.open(store), StageClock()
    target.refs.require_exclusion()
    launch = Launch.new(target.url, beam_options)
    with target.intents.held(launch.run):
        old = target.snapshots.get(target.snapshots.trusted(snapshot))
        given = recipe or recipe_of(old.content)
        chosen = choose(given, indexes)
        check(old.content, replace(given, index=chosen))
        with clock("look"), Snapshot.of(target, old) as opened:
            passages, embeddings = look(target, old.content)
            widths = widths_of(opened)
        plans = plan_indexes(chosen, passages, widths, worker_memory(beam_options))
        made = carried(old)
        source, encoder = (str(made.get(name, "")) for name in ("dump", "encoder"))
        assembled = partial(with_indexes, _content(old.content, chosen, given.retriever))
        build = Build(target, launch, clock, given, ref, source, encoder, passages, embeddings, plans, assembled)
        return finish(replace(build, derived={**made, "indexed": {"of": old.id, "indexes": sorted(chosen)}}))


def choose(recipe: Recipe, names: Sequence[str]) -> dict[str, IndexRecipe]:
    """Return the indexes of a recipe by these names, or all.

    Raises:
        UsageError: the recipe has no index of that name, or no index at all.
    """
    known = ", ".join(recipe.index) or "none"
    if unknown := sorted({*names} - {*recipe.index}):
        raise UsageError(f"the recipe has no index {unknown[0]!r}: choose from {known}, or name it in a --recipe")
    if not recipe.index:
        raise UsageError("the snapshot has no index to build again: give a --recipe that names one")
    return {name: recipe.index[name] for name in names or recipe.index}


@stage
def look(store: Store, content: Content) -> tuple[list[CutPart], dict[str, list[EncodedPart]]]:
    """Return the reports of the jobs that made the snapshot's parts, read from its files."""
    return facts_of(store, content)


def check(content: Content, recipe: Recipe) -> None:
    """Check that a recipe's indexes and retriever fit the representations and the other indexes of a snapshot.

    Raises:
        UsageError: they do not, or the recipe has a representation that the snapshot does not have.
    """
    vectors = vectors_of(content)
    if further := sorted({*recipe.represent} - {*vectors}):
        raise UsageError(
            f"the snapshot has no representation {further[0]!r}, and add-index encodes nothing: build it with "
            f"`reindex`, or leave [represent.{further[0]}] out"
        )
    check_fit(recipe, vectors, content.indexes)


def _content(content: Content, chosen: dict[str, IndexRecipe], retriever: str) -> Content:
    """Return a snapshot's content with these indexes in its recipe, and this default retriever if one is given."""
    indexes = {**(content.recipe.get("index") or {}), **{name: asdict(its) for name, its in chosen.items()}}
    kept = retriever or content.retriever
    return replace(content, recipe={**content.recipe, "index": indexes}, retriever=kept)
