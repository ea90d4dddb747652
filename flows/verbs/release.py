"""`bookwheel release`: rebuild, evaluate, and move the ref if the evaluation is accepted."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from flows.command.reading import (
    MaxTokens,
    PromptOptions,
    ReaderOption,
)
from flows.command.reply import Common, PassageEncoderName, Reply, StoreUrl
from flows.outcome import ReleaseOutcome, ReleaseRefusedError
from flows.reindex import DEFAULT_ENCODER
from flows.release import ReleaseTraining
from flows.release import release as release_flow
from flows.stage import run_flow
from rag_model.corpus.dump_formats.dump_format import DUMP_HELP
from rag_model.errors import GateRefusedError, UsageError
from rag_model.evaluation.answers.settings import EvaluationSettings
from rag_model.evaluation.gate import Acceptance
from rag_model.evaluation.measures.measure import AnswerKind, JudgedBy
from rag_model.generate.decoding import DecodingSettings
from rag_model.snapshots.recipe import read_recipe
from rag_model.toml import from_table, read_toml


def release(
    *beam_options: Annotated[str, Parameter(help="Options of Beam and its runner, after `--`.")],
    dump: Annotated[str, Parameter(help=DUMP_HELP)],
    store: StoreUrl,
    questions: Annotated[str, Parameter(help="DPR's CSV, JSONL with `question` and `answers`, KILT's, a BEIR folder.")],
    encoder: PassageEncoderName = DEFAULT_ENCODER,
    recipe: Annotated[Path | None, Parameter(help="A TOML file; omitted settings keep their defaults.")] = None,
    ref: Annotated[str, Parameter(help="The ref to move when the evaluation is accepted.")] = "latest",
    limit: Annotated[int | None, Parameter(help="Read at most this many articles, for a quick test.")] = None,
    model: Annotated[
        str | None,
        Parameter(help="Answer the questions too, with this RAG model of the store, a folder of one, or openai:MODEL."),
    ] = None,
    training: Annotated[
        Path | None,
        Parameter(help="Train a RAG model on the new snapshot: TOML with kind, train, dev, name and [recipe.TABLE]s."),
    ] = None,
    retriever: Annotated[
        str | None, Parameter(help="How to find passages, as `evaluate` takes it; by default the snapshot's own.")
    ] = None,
    k: Annotated[
        int | None, Parameter(alias="-k", help="Passages to measure, by default 20; with a model, to answer from.")
    ] = None,
    judge: Annotated[JudgedBy | None, Parameter(help="How relevance is judged, as for `evaluate`.")] = None,
    answers: Annotated[AnswerKind, Parameter(help="The kind of the answers, as for `evaluate`.")] = "spans",
    max_tokens: MaxTokens = None,
    reader: ReaderOption = None,
    prompt_options: PromptOptions | None = None,
    floor: Annotated[
        tuple[str, ...], Parameter(negative="", help="Refuse below: `--floor Success@20=0.6`; repeat it for more.")
    ] = (),
    tolerance: Annotated[
        float | None,
        Parameter(
            help="Refuse if more than this share may be lost against the present version; negative: do not compare."
        ),
    ] = 0.02,
    measure: Annotated[
        tuple[str, ...],
        Parameter(negative="", help="Compare this measure; repeat it for more. By default Success@20, nDCG@10 or EM."),
    ] = (),
    common: Common | None = None,
) -> Reply:
    """Rebuild, evaluate, and move the ref if the evaluation is accepted; exit 3 if it is not.

    The new snapshot is named REF-candidate until then. It is accepted if its metrics reach the
    floors, and if the interval of the difference to the present version, paired by question, stays
    above minus the tolerance. Steps whose inputs are unchanged are skipped. An interrupted run
    continues when the same command is run again.
    """
    if beam_options and not beam_options[0].startswith("-"):
        raise UsageError(f"release takes no argument {beam_options[0]!r}: a dump is given as --dump {beam_options[0]}")
    tables = None if training is None else from_table(ReleaseTraining, read_toml(training), str(training))
    has_model = model is not None or tables is not None
    depth = {"k": k} if has_model else {"depth": 20 if k is None else k}
    model_options = {
        "--max-tokens": max_tokens,
        "--reader": reader,
    }
    prompt_options = prompt_options or PromptOptions()
    given_options = [name for name, value in model_options.items() if value is not None] + prompt_options.list_given()
    if given_options and not has_model:
        raise UsageError(f"{given_options[0]} only applies to a model: add --model or --training")
    readers = () if reader is None else (reader,)
    concat = prompt_options.build_settings(readers, model or "")
    settings = EvaluationSettings(
        kind=answers,
        judged_by=judge,
        retriever=retriever,
        readers=readers,
        concat=concat,
        decoding=DecodingSettings(max_new_tokens=max_tokens),
        **depth,
    )
    acceptance = Acceptance(_parse_floors(floor), None if tolerance is None or tolerance < 0 else tolerance, measure)
    arguments = dump, store, questions, encoder, read_recipe(recipe), ref, limit, model, tables, settings, acceptance
    try:
        outcome = run_flow(release_flow, *arguments, beam_options)
    except ReleaseRefusedError as error:
        return Reply(error.outcome.to_json(), "\n".join(_iter_lines(error.outcome)), str(error))
    except GateRefusedError as error:
        document = {"ref": ref, "number": None, "reindexed": error.outcome.to_json()}
        return Reply(document, f"release    {ref} did not move", str(error))
    return Reply(outcome.to_json(), "\n".join(_iter_lines(outcome)))


def _parse_floors(options: Sequence[str]) -> Mapping[str, float]:
    floors = {}
    for option in options:
        name, _, value = option.partition("=")
        try:
            floors[name] = float(value)
        except ValueError:
            raise UsageError(f"--floor {option!r} is not MEASURE=VALUE: give one such as Success@20=0.6") from None
    return floors


def _iter_lines(outcome: ReleaseOutcome) -> Iterator[str]:
    steps = ", ".join(f"{step} {'done' if is_done else 'as before'}" for step, is_done in outcome.done.items())
    yield f"steps      {steps}"
    yield f"snapshot   {outcome.snapshot}"
    if outcome.model:
        yield f"model      {outcome.model}"
    yield f"evaluation {outcome.evaluation}"
    yield from (f"figure     {name}: {value}" for name, value in outcome.figures.items())
    for check in outcome.gate["checks"]:
        yield f"check      {check['name']}: {check['observed']}, wanted {check['wanted']}"
    if outcome.number is None:
        yield f"release    {outcome.ref} did not move"
    elif outcome.is_unchanged:
        yield f"release    nothing is new: {outcome.ref}@{outcome.number} names this snapshot already"
    else:
        yield f"release    {outcome.ref}@{outcome.number}"
