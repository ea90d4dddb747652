"""Start a rebuild on a machine of the right size: look at the dump and the encoder first, then ask for what they need.

Purpose: what a schedule or a person starts where runs get machines of their own (Docker, Kubernetes), and where a
rebuild that cannot fit should be refused before it waits for a machine.
Caching: none: nothing is built here.
Requires: the deployment that shall run, and the dump's and encoder's files in reach of this run.
"""

from collections.abc import Sequence
from dataclasses import asdict

from beam_jobs.workers import here
from flows.machine.pools import Launched, Most, start
from flows.reindex import DEFAULT_ENCODER
from flows.stage import deployed, stage
from rag_model.encoders.resolve import resolve_folder
from rag_model.needs.build import bulk_of, work_of
from rag_model.needs.machine import Limits, Work
from rag_model.retrieve.named import encoder_names
from rag_model.snapshots.recipe import Recipe
from rag_model.store.store import Store

DEPLOYMENT = "reindex/library"


@deployed("launch")
def launch(
    dump: str,
    store: str,
    encoder: str = DEFAULT_ENCODER,
    recipe: Recipe | None = None,
    ref: str = "latest",
    limit: int | None = None,
    beam_options: Sequence[str] = (),
    deployment: str = DEPLOYMENT,
    most: Most | None = None,
    hours: float | None = None,
) -> Launched:
    """Estimate what a rebuild needs, and start one with that much memory, and so many cores and GPUs.

    Args:
        dump: URL, path or glob of a MediaWiki dump, of JSONL or Parquet documents, or of psgs_w100.tsv.
        store: URL or folder of the store; made if there is none.
        encoder: folder or hub name of the passage encoder.
        recipe: everything else that decides the snapshot; the default recipe if none is given.
        ref: the name that shall mean the new snapshot.
        limit: read only so many articles, for a quick look.
        beam_options: options of Beam and of its runner, as on their own command lines.
        deployment: what to start, FLOW/NAME; its work pool decides how a machine is asked for.
        most: what one run may be given; else what this machine has.
        hours: how long the rebuild may take, about: more cores, or a GPU, where fewer would take longer. Else 6, and as
            short as can be where runs share this machine.

    Raises:
        ResourceError: it would not fit; nothing was started.
        UsageError: there is no such deployment, or its pool is not this machine's and no limits are given.
    """
    decided, local = recipe or Recipe(), here(beam_options)

    @stage
    def weigh(limits: Limits) -> Work:
        """Estimate what a rebuild needs."""
        named = encoder_names(Store.open(store), encoder).passage if encoder.startswith("model:") else encoder
        bulk = bulk_of(dump, resolve_folder(named or encoder), decided.chunk.words, decided.part_bytes, limit)
        return work_of(bulk, decided.index, limits.memory, local=local)

    what = {"dump": dump, "store": store, "encoder": encoder, "ref": ref, "recipe": recipe and asdict(recipe)}
    given = {**what, "limit": limit, "beam_options": list(beam_options)}
    return start(deployment, given, most, hours, weigh)
