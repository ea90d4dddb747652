"""Evaluations in words: one in a line, the whole of one, and one beside another."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from flows.command.reply import Reply
from rag_model.evaluation.records.differences import Beside, Pair
from rag_model.reading.writers.writer import ENDPOINT
from rag_model.store.versions.evaluation_manifest import EvaluationManifest, Figure, Subject


def evaluation(manifest: EvaluationManifest, signed: str) -> Reply:
    """Return what an evaluation is."""
    return Reply(manifest.to_json() | {"signed": signed}, "\n".join([*_lines(manifest), f"signature {signed}"]))


def briefly(manifest: EvaluationManifest) -> dict[str, Any]:
    """Return what a list of evaluations tells of one, as JSON values."""
    subject = manifest.content.subject
    told = {"id": manifest.id, "snapshot": subject.snapshot, "model": subject.model or None}
    told |= {"model_name": _model_of(subject) or None}
    made = {name: manifest.provenance.get(name) for name in ("questions", "n", "created_at")}
    values = {name: {label: one.value for label, one in some.items()} for name, some in _figures(manifest).items()}
    return {**told, **made, "figures": values}


def line_of(manifest: EvaluationManifest) -> str:
    """Return an evaluation in one line: the id, the model, the questions, and the figures of each retriever."""
    subject, made = manifest.content.subject, manifest.provenance
    by = f"model {_model_of(subject)}" if subject.model else "retrieval"
    figures = "; ".join(f"{retriever}: {_values(some)}" for retriever, some in _figures(manifest).items())
    return f"{manifest.id[:12]}: {by}, {made.get('n')} questions of {made.get('questions')}, {figures}"


def compared(found: Beside) -> Reply:
    """Return two evaluations side by side."""
    document = {
        "before": briefly(found.before),
        "after": briefly(found.after),
        "retrievers": {name: {label: asdict(one) for label, one in some.items()} for name, some in found.pairs.items()},
        "settings": {name: list(both) for name, both in _changed(found).items()},
    }
    return Reply(document, "\n".join(_compared(found)))


def _compared(found: Beside) -> Iterator[str]:
    yield f"from      {line_of(found.before)}"
    yield f"to        {line_of(found.after)}"
    yield from (f"setting   {name}: {old} -> {new}" for name, (old, new) in _changed(found).items())
    for retriever, some in found.pairs.items():
        yield f"retriever {retriever}"
        for name, pair in some.items():
            ends = f" over {pair.n:,} questions" if pair.n else ", of the whole set, without an interval"
            yield f"figure    {name:<12} {pair.before.value:.3f} -> {pair.after.value:.3f}: {_signed(pair)}{ends}"


def _changed(found: Beside) -> dict[str, tuple[Any, Any]]:
    """Return what differs between the subjects of two evaluations, by name."""
    old, new = (
        {**one.content.subject.to_json(), **one.content.subject.settings} for one in (found.before, found.after)
    )
    names = [name for name in {**old, **new} if name != "settings" and old.get(name) != new.get(name)]
    return {name: (old.get(name), new.get(name)) for name in names}


def _signed(pair: Pair) -> str:
    one = pair.difference
    ends = "" if one.low is None or one.high is None else f" [{one.low:+.3f}, {one.high:+.3f}]"
    return f"{one.value:+.3f}{ends}"


def _lines(manifest: EvaluationManifest) -> Iterator[str]:
    content, made = manifest.content, manifest.provenance
    subject = content.subject
    yield f"evaluation {manifest.id}"
    yield f"snapshot  {subject.snapshot}"
    known = f"{_model_of(subject)} ({subject.model})" if _behind(subject) else subject.model
    yield f"model     {known or 'none: retrieval alone'}"
    yield f"questions {made.get('n')} of {made.get('questions')} ({subject.questions})"
    yield from (f"setting   {name}: {value}" for name, value in subject.settings.items() if value not in (None, "", {}))
    for retriever, some in _figures(manifest).items():
        yield f"retriever {retriever}"
        yield from (f"figure    {name:<12} {figure}" for name, figure in some.items())
    yield from (f"file      {path}: {ref.size:,} bytes, {ref.path}" for path, ref in sorted(content.files.items()))
    yield f"made      {made.get('created_at', 'unknown')}"


def _model_of(subject: Subject) -> str:
    """Return how people know a model: `openai:MODEL` behind an endpoint, else 12 digits of its id or digest."""
    return _behind(subject) or subject.model.removeprefix("sha256:")[:12]


def _behind(subject: Subject) -> str:
    """Return the name of a model behind an endpoint; empty for every other one."""
    endpoint = subject.settings.get("endpoint")
    return f"{ENDPOINT}{endpoint.get('model')}" if isinstance(endpoint, Mapping) else ""


def _figures(manifest: EvaluationManifest) -> Mapping[str, Mapping[str, Figure]]:
    return manifest.content.figures


def _values(some: Mapping[str, Figure]) -> str:
    return ", ".join(f"{name} {one.value:.3f}" for name, one in some.items())
