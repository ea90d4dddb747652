"""`bookwheel release`: one call of the flow."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from flows.command.reading import BudgetTokens, Cite, OrderName, PromptFile, ReadBy, concat_of
from flows.command.reply import Common, Reply, StoreUrl
from flows.outcome import Released, ReleaseRefusedError
from flows.reindex import DEFAULT_ENCODER
from flows.release import Training
from flows.release import release as release_flow
from flows.stage import run_flow
from rag_model.errors import GateRefusedError, UsageError
from rag_model.evaluation.answers.scores import AnswerKind
from rag_model.evaluation.answers.settings import Evaluation
from rag_model.evaluation.records.acceptance import Acceptance
from rag_model.evaluation.retrieval.judging import JudgedBy
from rag_model.snapshots.recipe import read_recipe
from rag_model.toml import from_table, read_toml


def release(
    *beam_options: Annotated[str, Parameter(help="Options of Beam and its runner, after `--`.")],
    dump: Annotated[str, Parameter(help="Path, URL or glob: a MediaWiki dump, JSONL, Parquet, or psgs_w100.tsv.")],
    store: StoreUrl,
    questions: Annotated[str, Parameter(help="DPR's CSV, JSONL with `question` and `answers`, KILT's, a BEIR folder.")],
    encoder: Annotated[str, Parameter(help="Passage encoder: a folder or a hub name.")] = DEFAULT_ENCODER,
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
    judge: Annotated[JudgedBy | None, Parameter(help="What is relevant, as for `evaluate`.")] = None,
    answers: Annotated[AnswerKind, Parameter(help="What the answers are, as for `evaluate`.")] = "spans",
    reader: ReadBy = None,
    order: OrderName = None,
    budget: BudgetTokens = None,
    prompt: PromptFile = None,
    cite: Cite = False,
    floor: Annotated[
        tuple[str, ...], Parameter(negative="", help="Refuse below: `--floor Success@20=0.6`; again for one more.")
    ] = (),
    tolerance: Annotated[
        float | None,
        Parameter(
            help="Refuse if more than this share may be lost against the present one; a negative number: do not look."
        ),
    ] = 0.02,
    measure: Annotated[
        tuple[str, ...],
        Parameter(negative="", help="Compare this measure; again for one more. By default Success@20, nDCG@10 or EM."),
    ] = (),
    common: Common | None = None,
) -> Reply:
    """Rebuild from a dump, evaluate, and move the ref only if the evaluation is accepted; exit 3 if it is not.

    The new snapshot is named REF-candidate until then. It is accepted if its figures reach the floors, and if the
    interval of the difference to what the ref names now, question by question, stays above minus the tolerance. Steps
    whose inputs are as they were are skipped. An interrupted run goes on when the same command is run again.
    """
    if beam_options and not beam_options[0].startswith("-"):
        raise UsageError(f"release takes no argument {beam_options[0]!r}: a dump is given as --dump {beam_options[0]}")
    tables = None if training is None else from_table(Training, read_toml(training), str(training))
    answering = model is not None or tables is not None
    depth = {"k": k} if answering else {"depth": 20 if k is None else k}
    of_models = {"--reader": reader, "--order": order, "--budget": budget, "--prompt": prompt, "--cite": cite or None}
    if not answering and (named := next((name for name, value in of_models.items() if value is not None), None)):
        raise UsageError(f"{named} says how a model reads: give one with --model or --training")
    readers = () if reader is None else (reader,)
    concat = concat_of(readers, model or "", order, budget, prompt, cite)
    settings = Evaluation(kind=answers, judged_by=judge, retriever=retriever, readers=readers, concat=concat, **depth)
    wanted = Acceptance(_floors(floor), None if tolerance is None or tolerance < 0 else tolerance, measure)
    given = dump, store, questions, encoder, read_recipe(recipe), ref, limit, model, tables, settings, wanted
    try:
        outcome = run_flow(release_flow, *given, beam_options)
    except ReleaseRefusedError as refused:
        return Reply(refused.outcome.to_json(), "\n".join(_lines(refused.outcome)), str(refused))
    except GateRefusedError as refused:
        document = {"ref": ref, "number": None, "reindexed": refused.outcome.to_json()}
        return Reply(document, f"release    {ref} did not move", str(refused))
    return Reply(outcome.to_json(), "\n".join(_lines(outcome)))


def _floors(given: Sequence[str]) -> Mapping[str, float]:
    floors = {}
    for one in given:
        name, _, value = one.partition("=")
        try:
            floors[name] = float(value)
        except ValueError:
            raise UsageError(f"--floor {one!r} is no measure and share: give one such as Success@20=0.6") from None
    return floors


def _lines(outcome: Released) -> Iterator[str]:
    steps = ", ".join(f"{step} {'done' if it else 'as before'}" for step, it in outcome.done.items())
    yield f"steps      {steps}"
    yield f"snapshot   {outcome.snapshot}"
    if outcome.model:
        yield f"model      {outcome.model}"
    yield f"evaluation {outcome.evaluation}"
    yield from (f"figure     {name}: {value}" for name, value in outcome.figures.items())
    for one in outcome.gate["checks"]:
        yield f"check      {one['name']}: {one['observed']}, wanted {one['wanted']}"
    if outcome.number is None:
        yield f"release    {outcome.ref} did not move"
    elif outcome.nothing_new:
        yield f"release    nothing is new: {outcome.ref}@{outcome.number} names this snapshot already"
    else:
        yield f"release    {outcome.ref}@{outcome.number}"
