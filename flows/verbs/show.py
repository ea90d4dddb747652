"""`bookwheel show`: describe a snapshot, a model, an evaluation, or an unfinished training."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

from cyclopts import Parameter

from flows.command.evaluations import build_evaluation_reply, format_evaluation_line, summarize_evaluation
from flows.command.reply import Common, Reply, StoreUrl, format_index_metrics, format_settings, format_value
from rag_model.errors import NotFoundError, UsageError, format_count
from rag_model.snapshots.encoding import COMMITS
from rag_model.snapshots.recipe import format_recipe
from rag_model.store.store import TRAINING_PREFIX, Store
from rag_model.store.versions.evaluation_manifest import EvaluationManifest
from rag_model.store.versions.evaluations import list_evaluations
from rag_model.store.versions.manifest import EMBEDDINGS, Content, Manifest
from rag_model.store.versions.model_manifest import ModelManifest
from rag_model.store.versions.trainings import StoredCheckpoint


def build_training_reply(store: Store, prefix: str) -> Reply:
    """Build the reply that shows the progress of an unfinished training and its files in the store.

    Raises:
        NotFoundError: no key, or more than one, begins with `prefix`.
        StoreError: the training's record is damaged.
    """
    key = store.trainings.resolve(prefix)
    checkpoint = store.trainings.find_newest(key)
    if checkpoint is None:
        raise NotFoundError(f"training {key[:12]} in {store.url} has just been finished: look for its model")
    signature = store.trainings.describe_signature(key, checkpoint)
    document = summarize_training(key, checkpoint) | {"files": checkpoint.to_json()["files"], "signed": signature}
    return Reply(document, "\n".join([*_iter_training_lines(key, checkpoint), f"signature {signature}"]))


def summarize_training(key: str, checkpoint: StoredCheckpoint) -> dict[str, Any]:
    """Return an unfinished training as JSON values, without its files."""
    values = {name: value for name, value in checkpoint.to_json().items() if name not in ("format", "files")}
    return {"training": key, **values, "bytes": checkpoint.bytes}


def format_training_line(key: str, checkpoint: StoredCheckpoint) -> str:
    """Format an unfinished training in one line."""
    return f"{key[:12]}: {checkpoint.progress.kind}, {_format_progress(checkpoint)}, {checkpoint.bytes / 1e6:,.1f} MB"


def _format_progress(checkpoint: StoredCheckpoint) -> str:
    stage_text = f" of {checkpoint.progress.stage}" if checkpoint.progress.stage else ""
    progress = checkpoint.progress
    return f"step {progress.step:,} of {progress.steps:,}{stage_text}, at {progress.created_at}"


def _iter_training_lines(key: str, checkpoint: StoredCheckpoint) -> Iterator[str]:
    yield f"training  {key}"
    yield f"kind      {checkpoint.progress.kind}"
    yield f"snapshot  {checkpoint.progress.snapshot}"
    yield f"reached   {_format_progress(checkpoint)}"
    yield f"files     {len(checkpoint.files)}, {checkpoint.bytes / 1e6:,.1f} MB"
    yield "goes on   with the same `bookwheel finetune`, on any machine"


def show(
    snapshot: str = "latest",
    /,
    *,
    store: StoreUrl,
    recipe: Annotated[bool, Parameter(name="--recipe-only")] = False,
    common: Common | None = None,
) -> Reply:
    """Show a snapshot's content, its metrics, and the recipe that rebuilds it.

    `model:NAME` shows a model.

    The evaluations of a snapshot or of a model are listed; `evaluation:ID` shows one, with its
    metrics and files.

    Unfinished trainings are listed with their snapshot, and `training:KEY` shows one. The same
    `bookwheel finetune` continues from its checkpoint in the store, on any machine.

    `--recipe-only` prints a file: `bookwheel show v1 --recipe-only > recipe.toml`, then `reindex
    --recipe recipe.toml`.

    Args:
        snapshot: A ref, ref@number, an id, or a unique prefix of one; with `model:` before it,
            that of a model; with `evaluation:`, an id of an evaluation; with `training:`, the
            key of an unfinished training.
        recipe: Print only the recipe, in the form that reindex --recipe reads.
    """
    opened_store = Store.open(store)
    if snapshot.startswith(TRAINING_PREFIX):
        if recipe:
            raise UsageError(f"{snapshot} is an unfinished training: leave --recipe-only out")
        return build_training_reply(opened_store, snapshot.removeprefix(TRAINING_PREFIX))
    catalog, name = opened_store.find_catalog(snapshot)
    manifest = catalog.get(catalog.resolve(name))
    if isinstance(manifest, EvaluationManifest):
        if recipe:
            raise UsageError(f"{snapshot} is an evaluation, which has no recipe: leave --recipe-only out")
        return build_evaluation_reply(manifest, catalog.describe_signature(name))
    if recipe:
        settings = _get_recipe(manifest)
        return Reply(settings, format_recipe(settings).rstrip("\n"))
    lines = _format_model(manifest) if isinstance(manifest, ModelManifest) else _format_snapshot(manifest)
    unfinished = [
        (key, checkpoint)
        for key, checkpoint in opened_store.trainings.iter_newest()
        if checkpoint.progress.snapshot == manifest.id
    ]
    return _build_version_reply(
        manifest, lines, list_evaluations(opened_store, manifest.id), unfinished, catalog.describe_signature(name)
    )


def _build_version_reply(
    manifest: Manifest | ModelManifest,
    lines: Iterable[str],
    evaluations: Sequence[EvaluationManifest],
    unfinished: Sequence[tuple[str, StoredCheckpoint]],
    signature: str,
) -> Reply:
    """Build the reply for a version with its evaluations, unfinished trainings and signature."""
    document = manifest.to_json() | {
        "evaluations": [summarize_evaluation(evaluation) for evaluation in evaluations],
        "signed": signature,
    }
    document["trainings"] = [summarize_training(key, checkpoint) for key, checkpoint in unfinished]
    further_lines = [f"evaluated {format_evaluation_line(evaluation)}" for evaluation in evaluations] + [
        f"training  {format_training_line(key, checkpoint)}" for key, checkpoint in unfinished
    ]
    return Reply(document, "\n".join([*lines, *further_lines, f"signature {signature}"]))


def _format_snapshot(manifest: Manifest) -> list[str]:
    content, provenance = manifest.content, manifest.provenance
    size = sum({ref.id: ref.size for ref in content.files.values()}.values())
    return [
        f"snapshot  {manifest.id}",
        f"corpus    {content.corpus.get('dbname') or content.corpus.get('kind')}, "
        f"newest revision {content.corpus.get('newest_revision') or 'unknown'}",
        f"passages  {content.n:,} in {format_count(len(content.parts), 'part')}, "
        f"{format_count(len(content.files), 'file')}, {size / 1e6:,.1f} MB",
        f"encoder   {content.space['name'] if content.space else 'none'}",
        *(
            f"encoder   {name}: {_get_space_name(content, name)}"
            for name in content.representations
            if name != EMBEDDINGS
        ),
        *(f"commit    {name}: {hub_name}" for name, hub_name in provenance.get(COMMITS, {}).items()),
        *(f"index     {name}: {format_index(index)}" for name, index in content.indexes.items()),
        *format_index_metrics(manifest.metrics, "measured"),
        f"retriever {content.default_retriever}",
        *(f"parent    {parent}" for parent in manifest.parents),
        f"built     {provenance.get('created_at', 'unknown')} from {provenance.get('dump', 'unknown')}",
        *(
            f"made of   {derivation['of'][:12]}: {change} {', '.join(derivation[key])}"
            for change, key, derivation in _iter_derivations(provenance)
        ),
        *(f"note      {note}" for note in provenance.get("notes", ())),
        *(f"recipe    {line}" for line in _iter_recipe_lines(content.recipe)),
    ]


def _get_recipe(manifest: Manifest | ModelManifest) -> dict[str, Any]:
    """Return the settings that rebuild a version, without encoders of further representations."""
    if isinstance(manifest, ModelManifest):
        return dict(manifest.content.lineage.get("recipe") or {})
    content = manifest.content
    return ({"retriever": content.retriever} if content.retriever else {}) | dict(content.recipe)


def _get_space_name(content: Content, representation: str) -> str:
    return str((content.space_of(representation) or {}).get("name", "none"))


def _format_model(manifest: ModelManifest) -> list[str]:
    content = manifest.content
    size = sum({ref.id: ref.size for ref in content.files.values()}.values())
    return [
        f"model     {manifest.id}",
        f"kind      {content.kind}",
        f"files     {len(content.files)}, {size / 1e6:,.1f} MB",
        f"asks      {content.space['name'] if content.space else 'nothing'}",
        *(f"{name:<9} {_format_setting(value)}" for name, value in content.lineage.items()),
        *(f"metrics   {name}: {_format_setting(values)}" for name, values in manifest.metrics.items()),
        f"trained   {manifest.provenance.get('created_at', 'unknown')}",
    ]


def format_index(entry: Mapping[str, Any]) -> str:
    """Format an index's settings, without those that only a later build reads."""
    return format_settings({name: value for name, value in entry.items() if name != "trained"})


def _iter_recipe_lines(recipe: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line for each table of a recipe with settings, such as `[index.hnsw]`."""
    for name, values in recipe.items():
        tables = {"": values} if isinstance(values, Mapping) else {}
        if tables:
            subtables = {key: value for key, value in values.items() if isinstance(value, Mapping)}
            tables = {"": {key: value for key, value in values.items() if key not in subtables}}
            tables |= {f".{key}": value for key, value in subtables.items()}
        elif values is not None:
            yield f"{name}={format_value(values)}"
        for key, table in tables.items():
            if line := format_settings(table):
                yield f"[{name}{key}] {line}"


def _iter_derivations(provenance: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield the changes to the snapshot that this one was derived from."""
    for key, change, list_key in (("takedown", "without pages", "pages"), ("indexed", "with indexes", "indexes")):
        if key in provenance:
            yield change, list_key, provenance[key]


def _format_setting(value: Any) -> str:
    return format_settings(value) if isinstance(value, Mapping) else format_value(value)
