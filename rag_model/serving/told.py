"""What a service says of itself, over HTTP and as a tool of an agent."""

from dataclasses import asdict
from typing import Any

from rag_model.serving.service import Service


def told(service: Service) -> dict[str, Any]:
    """Return what is served, and what was refused, as JSON values.

    Raises:
        NotReadyError: nothing is served yet.
    """
    refusal = service.follower.refusal
    with service.desk.edition() as edition:
        named = edition.named
        return {
            "snapshot": named.snapshot,
            "ref": named.ref,
            "number": named.number or None,
            "created_at": named.created_at or None,
            "passages": edition.snapshot.n,
            "indexes": list(edition.indexes),
            "retrievers": list(edition.retrievers),
            "model": edition.model.id if edition.model else None,
            "refused": None if refusal is None else {k: v for k, v in asdict(refusal).items() if k != "ref"},
            "store_problem": service.follower.problem or None,
        }


def unready(service: Service) -> str:
    """Return why questions cannot be answered now, as one sentence."""
    if service.draining:
        return "the service is ending"
    if service.desk.named is not None and service.problem:
        return service.problem
    refusal = service.follower.refusal
    reason = service.follower.problem or service.problem or (refusal.reason if refusal else "it is on its way")
    return f"no snapshot is open yet: {reason}"
