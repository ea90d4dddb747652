"""`bookwheel show` and `diff`: describe a version or an unfinished training; compare versions."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

from cyclopts import Parameter

from flows.command.reply import Common, Reply, StoreUrl, format_index_metrics, format_settings, format_value
from rag_model.encoders.files import ENDPOINT_PREFIX
from rag_model.errors import NotFoundError, UsageError, format_count
from rag_model.evaluation.records import EvaluationComparison, MeasureComparison, compare_evaluations
from rag_model.snapshots.encoding import COMMITS
from rag_model.snapshots.recipe import format_recipe
from rag_model.store.diff import CHANGES, SnapshotDiff, diff_snapshots
from rag_model.store.store import EVALUATION_PREFIX, TRAINING_PREFIX, Store
from rag_model.store.versions.evaluation_manifest import EvaluationManifest, EvaluationSubject, MetricValue
from rag_model.store.versions.evaluations import list_evaluations
from rag_model.store.versions.manifest import EMBEDDINGS, Content, Manifest
from rag_model.store.versions.model_manifest import ModelManifest
from rag_model.store.versions.snapshot import Snapshot
from rag_model.store.versions.trainings import StoredCheckpoint

# units of values in an index's entry of the manifest, by key
_UNIT_BY_KEY = {"n": "passages", "d": "dimensions", "row_bytes": "bytes a row"}


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
    checkpoint_fields = {name: value for name, value in checkpoint.to_json().items() if name not in ("format", "files")}
    return {"training": key, **checkpoint_fields, "bytes": checkpoint.bytes}


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
    unfinished_trainings = [
        (key, checkpoint)
        for key, checkpoint in opened_store.trainings.iter_newest()
        if checkpoint.progress.snapshot == manifest.id
    ]
    return _build_version_reply(
        manifest,
        lines,
        list_evaluations(opened_store, manifest.id),
        unfinished_trainings,
        catalog.describe_signature(name),
    )


def _build_version_reply(
    manifest: Manifest | ModelManifest,
    lines: Iterable[str],
    evaluations: Sequence[EvaluationManifest],
    unfinished_trainings: Sequence[tuple[str, StoredCheckpoint]],
    signature: str,
) -> Reply:
    """Build the reply for a version with its evaluations, unfinished trainings and signature."""
    document = manifest.to_json() | {
        "evaluations": [summarize_evaluation(evaluation) for evaluation in evaluations],
        "signed": signature,
    }
    document["trainings"] = [summarize_training(key, checkpoint) for key, checkpoint in unfinished_trainings]
    further_lines = [f"evaluated {format_evaluation_line(evaluation)}" for evaluation in evaluations] + [
        f"training  {format_training_line(key, checkpoint)}" for key, checkpoint in unfinished_trainings
    ]
    return Reply(document, "\n".join([*lines, *further_lines, f"signature {signature}"]))


def _format_snapshot(manifest: Manifest) -> list[str]:
    content, provenance = manifest.content, manifest.provenance
    n_bytes = sum({ref.id: ref.size for ref in content.files.values()}.values())
    return [
        f"snapshot  {manifest.id}",
        f"corpus    {content.corpus.get('dbname') or content.corpus.get('kind')}, "
        f"newest revision {content.corpus.get('newest_revision') or 'unknown'}",
        f"passages  {content.n:,} in {format_count(len(content.parts), 'part')}, "
        f"{format_count(len(content.files), 'file')}, {n_bytes / 1e6:,.1f} MB",
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
            f"made of   {derivation['of'][:12]}: {change_name} {', '.join(derivation[key])}"
            for change_name, key, derivation in _iter_derivations(provenance)
        ),
        *(f"note      {note}" for note in provenance.get("notes", ())),
        *(f"recipe    {line}" for line in _iter_recipe_lines(content.recipe)),
    ]


def _get_recipe(manifest: Manifest | ModelManifest) -> dict[str, Any]:
    """Return the settings that rebuild a version, in the form of a recipe."""
    if isinstance(manifest, ModelManifest):
        return dict(manifest.content.lineage.get("recipe") or {})
    content = manifest.content
    return ({"retriever": content.retriever} if content.retriever else {}) | dict(content.recipe)


def _get_space_name(content: Content, representation: str) -> str:
    return str((content.space_of(representation) or {}).get("name", "none"))


def _format_model(manifest: ModelManifest) -> list[str]:
    content = manifest.content
    n_bytes = sum({ref.id: ref.size for ref in content.files.values()}.values())
    return [
        f"model     {manifest.id}",
        f"kind      {content.kind}",
        f"files     {len(content.files)}, {n_bytes / 1e6:,.1f} MB",
        f"asks      {content.space['name'] if content.space else 'nothing'}",
        *(f"{name:<9} {_format_setting(setting)}" for name, setting in content.lineage.items()),
        *(f"metrics   {name}: {_format_setting(metric_values)}" for name, metric_values in manifest.metrics.items()),
        f"trained   {manifest.provenance.get('created_at', 'unknown')}",
    ]


def format_index(entry: Mapping[str, Any]) -> str:
    """Format the settings of an index, except the trained file, which only later builds read."""
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
        for key, recipe_table in tables.items():
            if line := format_settings(recipe_table):
                yield f"[{name}{key}] {line}"


def _iter_derivations(provenance: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield each change of a derived snapshot: its description, and the key of a list in its
    provenance entry, and this entry.
    """
    for key, change, list_key in (("takedown", "without pages", "pages"), ("indexed", "with indexes", "indexes")):
        if key in provenance:
            yield change, list_key, provenance[key]


def _format_setting(setting: Any) -> str:
    return format_settings(setting) if isinstance(setting, Mapping) else format_value(setting)


def build_evaluation_reply(manifest: EvaluationManifest, signature: str) -> Reply:
    """Build the reply that shows one evaluation and its signature."""
    return Reply(
        manifest.to_json() | {"signed": signature},
        "\n".join([*_iter_evaluation_lines(manifest), f"signature {signature}"]),
    )


def summarize_evaluation(manifest: EvaluationManifest) -> dict[str, Any]:
    """Return the summary of an evaluation in a list, as JSON values."""
    subject = manifest.content.subject
    summary = {"id": manifest.id, "snapshot": subject.snapshot, "model": subject.model or None}
    summary |= {"model_name": _format_model_label(subject) or None}
    provenance = {name: manifest.provenance.get(name) for name in ("questions", "n", "created_at")}
    metrics_by_retriever = {
        name: {metric_name: metric.value for metric_name, metric in metrics.items()}
        for name, metrics in _get_metrics(manifest).items()
    }
    return {**summary, **provenance, "figures": metrics_by_retriever}


def format_evaluation_line(manifest: EvaluationManifest) -> str:
    """Format an evaluation in one line: id, model, questions, and the metrics of each retriever."""
    subject, provenance = manifest.content.subject, manifest.provenance
    answer_source = f"model {_format_model_label(subject)}" if subject.model else "retrieval"
    metrics_text = "; ".join(
        f"{retriever}: {_format_metrics(metrics)}" for retriever, metrics in _get_metrics(manifest).items()
    )
    questions_text = f"{provenance.get('n')} questions of {provenance.get('questions')}"
    return f"{manifest.id[:12]}: {answer_source}, {questions_text}, {metrics_text}"


def build_comparison_reply(comparison: EvaluationComparison) -> Reply:
    """Build the reply that compares two evaluations."""
    document = {
        "before": summarize_evaluation(comparison.before),
        "after": summarize_evaluation(comparison.after),
        "retrievers": {
            name: {label: asdict(pair) for label, pair in pairs.items()} for name, pairs in comparison.pairs.items()
        },
        "settings": {name: list(values) for name, values in _find_changed_settings(comparison).items()},
    }
    return Reply(document, "\n".join(_iter_comparison_lines(comparison)))


def _iter_comparison_lines(comparison: EvaluationComparison) -> Iterator[str]:
    yield f"from      {format_evaluation_line(comparison.before)}"
    yield f"to        {format_evaluation_line(comparison.after)}"
    yield from (
        f"setting   {name}: {format_value(old_value)} -> {format_value(new_value)}"
        for name, (old_value, new_value) in _find_changed_settings(comparison).items()
    )
    has_same_questions = comparison.before.content.subject.questions == comparison.after.content.subject.questions
    for retriever, comparisons in comparison.pairs.items():
        yield f"retriever {retriever}"
        for name, pair in comparisons.items():
            if not pair.n:
                sample_text = ", of the whole set, without an interval"
            elif has_same_questions:
                sample_text = f" over {pair.n:,} questions"
            else:
                sample_text = f" over the {pair.n:,} questions of both; the two values are over all questions of each"
            values_text = f"{pair.before.value:.3f} -> {pair.after.value:.3f}"
            yield f"figure    {name:<12} {values_text}: {_format_difference(pair)}{sample_text}"


def _find_changed_settings(comparison: EvaluationComparison) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which the subjects of two evaluations differ, by name."""
    old_settings, new_settings = (
        {**manifest.content.subject.to_json(), **manifest.content.subject.settings}
        for manifest in (comparison.before, comparison.after)
    )
    changed_names = [
        name
        for name in {**old_settings, **new_settings}
        if name != "settings" and old_settings.get(name) != new_settings.get(name)
    ]
    return {name: (old_settings.get(name), new_settings.get(name)) for name in changed_names}


def _format_difference(measure_pair: MeasureComparison) -> str:
    difference = measure_pair.difference
    interval_text = (
        ""
        if difference.low is None or difference.high is None
        else f" [{difference.low:+z.3f}, {difference.high:+z.3f}]"
    )
    return f"{difference.value:+z.3f}{interval_text}"


def _iter_evaluation_lines(manifest: EvaluationManifest) -> Iterator[str]:
    content, provenance = manifest.content, manifest.provenance
    subject = content.subject
    yield f"evaluation {manifest.id}"
    yield f"snapshot  {subject.snapshot}"
    model_label = f"{_format_model_label(subject)} ({subject.model})" if _get_endpoint_model(subject) else subject.model
    yield f"model     {model_label or 'none: retrieval alone'}"
    yield f"questions {provenance.get('n')} of {provenance.get('questions')} ({subject.questions})"
    yield from (
        f"setting   {name}: {format_value(setting)}"
        for name, setting in subject.settings.items()
        if setting not in (None, "", {})
    )
    for retriever, metrics in _get_metrics(manifest).items():
        yield f"retriever {retriever}"
        yield from (f"figure    {name:<12} {metric}" for name, metric in metrics.items())
    yield from (f"file      {path}: {ref.size:,} bytes, {ref.path}" for path, ref in sorted(content.files.items()))
    yield f"made      {provenance.get('created_at', 'unknown')}"


def _format_model_label(subject: EvaluationSubject) -> str:
    """Return `openai:MODEL` for a model behind an endpoint, else 12 digits of its id or digest."""
    return _get_endpoint_model(subject) or subject.model.removeprefix("sha256:")[:12]


def _get_endpoint_model(subject: EvaluationSubject) -> str:
    """Return the name of a model behind an endpoint; empty for every other model."""
    endpoint = subject.settings.get("endpoint")
    return f"{ENDPOINT_PREFIX}{endpoint.get('model')}" if isinstance(endpoint, Mapping) else ""


def _get_metrics(manifest: EvaluationManifest) -> Mapping[str, Mapping[str, MetricValue]]:
    return manifest.content.metrics


def _format_metrics(metrics: Mapping[str, MetricValue]) -> str:
    return ", ".join(f"{name} {metric.value:.3f}" for name, metric in metrics.items())


def diff(
    before: str,
    after: str,
    /,
    *,
    store: StoreUrl,
    limit: int = 10,
    common: Common | None = None,
) -> Reply:
    """Compare two snapshots: changed articles, passages and settings, and the bytes of a pull.

    `evaluation:ID` twice compares two evaluations: metrics side by side, and the difference of each
    measure, paired by question, with its 95 % interval.

    Passages are joined by id and hash. The bytes are counted for a pull of the second version into
    a folder with the first.

    Args:
        before: A ref, ref@number, an id, or a unique prefix of one; with `evaluation:` before
            it, that of an evaluation.
        after: The snapshot or evaluation to compare with, named in the same way.
        limit: Number of articles to list for each kind of change.
    """
    opened_store = Store.open(store)
    are_evaluations = {name.startswith(EVALUATION_PREFIX) for name in (before, after)}
    if are_evaluations == {True}:
        return _compare_evaluations(opened_store, before, after)
    if True in are_evaluations:
        raise UsageError(f"an evaluation is compared with another one, not with a snapshot: {before}, {after}")
    snapshot_diff = diff_snapshots(
        Snapshot.from_store(opened_store, before), Snapshot.from_store(opened_store, after), limit
    )
    return Reply(snapshot_diff.to_json(), "\n".join(_format_diff(snapshot_diff)))


def _compare_evaluations(store: Store, before: str, after: str) -> Reply:
    catalog = store.evaluations
    old_evaluation, new_evaluation = (
        catalog.get(catalog.resolve_trusted(name.removeprefix(EVALUATION_PREFIX))) for name in (before, after)
    )
    return build_comparison_reply(compare_evaluations(store, old_evaluation, new_evaluation))


def _format_diff(snapshot_diff: SnapshotDiff) -> Iterator[str]:
    yield f"from      {snapshot_diff.before}"
    yield f"to        {snapshot_diff.after}"
    yield f"articles  {_format_counts(snapshot_diff.articles)}"
    yield f"passages  {_format_counts(snapshot_diff.passages)}"
    for change in CHANGES:
        examples = snapshot_diff.examples[change]
        n_further = snapshot_diff.articles[change] - len(examples)
        if examples:
            titles = ", ".join(article.title or article.page_id for article in examples)
            yield f"{change:<9} {titles}" + (f" and {n_further:,} more" if n_further else "")
    for name, (old_value, new_value) in snapshot_diff.settings.items():
        yield from format_difference(name, old_value, new_value)
    for file_kind, pull in snapshot_diff.pull.items():
        yield f"pull      {file_kind}: {pull.fetched_bytes:,} of {pull.fetched_bytes + pull.reused_bytes:,} bytes"


def _format_counts(change_counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{change_counts[change]:,} {change}" for change in CHANGES)


def format_difference(name: str, old_value: Any, new_value: Any) -> Iterator[str]:
    """Yield the line of a changed setting, or of a changed property of the corpus or an index.

    `name` is its path, such as `indexes.hnsw.n`. Yield nothing for fields of an index that only a
    later build reads.
    """
    section, _, key = name.partition(".")
    if section != "indexes":
        label, text = ("corpus", key) if section == "corpus" else ("setting", name)
        yield f"{label:<9} {text}: {format_value(old_value)} -> {format_value(new_value)}"
        return
    index_name, _, key = key.partition(".")
    if not key:
        change, index_entry = ("removed", old_value) if new_value is None else ("added", new_value)
        yield f"index     {index_name}: {change}, {format_index(index_entry)}"
    elif key in _UNIT_BY_KEY and isinstance(old_value, int) and isinstance(new_value, int):
        yield f"index     {index_name}: {old_value:,} -> {new_value:,} {_UNIT_BY_KEY[key]}"
    elif key.partition(".")[0] != "trained":
        yield f"index     {index_name}: {key} {format_value(old_value)} -> {format_value(new_value)}"
