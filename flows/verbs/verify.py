"""`bookwheel verify`: check that all files of a snapshot, or of a model, are unchanged."""

from dataclasses import asdict
from typing import Any

from flows.command.reply import AnyVersion, Common, Reply, StoreUrl
from rag_model.errors import RefusedError
from rag_model.store.store import Store
from rag_model.store.upkeep.verify import verify_version as verify_snapshot
from rag_model.store.versions.catalog import Catalog


def verify(snapshot: AnyVersion = "latest", /, *, store: StoreUrl, common: Common | None = None) -> Reply:
    """Hash a snapshot's files again, check its manifest and refs; exit 3 after a problem.

    `model:NAME` verifies a model, `evaluation:ID` an evaluation. With `--trust` the snapshot, and
    the ref that names it, must be signed by a key of that file.
    """
    opened_store = Store.open(store)
    catalog, name = opened_store.find_catalog(snapshot)
    version_id = catalog.resolve(name)
    problems, trust_problem = verify_snapshot(opened_store, version_id, catalog), _describe_trust_problem(catalog, name)
    document = {
        "ok": not problems and not trust_problem,
        catalog.noun: version_id,
        "signed": catalog.describe_signature(name),
        "problems": [asdict(problem) for problem in problems],
    }
    if not problems:
        return Reply(document, f"{catalog.noun} {version_id[:12]} is whole, {document['signed']}", trust_problem)
    lines = [f"{problem.path}: {problem.what}" for problem in problems]
    refusal = (
        f"{opened_store.url} is not as it was published; problems: {len(problems)}, the first "
        f"{lines[0]}: restore them from a copy of the store, or delete them and run reindex again, "
        "which makes what is missing"
    )
    return Reply(document, "\n".join(lines), refusal)


def _describe_trust_problem(catalog: Catalog[Any], name: str) -> str:
    """Return the reason why the trust file does not allow a name; empty if it does."""
    try:
        catalog.resolve_trusted(name)
    except RefusedError as error:
        return str(error)
    return ""
