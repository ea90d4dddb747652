"""Start a rebuild on a machine whose size is estimated from the dump and the encoder.

Purpose: for runs that get their own machines (Docker, Kubernetes). A rebuild that would not fit
into the allowed resources is refused before it waits for a machine.
Not cached: it only starts another run.
Requires: the deployment to start; this run must be able to read the dump's and the encoder's files.
"""

from collections.abc import Sequence
from typing import Any

from beam_jobs.workers import is_local, resolve_options
from flows.machine.pools import create_start_flow
from flows.parameters import is_deployment_run
from flows.reindex import reindex
from rag_model.process import temporary_folder
from rag_model.resources import WorkEstimate
from rag_model.resources.estimates import DEFAULT_MAX_WORDS, estimate_build, estimate_passages
from rag_model.retrieve.models import resolve_encoders
from rag_model.snapshots.encoding import resolve_encoder_folder
from rag_model.snapshots.recipe import Recipe
from rag_model.store.store import Store


def estimate_rebuild(
    memory: int, dump: str, store: str, encoder: str, limit: int | None, beam_options: Sequence[str], **parameters: Any
) -> WorkEstimate:
    """Estimate the resources that a rebuild needs."""
    passage_encoder = resolve_encoders(Store.open(store), encoder).passage if encoder.startswith("model:") else encoder
    effective_options = resolve_options(beam_options) if is_deployment_run() else beam_options
    recipe, is_local_run = parameters["recipe"] or Recipe(), is_local(effective_options)
    # A chunker without a setting `words` is estimated like the default chunker.
    max_words: int = getattr(recipe.chunk.create_chunker(), "words", DEFAULT_MAX_WORDS)
    n_passages = estimate_passages(dump, max_words, limit)
    memory_limit = memory if is_local_run else None
    with temporary_folder("encoder") as scratch:
        encoder_folder = resolve_encoder_folder(Store.open(f"{scratch}/store", create=True), passage_encoder or encoder)
        estimate = estimate_build(n_passages, encoder_folder, recipe.index, memory_limit, recipe.encode.spec)
    # If workers run on other machines, the run's own machine needs resources only for the launcher.
    return estimate if is_local_run else WorkEstimate(estimate.sizes, {"launcher": 0}, disk=estimate.disk)


start_reindex = create_start_flow("launch", reindex, estimate_rebuild, "dry_run", "base")
