"""`bookwheel expire`, `gc` and `verify`: delete old versions and unneeded files, check files."""

import time
from dataclasses import asdict
from typing import Any

from flows.command.reply import AnyVersion, Common, Reply, StoreUrl, Yes, parse_age
from rag_model.errors import RefusedError, format_count
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store
from rag_model.store.upkeep.expire import ExpirePolicy, expire_store
from rag_model.store.upkeep.gc import collect_garbage
from rag_model.store.upkeep.verify import verify_version
from rag_model.store.versions.catalog import Catalog


def expire(
    *,
    store: StoreUrl,
    keep: int = 10,
    older_than: str = "90d",
    yes: Yes = False,
    common: Common | None = None,
) -> Reply:
    """Delete old moves of refs, and versions that no remaining move names; a dry run unless --yes.

    Evaluations are deleted with their snapshot or model, and unfinished trainings when their
    checkpoint is older than --older-than. The current snapshot of a ref is never deleted. The files
    of deleted snapshots stay until `bookwheel gc`.

    Args:
        keep: Number of newest moves of every ref to keep, of any age.
        older_than: Keep younger moves; the age of a move is the time since the ref moved away
            from it.
    """
    policy = ExpirePolicy(keep, parse_age(older_than))
    report = expire_store(Store.open(store), policy, dry_run=not yes)
    lines = [
        *(f"move      {move}" for move in report.moves),
        *(f"snapshot  {snapshot[:12]}" for snapshot in report.snapshots),
        *(f"model     {model[:12]}" for model in report.models),
        *(f"evaluation {evaluation[:12]}" for evaluation in report.evaluations),
        *(f"training  {key[:12]}" for key in report.trainings),
        f"{'deleted' if yes else 'would delete'} {format_count(len(report.moves), 'move')}, "
        f"{format_count(len(report.snapshots), 'snapshot')}, "
        f"{format_count(len(report.models), 'model')}, "
        f"{format_count(len(report.evaluations), 'evaluation')} and "
        f"{format_count(len(report.trainings), 'training')}"
        + ("" if yes else "; nothing was changed: give --yes to do it"),
    ]
    return Reply({"dry_run": not yes, **asdict(report)}, "\n".join(lines))


def gc(
    *,
    store: StoreUrl,
    grace: str = "24h",
    yes: Yes = False,
    common: Common | None = None,
) -> Reply:
    """Delete files that no snapshot, build or writer needs; a dry run unless --yes.

    Safe while builds run: files that they wrote or may reuse are kept.

    Args:
        grace: Keep files that are younger than this: 7d, 90m, 0.
    """
    opened_store = Store.open(store)
    tally_by_kind = collect_garbage(opened_store, parse_age(grace), dry_run=not yes)
    writer_names = [
        intent.name for intent in opened_store.intents.list_live_intents(time.time()) if not intent.is_lease
    ]
    n_files, n_bytes = (sum(getattr(tally, name) for tally in tally_by_kind.values()) for name in ("files", "bytes"))
    document = {
        "dry_run": not yes,
        "files": n_files,
        "bytes": n_bytes,
        "kinds": {kind: asdict(tally) for kind, tally in tally_by_kind.items()},
        "writers": writer_names,
    }
    lines = [
        *(
            f"{kind:<10}{format_count(tally.files, 'file')}, {tally.bytes / 1e6:,.1f} MB"
            for kind, tally in tally_by_kind.items()
        ),
        f"{'deleted' if yes else 'would delete'} {format_count(n_files, 'file')}, "
        f"{n_bytes / 1e6:,.1f} MB" + ("" if yes else "; nothing was changed: give --yes to do it"),
    ]
    if writer_names:
        lines.append(
            f"kept the files of {format_count(len(writer_names), 'run')} ({', '.join(writer_names[:3])}) and "
            "all that builds may reuse, also of removed pages: run gc again after every such run has "
            "ended, or an hour after it was killed"
        )
    return Reply(document, "\n".join(lines))


def verify(snapshot: AnyVersion = "latest", /, *, store: StoreUrl, common: Common | None = None) -> Reply:
    """Hash a snapshot's files again, check its manifest and refs; exit 3 after a problem.

    `model:NAME` verifies a model, `evaluation:ID` an evaluation. With `--trust` the snapshot, and
    the ref that names it, must be signed by a key of that file.
    """
    opened_store = Store.open(store)
    catalog, name = opened_store.find_catalog(snapshot)
    version_id = catalog.resolve(name)
    problems, trust_problem = verify_version(opened_store, version_id, catalog), _describe_trust_problem(catalog, name)
    document = {
        "ok": not problems and not trust_problem,
        catalog.noun: version_id,
        "signed": catalog.describe_signature(name),
        "problems": [asdict(problem) for problem in problems],
    }
    if not problems:
        return Reply(document, f"{catalog.noun} {version_id[:12]} is whole, {document['signed']}", trust_problem)
    lines = [f"{problem.path}{_format_location(problem.blob)}: {problem.what}" for problem in problems]
    refusal = (
        f"{opened_store.url} is not as it was published; problems: {len(problems)}, the first "
        f"{lines[0]}: restore them from a copy of the store, or delete them and run reindex again, "
        "which creates the missing files"
    )
    return Reply(document, "\n".join(lines), refusal)


def _format_location(blob_id: str | None) -> str:
    """Return the path of a blob's file in the store, so that a user can restore the file."""
    return "" if blob_id is None else f" ({BlobRef(blob_id, 0).path})"


def _describe_trust_problem(catalog: Catalog[Any], name: str) -> str:
    """Return the reason why the trust file does not allow a name; empty if it does."""
    try:
        catalog.resolve_trusted(name)
    except RefusedError as error:
        return str(error)
    return ""
