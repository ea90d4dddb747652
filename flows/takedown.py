"""Take pages down: remove them from every snapshot of a store, with a record of who ordered it and why.

Purpose: pages that must not be kept or served any more (a court's order, a person's request, text that was never free).
The record is written first. From then on no build includes the pages, and no snapshot with them can be published. Then
each snapshot that contains one, with or without a ref, is built without it: its rows are removed from passages, vectors
and article logs; indexes are built again by the same jobs, without inheriting anything that was trained on the page's
vectors, and are measured. The gate is not applied, since the old snapshot must be replaced in any case.

The new snapshot replaces the old one. Refs that name the old one move. Earlier moves in their logs are read as the new
one, so that neither `rollback` nor `ref@number` brings a page back. The old manifest is retired, and the error for its
id names the replacement. If no page of a snapshot is left, its refs are deleted.
Evaluations of the old snapshot are deleted, since their rows hold its passages.

`gc` deletes the bytes: at once with `--grace 0`, otherwise when they are older than its grace. This machine's cache
removes its copies. Copies elsewhere are not known to the store. A service that follows the ref changes to the new
snapshot, or serves nothing where there is none, and deletes its files of the old one. In other pulled folders the next
`pull` says which versions were taken down, and with `--keep` deletes them. Other machines' caches (`BOOKWHEEL_CACHE`)
have to be cleared. Files planned from a later dump that contains the page
stay in the store until the next `gc`.

Caching: the store's memo for the indexes. A run that died continues when it is run again; without pages it only
continues earlier takedowns.
Requires: a store that this machine and the workers both reach.
"""

import dataclasses
import getpass
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from prefect import flow

from beam_jobs import redact
from beam_jobs.launch import Launch, OnProgress
from beam_jobs.redact import RedactTask
from beam_jobs.workers import worker_memory
from flows.admission import Url, admitted
from flows.finish import Build, embed_reports, indexed
from flows.outcome import TakenDown
from flows.progress import StageClock
from flows.stage import stage
from rag_model.evaluation.gate import judge
from rag_model.snapshots.content import counts, with_indexes
from rag_model.snapshots.existing import carried, facts_of, recipe_of, widths_of
from rag_model.snapshots.measure import Measured
from rag_model.snapshots.planning import plan_indexes
from rag_model.snapshots.publish import Published, vitals
from rag_model.snapshots.report import write_report
from rag_model.snapshots.takedown import (
    Holder,
    carry_out,
    choose_wiki,
    part_blobs,
    parts_to_redact,
    redacted,
    unsigned,
)
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content, Manifest
from rag_model.store.versions.snapshot import Snapshot
from rag_model.store.versions.takedowns import Takedown


@flow(name="takedown", persist_result=False)
@admitted
def takedown(
    store: Url,
    pages: Sequence[str] = (),
    wiki: str | None = None,
    reason: str = "",
    beam_options: Sequence[str] = (),
) -> TakenDown:
    """Take pages out of every snapshot of `store`.

    Args:
        store: URL or folder of the store.
        pages: their ids; none: only continue takedowns that were ordered before.
        wiki: dbname of the pages' wiki; needed if the store has several wikis.
        reason: the reason, for the record.
        beam_options: options of Beam and of its runner, as on their own command lines.

    Raises:
        UsageError: the wiki of the pages is ambiguous.
        BookwheelError: a stage failed; run it again to continue.
    """
    target = Store.open(store)
    target.refs.require_exclusion()
    launch = Launch.new(target.url, beam_options)
    with target.intents.held(launch.run):  # keeps `gc` from deleting new files
        record = order(target, pages, wiki, reason)
        done = carry_out(target, partial(rebuild, target, beam_options))
    places = done.places
    left = {*places} & {*target.snapshots.list()}
    return TakenDown(
        record.number if record else None,
        places,
        done.moves,
        tuple(sorted(left)),
        unsigned(target, places.values()),
        done.evaluations,
    )


@stage
def order(store: Store, pages: Sequence[str], wiki: str | None, reason: str) -> Takedown | None:
    """Write the record of the pages that are in no record yet."""
    if not pages:
        return None
    chosen = choose_wiki(store, pages, wiki)
    new = {*pages} - store.takedowns.pages(chosen)
    return store.takedowns.add(chosen, new, reason, _who()) if new else None


def rebuild(store: Store, beam_options: Sequence[str], holder: Holder) -> Manifest | None:
    """Make a snapshot without the pages, and its report; return None if no page is left."""
    old, launch, clock = holder.manifest, Launch.new(store.url, beam_options), StageClock()
    with clock("redact") as tell:
        content = redact_parts(holder, launch, tell)
    if not content.parts:
        return None
    build = prepare(store, old, content, launch, clock, {"takedown": {"of": old.id, "pages": list(holder.pages)}})
    manifest, measured = indexed(build)
    store.runs.clear(launch.run)
    _report(build, manifest, measured)
    return dataclasses.replace(manifest, parents=old.parents)


@stage
def redact_parts(holder: Holder, launch: Launch, tell: OnProgress) -> Content:
    """Write the parts that contain the pages without them."""
    content, parts = holder.manifest.content, parts_to_redact(holder)
    made = redact.run(
        [RedactTask(holder.pages, tuple(part_blobs(content, part).items())) for part in parts], launch, tell
    )
    return redacted(content, {part.name: facts for part, facts in zip(parts, made, strict=True)})


@stage
def prepare(
    store: Store, old: Manifest, content: Content, launch: Launch, clock: StageClock, why: Mapping[str, Any]
) -> Build:
    """Plan the indexes of a snapshot that is made from another."""
    recipe, made = recipe_of(old.content), carried(old)
    passages, embeddings = facts_of(store, content)
    with Snapshot.of(store, old) as snapshot:
        plans = plan_indexes(recipe.index, passages, widths_of(snapshot), worker_memory(launch.flags))
    source, encoder = (str(made.get(name, "")) for name in ("dump", "encoder"))
    assembled = partial(with_indexes, content)
    return Build(
        store, launch, clock, recipe, "", source, encoder, passages, embeddings, plans, assembled, {**made, **why}
    )


def _report(build: Build, manifest: Manifest, measured: Measured) -> None:
    verdict = judge(build.recipe.gate, vitals(manifest), measured.found)
    published, counted = Published(manifest.id, verdict, None), counts(build.passages, build.embeddings)
    made = build.passages, embed_reports(build.embeddings)
    write_report(build.store, manifest, published, measured, counted, *made, build.clock.seconds)


def _who() -> str:
    """Return the name of the user and of the machine."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):  # a container's user without a name
        return socket.gethostname()
