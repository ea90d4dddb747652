"""Keep a library current by itself: watch for a new dump, rebuild, and forget what is old by policy.

Purpose: two scheduled jobs. `watch` costs one request where there is nothing new; `upkeep` expires and collects.
Caching: none beside the store's memo and the files on disk: a run that died is run again and goes on.
Requires: a folder for downloads that outlives a run, and a store that this machine and the workers both reach.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from flows.command.age import parse_age
from flows.launch import launch
from flows.machine.pools import Launched, Most
from flows.outcome import Reindexed
from flows.progress import StageClock
from flows.reindex import DEFAULT_ENCODER, reindex
from flows.stage import deployed, stage
from rag_model.corpus.wikimedia import JOB, Published, Tell, fetch, newest
from rag_model.snapshots.recipe import Recipe
from rag_model.store.store import Store
from rag_model.store.upkeep.expire import Expired, Policy, expire
from rag_model.store.upkeep.gc import gc

_DATE = re.compile(r"(?<!\d)(20\d{6})(?!\d)")  # in the name of a dump, or of its folder


@dataclass(frozen=True, slots=True)
class Watched:
    """What a look at the published dumps led to."""

    known: str  # date of the dump that the ref was built from; empty: none
    dump: str | None  # date of the one that was built now; None: nothing new
    built: Reindexed | None
    launched: Launched | None = None  # the run that builds it instead


@dataclass(frozen=True, slots=True)
class Kept:
    """What upkeep forgot and deleted, or would."""

    dry_run: bool
    expired: Expired
    deleted: dict[str, dict[str, int]]  # files and bytes by kind


@deployed("watch")
def watch(
    wiki: str,
    store: str,
    downloads: str,
    encoder: str = DEFAULT_ENCODER,
    recipe: Recipe | None = None,
    ref: str = "latest",
    job: str = JOB,
    limit: int | None = None,
    beam_options: Sequence[str] = (),
    deployment: str | None = None,
    most: Most | None = None,
    hours: float | None = None,
) -> Watched:
    """Rebuild the snapshot if a dump was completed since `ref` was built; what it was built from is told by its name.

    Args:
        wiki: URL of a wiki's dumps, as https://dumps.wikimedia.org/enwiki/.
        store: URL or folder of the store; made if there is none.
        downloads: folder for the dump's files; those of a run that was cut off are gone on with.
        encoder: folder or hub name of the passage encoder.
        recipe: everything else that decides the snapshot.
        ref: the name that shall mean the new snapshot.
        job: which of a run's jobs holds the articles.
        limit: read only so many articles, for a quick look.
        beam_options: options of Beam and of its runner.
        deployment: start a run of this one, FLOW/NAME, on a machine of the right size (`flows.launch`), and leave it to
            itself; else build here.
        most: what such a run may be given.
        hours: how long it may take, about.

    Raises:
        GateRefusedError: the snapshot is published, but the ref did not move.
        BookwheelError: the dump cannot be had, or a stage failed; run again, it goes on.
    """
    clock = StageClock()
    with clock("look"):
        known = built_from(Store.open(store, create=True), ref)
        found = look(wiki, known, job)
    if found is None:
        return Watched(known, None, None)
    with clock("download") as tell:
        dump = download(found, Path(downloads) / found.date, tell)
    what = (dump, store, encoder, recipe, ref, limit)
    if deployment is not None:
        return Watched(known, found.date, None, launch.fn(*what, beam_options, deployment, most, hours))
    return Watched(known, found.date, reindex.fn(*what, False, beam_options))  # its stages are this run's


@deployed("upkeep")
def upkeep(store: str, keep: int = 10, older_than: str = "90d", grace: str = "24h", dry_run: bool = True) -> Kept:
    """Forget old versions of a store by policy, and delete what nothing needs any more.

    Args:
        store: URL or folder of the store.
        keep: newest moves of every ref that stay, however old.
        older_than: younger moves stay: 90d, 24h.
        grace: files written within it stay, needed or not.
        dry_run: only say what would be forgotten and deleted; on unless told otherwise, since it cannot be undone.
    """
    opened, clock = Store.open(store), StageClock()
    with clock("expire"):
        expired = expire_old(opened, Policy(keep, parse_age(older_than)), dry_run)
    with clock("gc"):
        return Kept(dry_run, expired, collect(opened, parse_age(grace), dry_run))


@stage
def look(wiki: str, known: str, job: str) -> Published | None:
    """Ask for a dump that is newer than the known one, and complete."""
    return newest(wiki, known, job)


@stage
def download(found: Published, folder: Path, tell: Tell) -> str:
    """Fetch the dump's files and check them."""
    return fetch(found, folder, tell)


@stage
def expire_old(store: Store, policy: Policy, dry_run: bool) -> Expired:
    """Forget old moves of refs and what only they named."""
    return expire(store, policy, dry_run=dry_run)


@stage
def collect(store: Store, grace: float, dry_run: bool) -> dict[str, dict[str, int]]:
    """Delete files that nothing needs."""
    return {kind: asdict(tally) for kind, tally in gc(store, grace, dry_run=dry_run).items()}


def built_from(store: Store, ref: str) -> str:
    """Return the date, yyyymmdd, in the name of the dump that `ref` was built from; empty if there is none."""
    move = store.refs.current(ref)
    named = store.snapshots.get(move.snapshot).provenance.get("dump", "") if move else ""
    dates = _DATE.findall(str(named))
    return dates[-1] if dates else ""
