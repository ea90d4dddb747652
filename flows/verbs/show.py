"""`bookwheel show`: describe one snapshot, one model, one evaluation, or one unfinished training."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

from cyclopts import Parameter

from flows.command.evaluations import build_evaluation_reply, format_evaluation_line, summarize_evaluation
from flows.command.reply import Common, Reply, StoreUrl
from flows.command.trainings import build_training_reply, format_training_line, summarize_training
from rag_model.errors import UsageError
from rag_model.snapshots.recipe import format_recipe
from rag_model.store.store import TRAINING_PREFIX, Store
from rag_model.store.versions.evaluation_manifest import EvaluationManifest
from rag_model.store.versions.evaluations import list_evaluations
from rag_model.store.versions.manifest import EMBEDDINGS, Content, Manifest
from rag_model.store.versions.model_manifest import ModelManifest
from rag_model.store.versions.trainings import StoredCheckpoint


def show(
    snapshot: Annotated[
        str,
        Parameter(
            help="A ref, ref@number, an id, or a unique prefix of one; with `model:` before it, that of a model; with "
            "`evaluation:`, an id of an evaluation; with `training:`, the key of an unfinished training."
        ),
    ] = "latest",
    /,
    *,
    store: StoreUrl,
    recipe: Annotated[
        bool,
        Parameter(
            name="--recipe-only", negative="", help="Print only the recipe, in the form that reindex --recipe reads."
        ),
    ] = False,
    common: Common | None = None,
) -> Reply:
    """Show the content of a snapshot, its metrics, and the recipe that rebuilds it; `model:NAME` shows a model.

    The evaluations of a snapshot or of a model are listed; `evaluation:ID` shows one, with its figures and files.

    Trainings that were not finished are listed with their snapshot, and `training:KEY` shows one: the same `bookwheel
    finetune` goes on from its checkpoint in the store, on any machine.

    `--recipe-only` prints a file: `bookwheel show v1 --recipe-only > recipe.toml`, then `reindex --recipe recipe.toml`.
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
    unfinished = [(key, checkpoint) for key, checkpoint in opened_store.trainings.iter_newest() if checkpoint.progress.snapshot == manifest.id]
    return _build_version_reply(manifest, lines, list_evaluations(opened_store, manifest.id), unfinished, catalog.describe_signature(name))


def _build_version_reply(
    manifest: Manifest | ModelManifest,
    lines: Iterable[str],
    evaluations: Sequence[EvaluationManifest],
    unfinished: Sequence[tuple[str, StoredCheckpoint]],
    signature: str,
) -> Reply:
    """Return what a version is, with its evaluations, its unfinished trainings and its signature."""
    document = manifest.to_json() | {"evaluations": [summarize_evaluation(one) for one in evaluations], "signed": signature}
    document["trainings"] = [summarize_training(key, one) for key, one in unfinished]
    further_lines = [f"evaluated {format_evaluation_line(one)}" for one in evaluations] + [
        f"training  {format_training_line(key, one)}" for key, one in unfinished
    ]
    return Reply(document, "\n".join([*lines, *further_lines, f"signature {signature}"]))


def _format_snapshot(manifest: Manifest) -> list[str]:
    content, provenance = manifest.content, manifest.provenance
    size = sum({ref.id: ref.size for ref in content.files.values()}.values())
    return [
        f"snapshot  {manifest.id}",
        f"corpus    {content.corpus.get('dbname') or content.corpus.get('kind')}, "
        f"newest revision {content.corpus.get('newest_revision') or 'unknown'}",
        f"passages  {content.n:,} in {len(content.parts)} parts, {len(content.files)} files, {size / 1e6:,.1f} MB",
        f"encoder   {content.space['name'] if content.space else 'none'}",
        *(f"encoder   {name}: {_get_space_name(content, name)}" for name in content.representations if name != EMBEDDINGS),
        *(f"index     {name}: {_format_index(index)}" for name, index in content.indexes.items()),
        f"retriever {content.default_retriever}",
        *(f"parent    {parent}" for parent in manifest.parents),
        f"built     {provenance.get('created_at', 'unknown')} from {provenance.get('dump', 'unknown')}",
        *(f"made of   {derivation['of'][:12]}: {change} {', '.join(derivation[key])}" for change, key, derivation in _iter_derivations(provenance)),
        *(f"note      {note}" for note in provenance.get("notes", ())),
        *(f"recipe    [{name}] {_format_settings(values)}" for name, values in content.recipe.items() if values != {}),
    ]


def _get_recipe(manifest: Manifest | ModelManifest) -> dict[str, Any]:
    """Return the settings that rebuild a version: the encoders of further representations must be named again."""
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
        *(f"{name:<9} {_format_settings(value)}" for name, value in content.lineage.items()),
        *(f"metrics   {name}: {_format_settings(values)}" for name, values in manifest.metrics.items()),
        f"trained   {manifest.provenance.get('created_at', 'unknown')}",
    ]


def _format_index(entry: Mapping[str, Any]) -> str:
    """Return an index's settings in words, without those that only a later build reads."""
    return _format_settings({name: value for name, value in entry.items() if name != "trained"})


def _iter_derivations(provenance: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield the changes from the snapshot that this one was made from."""
    for key, change, list_key in (("takedown", "without pages", "pages"), ("indexed", "with indexes", "indexes")):
        if key in provenance:
            yield change, list_key, provenance[key]


def _format_settings(values: Any) -> str:
    if not isinstance(values, dict):
        return str(values)
    return ", ".join(f"{key}={value}" for key, value in values.items() if value not in ("", None, {}))
