"""`bookwheel show`: describe one snapshot, one model, one evaluation, or one unfinished training."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

from cyclopts import Parameter

from flows.command.evaluations import briefly, evaluation, line_of
from flows.command.reply import Common, Reply, StoreUrl
from flows.command.trainings import far, told, training
from rag_model.errors import UsageError
from rag_model.snapshots.recipe_text import recipe_text
from rag_model.store.store import TRAINING, Store
from rag_model.store.versions.evaluation_manifest import EvaluationManifest
from rag_model.store.versions.evaluations import evaluations_of
from rag_model.store.versions.manifest import Content, Manifest
from rag_model.store.versions.model_manifest import ModelManifest
from rag_model.store.versions.paths import EMBEDDINGS
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
    opened = Store.open(store)
    if snapshot.startswith(TRAINING):
        if recipe:
            raise UsageError(f"{snapshot} is an unfinished training: leave --recipe-only out")
        return training(opened, snapshot.removeprefix(TRAINING))
    shelf, name = opened.shelf(snapshot)
    manifest = shelf.get(shelf.resolve(name))
    if isinstance(manifest, EvaluationManifest):
        if recipe:
            raise UsageError(f"{snapshot} is an evaluation, which has no recipe: leave --recipe-only out")
        return evaluation(manifest, shelf.signed(name))
    if recipe:
        settings = _recipe(manifest)
        return Reply(settings, recipe_text(settings).rstrip("\n"))
    lines = _model(manifest) if isinstance(manifest, ModelManifest) else _lines(manifest)
    begun = [(key, one) for key, one in opened.trainings.every() if one.reached.snapshot == manifest.id]
    return _beside(manifest, lines, evaluations_of(opened, manifest.id), begun, shelf.signed(name))


def _beside(
    manifest: Manifest | ModelManifest,
    lines: Iterable[str],
    found: Sequence[EvaluationManifest],
    begun: Sequence[tuple[str, StoredCheckpoint]],
    signed: str,
) -> Reply:
    """Return what a version is, with its evaluations, its unfinished trainings and its signature."""
    document = manifest.to_json() | {"evaluations": [briefly(one) for one in found], "signed": signed}
    document["trainings"] = [told(key, one) for key, one in begun]
    beside = [f"evaluated {line_of(one)}" for one in found] + [f"training  {far(key, one)}" for key, one in begun]
    return Reply(document, "\n".join([*lines, *beside, f"signature {signed}"]))


def _lines(manifest: Manifest) -> list[str]:
    content, built = manifest.content, manifest.provenance
    size = sum({ref.id: ref.size for ref in content.files.values()}.values())
    return [
        f"snapshot  {manifest.id}",
        f"corpus    {content.corpus.get('dbname') or content.corpus.get('kind')}, "
        f"newest revision {content.corpus.get('newest_revision') or 'unknown'}",
        f"passages  {content.n:,} in {len(content.parts)} parts, {len(content.files)} files, {size / 1e6:,.1f} MB",
        f"encoder   {content.space['name'] if content.space else 'none'}",
        *(f"encoder   {name}: {_space(content, name)}" for name in content.representations if name != EMBEDDINGS),
        *(f"index     {name}: {_index(index)}" for name, index in content.indexes.items()),
        f"retriever {content.default_retriever}",
        *(f"parent    {parent}" for parent in manifest.parents),
        f"built     {built.get('created_at', 'unknown')} from {built.get('dump', 'unknown')}",
        *(f"made of   {one['of'][:12]}: {made} {', '.join(one[what])}" for made, what, one in _derived(built)),
        *(f"note      {note}" for note in built.get("notes", ())),
        *(f"recipe    [{name}] {_settings(values)}" for name, values in content.recipe.items() if values != {}),
    ]


def _recipe(manifest: Manifest | ModelManifest) -> dict[str, Any]:
    """Return the settings that rebuild a version: the encoders of further representations must be named again."""
    if isinstance(manifest, ModelManifest):
        return dict(manifest.content.lineage.get("recipe") or {})
    content = manifest.content
    return ({"retriever": content.retriever} if content.retriever else {}) | dict(content.recipe)


def _space(content: Content, representation: str) -> str:
    return str((content.space_of(representation) or {}).get("name", "none"))


def _model(manifest: ModelManifest) -> list[str]:
    content = manifest.content
    size = sum({ref.id: ref.size for ref in content.files.values()}.values())
    return [
        f"model     {manifest.id}",
        f"kind      {content.kind}",
        f"files     {len(content.files)}, {size / 1e6:,.1f} MB",
        f"asks      {content.space['name'] if content.space else 'nothing'}",
        *(f"{name:<9} {_settings(value)}" for name, value in content.lineage.items()),
        *(f"metrics   {name}: {_settings(values)}" for name, values in manifest.metrics.items()),
        f"trained   {manifest.provenance.get('created_at', 'unknown')}",
    ]


def _index(entry: Mapping[str, Any]) -> str:
    """Return an index's settings in words, without those that only a later build reads."""
    return _settings({name: value for name, value in entry.items() if name != "trained"})


def _derived(built: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield the changes from the snapshot that this one was made from."""
    for key, made, what in (("takedown", "without pages", "pages"), ("indexed", "with indexes", "indexes")):
        if key in built:
            yield made, what, built[key]


def _settings(values: Any) -> str:
    if not isinstance(values, dict):
        return str(values)
    return ", ".join(f"{key}={value}" for key, value in values.items() if value not in ("", None, {}))
