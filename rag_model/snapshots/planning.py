"""Plan a build before any passage is encoded: its parts, its encoders and its indexes.

The plan of the parts is recorded in the store, so that the next run does not split a source again.

A release skips a rebuild if a snapshot was built before from the exact same inputs
(`find_or_build_snapshot`). `reindex` reuses every finished stage, but still reads the whole dump and
measures the indexes again. A release with unchanged inputs does neither. A dump file is identified
by its size and the time or tag that its disk or server reports, so a new copy counts as changed.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rag_model.corpus import chunk
from rag_model.corpus.dump_formats.document_files import find_dump_files
from rag_model.corpus.dump_formats.dump_format import (
    SITE,
    can_plan_fast,
    detect_format,
    get_format,
    get_part_format,
    get_plugin_identity,
)
from rag_model.corpus.parts import PartBoundaries
from rag_model.corpus.plan import find_dump_properties, plan_dump
from rag_model.corpus.records import Plan, is_wiki_site
from rag_model.corpus.source import get_size, get_version_tag, read_bytes
from rag_model.digest import digest_chunks
from rag_model.encoders import embed
from rag_model.errors import InputError, StoreError, UsageError
from rag_model.evaluation.questions import digest_questions, read_questions
from rag_model.extras import get_versions
from rag_model.index.kind import get_kind_for_factory
from rag_model.index.plan import IndexPlan
from rag_model.index.recipe import IndexRecipe, representation_of
from rag_model.process import temporary_folder
from rag_model.snapshots.encoding import (
    NO_PINS,
    REPRESENTATION_KINDS,
    Pins,
    StoredEncoder,
    store_chunker,
    store_encoder,
)
from rag_model.snapshots.mirrors import StoredMirror, open_mirror
from rag_model.snapshots.parent import Parent
from rag_model.snapshots.recipe import Recipe
from rag_model.snapshots.reused_training import keep_parent_sizes
from rag_model.snapshots.stage_results import ChunkResult
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store
from rag_model.store.versions.manifest import EMBEDDINGS

CODE = 3  # increase it when the same files would give other parts
# Projects whose wikitext has little prose, and the reason.
_UNRENDERED_PROJECTS = {
    "wiktionary": "entries are mostly templates with Lua modules",
    "wikisource": "texts are included from pages of scanned books",
}
# Descriptions of the reasons for which pages are dropped.
_DROP_REASONS = {
    "namespace": "outside the main namespace",
    "redirect": "redirects",
    "not_wikitext": "not wikitext",
    "empty": "without content",
    "disambiguation": "disambiguation pages",
    "list": "lists",
    "no_text": "without text after cleaning",
    "taken_down": "taken down",
    "unparsable": "unparsable",
}
_RELEASE_STAGE = "release"  # memo stage that records which snapshot was built from which inputs
_INPUT_LIBRARIES = ("bookwheel", "faiss-cpu", "numpy", "pyarrow", "torch", "transformers", "tokenizers")
Inputs = Mapping[str, Any]  # JSON values that determine a snapshot, by name


def plan_parts(
    store: Store,
    dump: str,
    recipe: Recipe,
    limit: int | None = None,
    parent: Parent | None = None,
    source_store: Store | None = None,
    say: Callable[[str], object] = str,
) -> Plan:
    """Return the parts of `dump`; split and store, once, the files in which workers cannot seek.

    The parent's page ranges are kept where possible (`rag_model.corpus.parts`). The pages of a
    MediaWiki site are kept in the store, and later only changed pages are fetched; `source_store`
    is another store that has such pages. The first pages come from the parent's dump if that is a
    dump of the site; a message about this is passed to `say`.

    Raises:
        InputError: a file is missing, damaged, or not of the type that its name says.
        UsageError: the type of a file is unknown, the files are of several types, or the recipe
            asks for structures, such as tables, that pages of this type do not have.
    """
    boundaries = parent.get_part_boundaries(recipe) if parent else None
    mirror = None
    if is_wiki_site(dump) and limit is None:
        mirror = open_mirror(store, dump, recipe.site, source_store, parent.manifest if parent else None, say)
    dump_files = find_dump_files(dump)
    urls = dump_files.urls
    format_by_url = {url: detect_format(url) for url in urls}
    if recipe.chunk.structures and not any(_supports_structures(format_name) for format_name in format_by_url.values()):
        raise UsageError(
            f"{dump} has no pages of a wiki, so no {' or '.join(recipe.chunk.structures)} can be found in it: "
            "leave out --structures, or structures of the recipe"
        )
    if limit is not None or all(can_plan_fast(name, url) for url, name in format_by_url.items()):
        # this plan is cheap, because it needs only the offset index, or the first pages
        return _plan_into_store(store, dump, recipe, limit, boundaries, {}, mirror)
    inputs = {
        # Plain XML is not copied into the store, because workers can seek in it.
        "files": [[url, digest_chunks(read_bytes(url))] for url in urls],
        "store": store.url,  # a plan names its slices by URL, which change if the store moves
        "part_bytes": recipe.part_bytes,
        "code": CODE,
        **get_plugin_identity({*format_by_url.values()}),
        **({"dropped": dict(dump_files.dropped)} if dump_files.dropped else {}),
    }
    record = store.memo.find("plan", store.memo.compute_key(_add_boundaries(inputs, boundaries)))
    if record is not None:
        return Plan.from_json(record.stats)
    staged_files: dict[str, BlobRef] = {}
    plan_json: Mapping[str, Any] = _plan_into_store(store, dump, recipe, None, boundaries, staged_files).to_json()
    # A later build of the same dump gets these boundaries from its parent, and so finds this plan.
    own_boundaries = _get_boundaries(Plan.from_json(plan_json))
    for plan_boundaries in (boundaries, own_boundaries):
        plan_inputs = _add_boundaries(inputs, plan_boundaries)
        plan_json = store.memo.write_record(
            "plan", store.memo.compute_key(plan_inputs), staged_files, plan_json, plan_inputs
        ).stats
    return Plan.from_json(plan_json)


def describe_missing_wikidata(dump: str, plan: Plan, recipe: Recipe) -> str:
    """Return advice if the recipe asks for Wikidata items and the files of the export have none;
    otherwise an empty string.
    """
    is_export = plan.kind == "wiki" and {part.format for part in plan.parts} == {""}
    if "wikidata" not in recipe.chunk.metadata or not is_export or find_dump_properties(dump):
        return ""
    return (
        "The passages have no Wikidata items: put NAME-DATE-page_props.sql.gz of the same dump beside its files "
        "NAME-DATE-pages-articles…"
    )


def describe_missing_prose(plan: Plan, recipe: Recipe) -> str:
    """Return advice if the wikitext of a project has little prose; otherwise an empty string.

    The rendered HTML of such a project has the text that its readers see.
    """
    formats = {part.format for part in plan.parts}
    is_wikitext = formats == {""} or (formats == {SITE} and recipe.site.text == "wikitext")
    project_name = next((name for name in _UNRENDERED_PROJECTS if plan.siteinfo.dbname.endswith(name)), "")
    if not (project_name and is_wikitext and plan.kind == "wiki"):
        return ""
    return (
        f"{plan.siteinfo.dbname} is a {project_name.capitalize()}, whose {_UNRENDERED_PROJECTS[project_name]}, "
        "so its wikitext gives little text: use its HTML dump of Wikimedia Enterprise, or the "
        "address of the wiki with --text html"
    )


def _supports_structures(format_name: str) -> bool:
    """Return whether a format's pages have structures; a format of passages has none."""
    return bool(getattr(get_format(format_name), "extracts_structures", False))


def plan_dry_run(dump: str, recipe: Recipe, limit: int | None = None) -> tuple[Plan, int]:
    """Return the parts of a dump and the number of bytes that a build would read from it.

    Nothing is written to a store. As in a build, two documents with the same id are refused.

    Raises:
        InputError: for the same reasons as `plan_parts`, or two records have the same id.
        UsageError: for the same reasons as `plan_parts`.
    """
    if is_wiki_site(dump):
        from rag_model.corpus.dump_formats.wiki_site import plan_site_dry_run  # noqa: PLC0415 - imports httpx

        return plan_site_dry_run(dump, recipe.site, recipe.part_bytes)
    urls = find_dump_files(dump).urls
    with temporary_folder("dry-run") as folder:
        plan = plan_parts(Store.open(str(folder), create=True), dump, recipe, limit)
        if plan.kind != "wiki":
            for part in plan.parts:
                for _ in get_part_format(part).read(part):
                    pass
    length_by_slice = {
        (part_slice.url, part_slice.offset): part_slice.length for part in plan.parts for part_slice in part.slices
    }
    if {url for url, _ in length_by_slice} <= {*urls}:
        return plan, sum(length_by_slice.values())
    # the slices are in recompressed copies, so the bytes of the dump's own files are counted
    return plan, sum(map(get_size, urls))


def plan_indexes(
    recipes: Mapping[str, IndexRecipe],
    chunk_results: Sequence[ChunkResult],
    dimensions: Mapping[str, int],
    memory_bytes: int | None,
    parent: Parent | None = None,
) -> dict[str, IndexPlan]:
    """Return the plan of each index recipe for the chunked passages.

    `dimensions` maps a representation to the dimension of its vectors; `memory_bytes` is the memory
    of a worker, None if unknown. The parent's number of cells is kept if it still fits the corpus.

    Raises:
        InputError: there are no passages.
        UsageError: a factory string does not fit its representation.
        ResourceError: a build would not fit in memory; the message names a factory that would.
    """
    part_rows = [result.rows for result in chunk_results]
    if not any(part_rows):
        raise InputError(_describe_drops(chunk_results))
    plan_by_index: dict[str, IndexPlan] = {}
    for name, recipe in recipes.items():
        kind, representation = get_kind_for_factory(recipe.factory), representation_of(recipe)
        plan = kind.plan(
            recipe, sum(part_rows), dimensions.get(representation, 0), memory=memory_bytes, part_rows=max(part_rows)
        )
        steady_plan = keep_parent_sizes(recipe, plan, parent or Parent(), name)
        fits_memory = memory_bytes is None or kind.estimate(steady_plan, max(part_rows)).peak_bytes() <= memory_bytes
        plan_by_index[name] = replace(steady_plan if fits_memory else plan, over=representation)
    return plan_by_index


def _describe_drops(chunk_results: Sequence[ChunkResult]) -> str:
    """Return the message for a dump without passages: how many pages were dropped, by reason."""
    drop_counts: Counter[str] = Counter()
    for result in chunk_results:
        drop_counts.update(result.stats.dropped)
    if not drop_counts:
        return "the dump has no passages and no pages: check that it is the right file"
    reasons = ", ".join(
        f"{_DROP_REASONS.get(reason, reason)}: {n_pages:,}" for reason, n_pages in drop_counts.most_common()
    )
    dropped_pages = "its one page was" if drop_counts.total() == 1 else f"all of its {drop_counts.total():,} pages were"
    return f"the dump has no passages, since {dropped_pages} dropped ({reasons}): give a dump that contains articles"


def _add_boundaries(inputs: Mapping[str, Any], boundaries: PartBoundaries | None) -> dict[str, Any]:
    return {**inputs, "fences": asdict(boundaries) if boundaries else None}


def _get_boundaries(plan: Plan) -> PartBoundaries:
    first_pages = tuple(part.first_page for part in plan.parts)
    return PartBoundaries(plan.kind, plan.siteinfo.dbname, first_pages, plan.parts[-1].last_page + 1)


def _plan_into_store(
    store: Store,
    dump: str,
    recipe: Recipe,
    limit: int | None,
    boundaries: PartBoundaries | None,
    staged_files: dict[str, BlobRef],
    mirror: StoredMirror | None = None,
) -> Plan:
    def stage_file(path: Path) -> str:
        blob_ref = store.blobs.put_file(path)
        staged_files[f"{len(staged_files):05d}"] = blob_ref
        return store.blobs.url_of(blob_ref)

    with temporary_folder("plan") as folder:
        return plan_dump(
            dump,
            workdir=folder,
            stage=stage_file,
            limit=limit,
            part_bytes=recipe.part_bytes,
            parent_boundaries=boundaries,
            site=recipe.site,
            mirror=mirror,
        )


def store_encoders(
    store: Store, encoder: str, recipe: Recipe, model_store: Store | None = None, pins: Pins = NO_PINS
) -> dict[str, StoredEncoder]:
    """Put the encoder of each representation into the store; return them by representation,
    `embeddings` first. `pins` holds the commits of hub names that the parent was built with.

    Raises:
        UsageError: a representation of the recipe names no encoder.
        BookwheelError: for the same reasons as `store_encoder`.
    """
    for name, representation in recipe.represent.items():
        if not representation.encoder:
            raise UsageError(f"[represent.{name}] of the recipe names no encoder: add encoder = FOLDER or model:NAME")
    stored_encoders = {EMBEDDINGS: store_encoder(store, encoder, recipe.encode, model_store, pins)}
    for name, representation in recipe.represent.items():
        kind = REPRESENTATION_KINDS[representation.kind or recipe.list_representations()[name]]
        stored_encoders[name] = kind.store_encoder(store, representation.encoder, representation, model_store, pins)
    return stored_encoders


def collect_inputs(
    store: Store, dump: str, encoder: str, recipe: Recipe, limit: int | None, pins: Pins = NO_PINS
) -> Inputs | None:
    """Return all inputs that determine a snapshot and its gate, except the parent.

    Return None if a server does not report when a dump file was written, because changes would go
    unnoticed.

    Raises:
        BookwheelError: a dump, an encoder or a question file cannot be read.
    """
    urls = list(find_dump_files(dump).urls)
    if "wikidata" in recipe.chunk.metadata and (properties_url := find_dump_properties(dump)):
        urls.append(properties_url)
    stamp_by_url = {url: None if is_wiki_site(url) else get_version_tag(url) for url in urls}
    if None in stamp_by_url.values():
        return None
    encoders = store_encoders(store, encoder, recipe, pins=pins)
    chunker = store_chunker(store, recipe.chunk)
    return {
        "dump": stamp_by_url,
        "limit": limit,
        "encoders": {
            name: [
                stored_encoder.space.digest,
                *(blob.id for _, blob in (*stored_encoder.passage, *stored_encoder.question)),
            ]
            for name, stored_encoder in encoders.items()
        },
        "recipe": replace(recipe, chunk=chunker.recipe).content(),
        "retriever": recipe.default_retriever,
        "gate": asdict(recipe.gate),
        "questions": {
            name: digest_questions(read_questions(floor.file)) for name, floor in recipe.gate.questions.items()
        },
        "takedowns": len(store.takedowns.list_records()),
        "code": {"plan": CODE, "chunk": chunk.VERSION, "embed": embed.VERSION},
        "versions": get_versions(*_INPUT_LIBRARIES),
    }


def find_or_build_snapshot(
    store: Store,
    inputs: Inputs | None,
    base_snapshot: str | None,
    build: Callable[[], str | None],
    *,
    always_builds: bool = False,
) -> tuple[str, bool]:
    """Return the snapshot of these inputs with the parent `base_snapshot`, and whether it was built.

    `build` is called if the store has no such snapshot, if the inputs are unknown (None), or if
    `always_builds` is true.

    Raises:
        StoreError: the store cannot be read or written.
    """
    snapshot = None if inputs is None or always_builds else _find_snapshot(store, inputs, base_snapshot)
    if snapshot is not None:
        return snapshot, False
    snapshot = build()
    assert snapshot is not None  # None only after a dry run
    if inputs is not None:
        # A rerun has the same parent, or this snapshot as its parent.
        for parent in (base_snapshot, snapshot):
            parent_inputs = {**inputs, "base": parent}
            key = store.memo.compute_key(parent_inputs)
            store.memo.write_record(_RELEASE_STAGE, key, {}, {"snapshot": snapshot}, parent_inputs)
    return snapshot, True


def _find_snapshot(store: Store, inputs: Inputs, base_snapshot: str | None) -> str | None:
    record = store.memo.find(_RELEASE_STAGE, store.memo.compute_key({**inputs, "base": base_snapshot}))
    if record is None:
        return None
    try:
        return store.snapshots.get(str(record.stats["snapshot"])).id
    except (StoreError, KeyError):
        return None
