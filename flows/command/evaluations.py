"""Format evaluations as text: one line each, one in full, or a comparison of two."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from flows.command.reply import Reply, format_value
from rag_model.encoders.files import ENDPOINT_PREFIX
from rag_model.evaluation.records import EvaluationComparison, MeasureComparison
from rag_model.store.versions.evaluation_manifest import EvaluationManifest, EvaluationSubject, MetricValue


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
    summary |= {"model_name": _model_label(subject) or None}
    provenance = {name: manifest.provenance.get(name) for name in ("questions", "n", "created_at")}
    values = {
        name: {label: metric.value for label, metric in metrics.items()}
        for name, metrics in _get_metrics(manifest).items()
    }
    return {**summary, **provenance, "figures": values}


def format_evaluation_line(manifest: EvaluationManifest) -> str:
    """Format an evaluation in one line: id, model, questions, and the metrics of each retriever."""
    subject, provenance = manifest.content.subject, manifest.provenance
    answered_by = f"model {_model_label(subject)}" if subject.model else "retrieval"
    figures = "; ".join(
        f"{retriever}: {_format_metrics(metrics)}" for retriever, metrics in _get_metrics(manifest).items()
    )
    questions_text = f"{provenance.get('n')} questions of {provenance.get('questions')}"
    return f"{manifest.id[:12]}: {answered_by}, {questions_text}, {figures}"


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
    for retriever, pairs in comparison.pairs.items():
        yield f"retriever {retriever}"
        for name, pair in pairs.items():
            sample_text = f" over {pair.n:,} questions" if pair.n else ", of the whole set, without an interval"
            values_text = f"{pair.before.value:.3f} -> {pair.after.value:.3f}"
            yield f"figure    {name:<12} {values_text}: {_format_difference(pair)}{sample_text}"


def _find_changed_settings(comparison: EvaluationComparison) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which the subjects of two evaluations differ, by name."""
    old_settings, new_settings = (
        {**manifest.content.subject.to_json(), **manifest.content.subject.settings}
        for manifest in (comparison.before, comparison.after)
    )
    names = [
        name
        for name in {**old_settings, **new_settings}
        if name != "settings" and old_settings.get(name) != new_settings.get(name)
    ]
    return {name: (old_settings.get(name), new_settings.get(name)) for name in names}


def _format_difference(pair: MeasureComparison) -> str:
    difference = pair.difference
    interval = (
        "" if difference.low is None or difference.high is None else f" [{difference.low:+.3f}, {difference.high:+.3f}]"
    )
    return f"{difference.value:+.3f}{interval}"


def _iter_evaluation_lines(manifest: EvaluationManifest) -> Iterator[str]:
    content, provenance = manifest.content, manifest.provenance
    subject = content.subject
    yield f"evaluation {manifest.id}"
    yield f"snapshot  {subject.snapshot}"
    model_label = f"{_model_label(subject)} ({subject.model})" if _endpoint_model(subject) else subject.model
    yield f"model     {model_label or 'none: retrieval alone'}"
    yield f"questions {provenance.get('n')} of {provenance.get('questions')} ({subject.questions})"
    yield from (
        f"setting   {name}: {format_value(value)}"
        for name, value in subject.settings.items()
        if value not in (None, "", {})
    )
    for retriever, metrics in _get_metrics(manifest).items():
        yield f"retriever {retriever}"
        yield from (f"figure    {name:<12} {metric}" for name, metric in metrics.items())
    yield from (f"file      {path}: {ref.size:,} bytes, {ref.path}" for path, ref in sorted(content.files.items()))
    yield f"made      {provenance.get('created_at', 'unknown')}"


def _model_label(subject: EvaluationSubject) -> str:
    """Return `openai:MODEL` for a model behind an endpoint, else 12 digits of its id or digest."""
    return _endpoint_model(subject) or subject.model.removeprefix("sha256:")[:12]


def _endpoint_model(subject: EvaluationSubject) -> str:
    """Return the name of a model behind an endpoint; empty for every other model."""
    endpoint = subject.settings.get("endpoint")
    return f"{ENDPOINT_PREFIX}{endpoint.get('model')}" if isinstance(endpoint, Mapping) else ""


def _get_metrics(manifest: EvaluationManifest) -> Mapping[str, Mapping[str, MetricValue]]:
    return manifest.content.metrics


def _format_metrics(metrics: Mapping[str, MetricValue]) -> str:
    return ", ".join(f"{name} {metric.value:.3f}" for name, metric in metrics.items())
