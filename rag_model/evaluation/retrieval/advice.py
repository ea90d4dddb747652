"""One sentence that says which retriever a corpus wants, or that it needs none."""

from collections.abc import Sequence
from dataclasses import dataclass

from rag_model.evaluation.bootstrap import RESAMPLING, Estimate, Resampling, difference_interval, mean_interval
from rag_model.evaluation.retrieval.staged import Staged, StageFigures
from rag_model.store.versions.snapshot import Snapshot

PROMPT = 100_000  # tokens of passages that a prompt of 128k takes with its question and its answer
_TOKENS = 1.4  # a word of English, by the tokenizers of today's generators
_AS_CHEAP = 1.2  # times the milliseconds: less than that is noise
_MOST_ROWS = 20_000  # passages: of more, no corpus fits


@dataclass(frozen=True, slots=True)
class _Candidate:
    name: str
    milliseconds: float
    values: Sequence[float]
    quality: Estimate


def advice(snapshot: Snapshot, measured: Sequence[Staged], measure: str, resampling: Resampling = RESAMPLING) -> str:
    """Return the sentence: the corpus fits a prompt, else the cheapest retriever that is not below the best.

    Candidates are the retrievers and their stages. One is below the best if the interval of the difference, question by
    question, lies below 0.
    """
    words = prompt_words(snapshot)
    if words is not None:
        return (
            f"the whole corpus has about {words:,} words, {words * _TOKENS:,.0f} tokens, and fits a prompt: answer "
            "from all of it first, and keep a retriever only if that is worse or too slow"
        )
    return wanted(measured, measure, resampling)


def prompt_words(snapshot: Snapshot) -> int | None:
    """Return the number of words of a corpus that fits a prompt; None for a larger one."""
    if snapshot.n > _MOST_ROWS:
        return None
    words = sum(sum(snapshot.columns(part.name, ["n_words"])["n_words"].to_pylist()) for part in snapshot.parts)
    return words if words * _TOKENS <= PROMPT else None


def wanted(measured: Sequence[Staged], measure: str, resampling: Resampling = RESAMPLING) -> str:
    """Return the sentence that names the cheapest retriever whose interval is not below the best.

    Of those that cost up to a fifth more, which another run may turn round, it names the one with the best quality.
    """
    candidates = _candidates(measured, measure, resampling)
    best = max(candidates, key=lambda one: one.quality.value)
    if len(candidates) == 1:
        return f"only {best.name} was measured: give --retriever again to learn which one this corpus wants"
    beside = {one.name: difference_interval(one.values, best.values, resampling) for one in candidates}
    good = [one for one in candidates if beside[one.name].high >= 0]
    cheap = _AS_CHEAP * min(one.milliseconds for one in good)
    chosen = max((one for one in good if one.milliseconds <= cheap), key=lambda one: one.quality.value)
    said = f"this corpus wants {chosen.name}: {measure} {chosen.quality.value:.3f} at {chosen.milliseconds:.3g} ms"
    if chosen.quality.value == best.quality.value:
        cheapest = all(_AS_CHEAP * one.milliseconds >= chosen.milliseconds for one in candidates)
        beyond = "no other is cheaper by a fifth" if cheapest else "every one that is cheaper by a fifth lies below it"
        return f"{said} a question is the best, and {beyond}"
    lost = beside[chosen.name]
    return (
        f"{said} a question; the best, {best.name}, has {best.quality.value:.3f} at {best.milliseconds:.3g} ms, and "
        f"the interval of the difference, {lost.low:+.3f} to {lost.high:+.3f}, does not lie below 0"
    )


def _candidates(measured: Sequence[Staged], measure: str, resampling: Resampling) -> list[_Candidate]:
    named: dict[str, StageFigures] = {one.expression: one.whole for one in measured}
    for staged in measured:
        for stage in staged.stages[:-1]:
            named.setdefault(stage.name, stage)
    return [
        _Candidate(name, one.total_milliseconds, one.values[measure], mean_interval(one.values[measure], resampling))
        for name, one in named.items()
    ]
