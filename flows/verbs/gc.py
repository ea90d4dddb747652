"""`bookwheel gc`: delete files that no version needs."""

import time
from dataclasses import asdict
from typing import Annotated

from cyclopts import Parameter

from flows.command.reply import Common, Reply, StoreUrl, Yes, parse_age
from rag_model.errors import format_count
from rag_model.store.store import Store
from rag_model.store.upkeep.gc import collect_garbage as collect


def gc(
    *,
    store: StoreUrl,
    grace: Annotated[str, Parameter(help="Keep files that are younger than this: 7d, 90m, 0.")] = "24h",
    yes: Yes = False,
    common: Common | None = None,
) -> Reply:
    """Delete files that no snapshot, build or writer needs; a dry run unless --yes.

    Safe while builds run: files that they wrote or may reuse are kept.
    """
    opened_store = Store.open(store)
    tallies = collect(opened_store, parse_age(grace), dry_run=not yes)
    writers = [intent.name for intent in opened_store.intents.list_live(time.time())]
    files, size = (sum(getattr(tally, name) for tally in tallies.values()) for name in ("files", "bytes"))
    document = {
        "dry_run": not yes,
        "files": files,
        "bytes": size,
        "kinds": {kind: asdict(tally) for kind, tally in tallies.items()},
        "writers": writers,
    }
    lines = [
        *(
            f"{kind:<10}{format_count(tally.files, 'file')}, {tally.bytes / 1e6:,.1f} MB"
            for kind, tally in tallies.items()
        ),
        f"{'deleted' if yes else 'would delete'} {format_count(files, 'file')}, {size / 1e6:,.1f} MB"
        + ("" if yes else "; nothing was changed: give --yes to do it"),
    ]
    if writers:
        lines.append(
            f"kept the files of {format_count(len(writers), 'run')} ({', '.join(writers[:3])}) and all that builds may "
            "reuse, also of removed pages: run gc again after it has ended, or an hour after it was killed"
        )
    return Reply(document, "\n".join(lines))
