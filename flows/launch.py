"""Start a rebuild on a machine of the right size, which is estimated from the dump and the encoder.

Purpose: for schedules and people, if runs get machines of their own (Docker, Kubernetes): a rebuild that cannot fit is
refused before it waits for a machine.
Caching: none: nothing is built here.
Requires: the deployment to start; this run must be able to read the dump's and the encoder's files.
"""

from collections.abc import Sequence
from typing import Any

from beam_jobs.workers import here
from flows.machine.pools import launching
from flows.reindex import reindex
from rag_model.encoders.resolve import resolve_folder
from rag_model.needs.build import WORDS, passages_of, work_of
from rag_model.needs.machine import Work
from rag_model.retrieve.named import encoder_names
from rag_model.snapshots.recipe import Recipe
from rag_model.store.store import Store


def weigh(
    memory: int, dump: str, store: str, encoder: str, limit: int | None, beam_options: Sequence[str], **other: Any
) -> Work:
    """Estimate what a rebuild needs."""
    named = encoder_names(Store.open(store), encoder).passage if encoder.startswith("model:") else encoder
    recipe, local = other["recipe"] or Recipe(), here(beam_options)
    words: int = getattr(recipe.chunk.built(), "words", WORDS)  # other chunkers: assume the default's length
    count = passages_of(dump, words, limit)
    work = work_of(count, resolve_folder(named or encoder), recipe.index, memory if local else None)
    return work if local else Work(work.sizes, {"launcher": 0}, disk=work.disk)  # the workers are not this run's


launch = launching("launch", reindex, weigh, "dry_run", "base")
