"""Keep a library current: watch for new dumps, rebuild, and expire old versions by policy.

Purpose: two scheduled jobs. `watch` looks for a new dump or for changes of a wiki, with one request
if there are none, and rebuilds; `upkeep` expires versions and collects garbage.
Caching: the store's memo and the files on disk; an interrupted run continues when it is run again.
Requires: a folder for downloads that outlives a run, and a store that this machine and the workers
both reach.
"""

import re
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from flows.command.console import ProgressReporter
from flows.command.reply import parse_age
from flows.machine.pools import StartedRun, read_deployment, resolve_parameters
from flows.outcome import BuildOutcome
from flows.parameters import Url
from flows.reindex import DEFAULT_ENCODER, reindex
from flows.stage import StageClock, deployment_flow, stage
from flows.start_reindex import start_reindex
from rag_model.corpus.dump_catalog import ARTICLES_JOB, PROPERTIES_JOB, fetch_dump, find_newest_dump
from rag_model.corpus.records import is_wiki_site
from rag_model.errors import UsageError
from rag_model.resources import RunLimits
from rag_model.snapshots.parent import Parent
from rag_model.snapshots.planning import plan_parts
from rag_model.snapshots.recipe import Recipe
from rag_model.store.store import Store
from rag_model.store.upkeep.expire import ExpirePolicy, ExpireReport, expire_store
from rag_model.store.upkeep.gc import collect_garbage, preview_garbage

_DATE = re.compile(r"(?<!\d)(20\d{6})(?!\d)")  # date in a dump's file or folder name


@dataclass(frozen=True, slots=True)
class WatchOutcome:
    """The result of checking the published dumps, or a wiki, for something new."""

    # date of the dump of the ref's snapshot, or time at which its wiki was read; empty: unknown
    known: str
    dump: str | None  # date or time of the new dump or wiki; None: nothing is new
    built: BuildOutcome | None
    launched: StartedRun | None = None  # the run that was started to rebuild elsewhere


@dataclass(frozen=True, slots=True)
class UpkeepOutcome:
    """The versions and files that upkeep deleted, or would delete in a dry run."""

    dry_run: bool
    expired: ExpireReport
    deleted: dict[str, dict[str, int]]  # files and bytes by kind


@deployment_flow("watch", starts_jobs=False)
def watch(
    wiki: Url,
    store: Url,
    downloads: str = "",
    encoder: Url = DEFAULT_ENCODER,
    recipe: Recipe | None = None,
    ref: str = "latest",
    job: str = ARTICLES_JOB,
    limit: int | None = None,
    beam_options: Sequence[str] = (),
    deployment: str | None = None,
    most: RunLimits | None = None,
    hours: float | None = None,
) -> WatchOutcome:
    """Rebuild the snapshot if a complete dump is newer than that of `ref`, judged by their names.

    If `wiki` is the address of a wiki itself, rebuild the snapshot if pages of the wiki changed.

    Args:
        wiki: URL of a wiki's dumps, such as https://dumps.wikimedia.org/enwiki/, or of a wiki, such
            as mediawiki+https://wiki.example.org/.
        store: URL or folder of the store; created if it does not exist.
        downloads: folder for the dump's files; downloads of an interrupted run are continued.
            Not for the address of a wiki.
        encoder: folder or hub name of the passage encoder.
        recipe: all other settings that decide the snapshot.
        ref: the ref to move to the new snapshot.
        job: the job of a dump run that has the articles.
        limit: read at most this many articles, for a quick test.
        beam_options: options of Beam and of its runner.
        deployment: FLOW/NAME; start its run on a machine of the estimated size, without waiting
            for it (`flows.start_reindex`); by default build in this run. Parameters that are left
            at their defaults, such as `encoder` or `ref`, keep the deployment's values.
        most: the maximum memory, cores and GPUs of such a run.
        hours: the intended duration, approximately.

    Raises:
        GateRefusedError: the snapshot is published, but the ref did not move.
        BookwheelError: the dump cannot be fetched, or a stage failed; run it again to continue.
    """
    if deployment is not None:
        # Whether a dump is new depends on the ref, recipe and limit with which the run will build.
        parameters = {"dump": wiki, "store": store, "encoder": encoder, "recipe": recipe, "ref": ref, "limit": limit}
        run_parameters = resolve_parameters(reindex, parameters, read_deployment(deployment)[1])
        encoder, recipe, ref, limit = (run_parameters[name] for name in ("encoder", "recipe", "ref", "limit"))
    clock, opened_store = StageClock(), Store.open(store, create=True)
    if is_wiki_site(wiki):
        with clock("look") as on_progress:
            known_date, new_date = find_site_changes(opened_store, wiki, recipe or Recipe(), ref, limit, on_progress)
        dump = wiki
    elif not downloads:
        raise UsageError("dumps are fetched into a folder: give one as `downloads`")
    else:
        with clock("look"):
            known_date = get_dump_date(opened_store, ref)
            table_jobs = [PROPERTIES_JOB] if recipe and "wikidata" in recipe.chunk.metadata else []
            new_dump = find_new_dump(wiki, known_date, job, table_jobs)
        new_date = new_dump.date if new_dump else None
        if new_dump:
            with clock("download") as on_progress:
                dump = download_dump(new_dump, Path(downloads) / new_dump.date, on_progress)
    if new_date is None:
        return WatchOutcome(known_date, None, None)
    rebuild_arguments = (dump, store, encoder, recipe, ref, limit)
    if deployment is not None:
        start_arguments = {"deployment": deployment, "most": most, "hours": hours}
        started_run = start_reindex.fn(*rebuild_arguments, beam_options=beam_options, **start_arguments)
        return WatchOutcome(known_date, new_date, None, started_run)
    # The flow's function is called directly, so that its stages belong to this run.
    return WatchOutcome(known_date, new_date, reindex.fn(*rebuild_arguments, False, beam_options))


@deployment_flow("upkeep")
def upkeep(
    store: Url, keep: int = 10, older_than: str = "90d", grace: str = "24h", dry_run: bool = True
) -> UpkeepOutcome:
    """Expire old versions of a store by policy, and delete files that are not needed any more.

    Args:
        store: URL or folder of the store.
        keep: for every ref, the number of newest log entries to keep, whatever their age.
        older_than: delete only log entries that are older than this, such as 90d or 24h.
        grace: keep files that are younger than this, such as 24h.
        dry_run: only report what would be expired and deleted; the default, since a deletion cannot
            be undone.
    """
    opened_store, clock, policy = Store.open(store), StageClock(), ExpirePolicy(keep, parse_age(older_than))
    with clock("expire"):
        expire_report = expire_versions(opened_store, policy, dry_run=dry_run)
    with clock("gc"):
        deleted_files = delete_unneeded_files(opened_store, parse_age(grace), policy, dry_run)
    return UpkeepOutcome(dry_run, expire_report, deleted_files)


find_new_dump = stage(find_newest_dump, "find_new_dump")
download_dump = stage(fetch_dump, "download_dump")
expire_versions = stage(expire_store, "expire_versions")


@stage
def find_site_changes(
    store: Store, wiki: str, recipe: Recipe, ref: str, limit: int | None, on_progress: ProgressReporter
) -> tuple[str, str | None]:
    """Read a wiki into the store; return the time when it was read for the snapshot of `ref`, and
    the time of this reading, which is None if no page has changed.
    """
    parent = Parent.from_ref(store, ref)
    manifest = parent.manifest
    provenance = manifest.provenance if manifest else {}
    with store.intents.hold(f"watch-{secrets.token_hex(8)}"):  # keeps `gc` from deleting new pages
        plan = plan_parts(store, wiki, recipe, limit, parent, say=on_progress.say)
    is_site_changed = provenance.get("dump") != wiki or provenance.get("plan") != plan.compute_digest()
    return str(provenance.get("read_at") or ""), plan.read_at if is_site_changed else None


@stage
def delete_unneeded_files(store: Store, grace: float, policy: ExpirePolicy, dry_run: bool) -> dict[str, dict[str, int]]:
    """Delete files that no snapshot and no running build needs; return their numbers and sizes.

    In a dry run, nothing is deleted, and the files of versions that `policy` expires count too.
    """
    tally_by_kind = preview_garbage(store, grace, policy) if dry_run else collect_garbage(store, grace)
    return {file_kind: asdict(tally) for file_kind, tally in tally_by_kind.items()}


def get_dump_date(store: Store, ref: str) -> str:
    """Return the date (yyyymmdd) in the name of the dump from which `ref` was built.

    Return "" if there is no date.
    """
    move = store.refs.find_current(ref)
    dump_name = store.snapshots.get(move.snapshot).provenance.get("dump", "") if move else ""
    dump_dates = _DATE.findall(str(dump_name))
    return dump_dates[-1] if dump_dates else ""
