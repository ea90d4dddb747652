"""`bookwheel release`: rebuild, evaluate, and move the ref if the evaluation is accepted."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

from cyclopts import Parameter

from flows.command.reading import MaxTokens, PromptOptions, ReaderOption
from flows.command.reply import Common, Reply
from flows.outcome import ReleaseOutcome, ReleaseRefusedError
from flows.parameters import derive_command
from flows.release import release as release_flow
from flows.stage import run_flow
from rag_model.errors import GateRefusedError, UsageError
from rag_model.evaluation.answers.settings import EvaluationSettings
from rag_model.evaluation.gate import ReleaseCriteria
from rag_model.evaluation.measures.measure import AnswerKind, JudgedBy
from rag_model.generate.decoding import DecodingSettings


@derive_command(release_flow, excluded=["settings", "acceptance", "rebuild_graphs"])
def release(
    arguments: dict[str, Any],
    *,
    retriever: str | None = None,
    k: Annotated[int | None, Parameter(alias="-k")] = None,
    judge: JudgedBy | None = None,
    answers: AnswerKind = "spans",
    max_tokens: MaxTokens = None,
    reader: ReaderOption = None,
    prompt_options: PromptOptions | None = None,
    floor: tuple[str, ...] = (),
    tolerance: float | None = 0.02,
    measure: tuple[str, ...] = (),
    common: Common | None = None,
) -> Reply:
    """Rebuild, evaluate, and move the ref if the evaluation is accepted; exit 3 if it is not.

    The new snapshot is named REF-candidate until then. The snapshot is accepted if its metrics
    reach the floors, and if the interval of the difference to the present version, paired by
    question, stays above minus the tolerance. Steps whose inputs are unchanged are skipped. An
    interrupted run continues when the same command is run again.

    Args:
        retriever: Retriever expression, as for `evaluate`; by default the snapshot's default
            retriever.
        k: Passages per question: with a model those that it reads, otherwise those that are
            measured, by default 20.
        judge: How relevance is judged, as for `evaluate`.
        answers: The kind of the answers, as for `evaluate`.
        floor: A measure's minimum, below which the release is refused: `--floor Success@20=0.6`;
            repeat it for more.
        tolerance: The largest accepted loss of a compared measure against the current version; a
            negative number switches the comparison off.
        measure: Measure to compare; repeat it for more. By default Success@20, nDCG@10 or EM.
    """
    model = arguments["model"]
    has_model = model is not None or arguments["training"] is not None
    depth_option = {"k": k} if has_model else {"depth": 20 if k is None else k}
    model_options = {"--max-tokens": max_tokens, "--reader": reader}
    prompt_options = prompt_options or PromptOptions()
    given_options = [name for name, value in model_options.items() if value is not None]
    given_options += prompt_options.list_given_options()
    if given_options and not has_model:
        raise UsageError(f"{given_options[0]} only applies to a model: add --model or --training")
    readers = () if reader is None else (reader,)
    concat_settings = prompt_options.build_settings(readers, model or "")
    arguments["settings"] = EvaluationSettings(
        kind=answers,
        judged_by=judge,
        retriever=retriever,
        readers=readers,
        concat=concat_settings,
        decoding=DecodingSettings(max_new_tokens=max_tokens),
        **depth_option,
    )
    max_metric_loss = None if tolerance is None or tolerance < 0 else tolerance
    arguments["acceptance"] = ReleaseCriteria(_parse_floors(floor), max_metric_loss, measure)
    try:
        outcome = run_flow(release_flow, **arguments)
    except ReleaseRefusedError as error:
        return Reply(error.outcome.to_json(), "\n".join(_iter_outcome_lines(error.outcome)), str(error))
    except GateRefusedError as error:
        ref = arguments["ref"]
        document = {"ref": ref, "number": None, "reindexed": asdict(error.outcome)}
        return Reply(document, f"release    {ref} did not move", str(error))
    return Reply(outcome.to_json(), "\n".join(_iter_outcome_lines(outcome)))


def _parse_floors(options: Sequence[str]) -> Mapping[str, float]:
    floor_by_metric = {}
    for option in options:
        name, _, floor_text = option.partition("=")
        try:
            floor_by_metric[name] = float(floor_text)
        except ValueError:
            raise UsageError(f"--floor {option!r} is not MEASURE=VALUE: give one such as Success@20=0.6") from None
    return floor_by_metric


def _iter_outcome_lines(outcome: ReleaseOutcome) -> Iterator[str]:
    steps_text = ", ".join(f"{step} {'done' if is_done else 'as before'}" for step, is_done in outcome.done.items())
    yield f"steps      {steps_text}"
    yield f"snapshot   {outcome.snapshot}"
    if outcome.model:
        yield f"model      {outcome.model}"
    yield f"evaluation {outcome.evaluation}"
    yield from (f"figure     {name}: {figure}" for name, figure in outcome.figures.items())
    for check in outcome.gate["checks"]:
        yield f"check      {check['name']}: {check['observed']}, wanted {check['wanted']}"
    if outcome.number is None:
        yield f"release    {outcome.ref} did not move"
    elif outcome.is_unchanged:
        yield f"release    nothing is new: {outcome.ref}@{outcome.number} names this snapshot already"
    else:
        yield f"release    {outcome.ref}@{outcome.number}"
