"""`bookwheel evaluate`: measure retrieval and, with a model, its answers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, get_args

from cyclopts import Parameter

from flows.artifacts import format_paired_difference
from flows.command.reading import AbstainBelow, MaxTokens, PromptOptions, RouteSource, load_route
from flows.command.reply import AsksName, Common, EncoderName, Reply, SnapshotName, StoreUrl, keep_as_one_value
from flows.outcome import CollapseRefusedError, CompareOutcome, EvaluateOutcome
from flows.stage import run_flow
from rag_model.errors import UsageError, format_count
from rag_model.evaluation.answers.ablation import OPEN_BOOK, AblationSettings
from rag_model.evaluation.answers.settings import EvaluationSettings
from rag_model.evaluation.measures.measure import AnswerKind, JudgedBy
from rag_model.evaluation.reports.page import format_bytes
from rag_model.evaluation.reports.run_files import check_paths
from rag_model.evaluation.retrieval.staged import ENCODER
from rag_model.generate.decoding import DecodingSettings
from rag_model.reading.confidence import Threshold
from rag_model.reading.reader import ReaderName
from rag_model.reading.routing import Route
from rag_model.retrieve.expression import choose_expressions

_DEFAULT_RISK = 0.2  # maximum share of wrong answers among those given
_DEFAULT_DEPTH = 20  # number of passages at which retrieval is measured


def evaluate(
    *,
    store: StoreUrl,
    questions: str,
    ref: SnapshotName = "latest",
    retriever: Annotated[tuple[str, ...], Parameter(env_var_split=keep_as_one_value)] = (),
    index: tuple[str, ...] = (),
    k: Annotated[int | None, Parameter(alias="-k")] = None,
    encoder: EncoderName = None,
    judge: JudgedBy | None = None,
    model: str | None = None,
    reader: tuple[ReaderName, ...] = (),
    prompt_options: PromptOptions | None = None,
    answers: AnswerKind = "spans",
    label: tuple[str, ...] = (),
    asks: AsksName = None,
    beams: int = 1,
    max_tokens: MaxTokens = None,
    ablations: bool = False,
    abstain: Path | None = None,
    risk: float | None = None,
    abstain_below: AbstainBelow = None,
    route: RouteSource = None,
    choose_route: Path | None = None,
    report: Path | None = None,
    kilt: Path | None = None,
    trec: Path | None = None,
    dpr: Path | None = None,
    rows: Path | None = None,
    common: Common | None = None,
) -> Reply:
    """Search every question of a set; report Success@k by DPR's token match, or other measures.

    Several retrievers search the same questions. Each of their stages is measured with its
    milliseconds and bytes, and the reply recommends one in a sentence. Files that they write are
    numbered: run.1-hnsw.trec. Questions with a `source` are also reported by source. Questions that
    name their passages are also reported for those that share few words with their passage.

    With a model the reply also has measures of its answers, such as exact match and F1. Answers are
    kept in the store, so that the same questions to the same snapshot and model are not answered
    twice.

    The result is recorded in the store as an evaluation, once for the same snapshot, model,
    questions and settings: `show` lists it, `diff` compares it. If the store cannot be written
    nothing is recorded, and the reply says so.

    Args:
        questions: DPR's CSV, JSONL with `question` and `answers`, KILT's JSONL, or a BEIR folder.
        retriever: Retriever expression: an index, rrf(A, B, k=60, weights=[1, 1]) or rerank(A,
            MODEL, 50); A:100 retrieves 100 from A. Repeat the option to compare others with the
            first. By default the snapshot's own.
        index: An index of the snapshot, or `exact`; the short form of --retriever. Repeat the
            option for further indexes.
        k: Passages per question. The default is 20, or all of a smaller corpus; with --model it
            is the number of the model's training.
        judge: How relevance is judged: by `answers` that a passage contains, or by `pages` or
            `passages` that the questions name. By default pages for a BEIR folder, passages if
            every question names one, else answers.
        model: Answer the questions too, with this RAG model of the store, or folder of one;
            with --reader concat also a folder of a generator alone, or openai:MODEL.
        reader: With --model: how passages are read, as in `answer`. Repeat the option to compare
            others with the first on the same passages.
        answers: The kind of the answers: `spans`, `patterns` (CuratedTREC), `labels` (FEVER),
            `texts`, or `clues` (Jeopardy: the question is an entity, the answer a clue that
            asks for it).
        label: With --answers labels: a label and the word of one token that stands for it, such
            as SUPPORTS=true; repeat it for each label. The likeliest label is the answer, and
            no text is generated.
        beams: With --model: beams of the search for an answer; 1 means greedy decoding.
        ablations: With --model: also measure closed book, the gold passage, shuffled passages,
            several k, the hits of BM25 and of the snapshot's own encoder (`frozen retriever`), and
            all passages if they fit into one prompt; and report whether retrieval is worth its cost.
        abstain: With --model: choose on these questions the score below which the model gives no
            answer, so that --risk is not exceeded, and write it to this file.
        risk: With --abstain: maximum share of wrong answers among those given; by default 0.2.
        choose_route: With --reader auto: choose on these questions the score at and above which
            the weights answer instead of passages, and write the route to this file.
        report: Write an HTML report to this file.
        kilt: With --model: write KILT's prediction file to this file.
        trec: Write a TREC run to this file.
        dpr: Write DPR's retrieval JSON to this file.
        rows: Write one JSON line per question to this file.
    """
    retrievers, prompt_options = choose_expressions(index, retriever), prompt_options or PromptOptions()
    if model is None:
        model_options: dict[str, Any] = {"--ablations": ablations, "--kilt": kilt, "--asks": asks, "--reader": reader}
        model_options |= {"--label": label, "--abstain": abstain, "--risk": risk, "--abstain-below": abstain_below}
        model_options |= {"--route": route, "--choose-route": choose_route, "--max-tokens": max_tokens is not None}
        model_options |= dict.fromkeys(prompt_options.list_given_options(), True)
        _refuse_options(model_options, "needs a model: give one with --model")
        from flows.compare import RunFiles, compare  # noqa: PLC0415 - `--help` does not need it

        run_files = RunFiles(*map(_to_text, (trec, dpr, rows)))
        compare_arguments = k, judge, answers == "patterns", encoder, _to_text(report), run_files
        comparison = run_flow(compare, store, questions, retrievers, ref, *compare_arguments)
        return Reply(comparison.to_json(), format_comparison(comparison))
    option_advice = "only applies to retrieval without a model: leave it out, or leave out --model"
    _refuse_options({"--question-encoder": encoder, "--trec": trec, "--dpr": dpr}, option_advice)
    if len(retrievers) > 1:
        raise UsageError(
            f"a model answers from one retriever, and {len(retrievers)} are given: give one, or leave out --model"
        )
    concat_settings = prompt_options.build_settings(reader, model)
    if risk is not None and abstain is None:
        raise UsageError("--risk needs --abstain, which chooses the threshold: give --abstain too")
    from flows.evaluate import evaluate as evaluate_flow  # noqa: PLC0415 - as above

    settings = EvaluationSettings(
        kind=answers,
        k=k,
        depth=max(_DEFAULT_DEPTH, k or 0),
        judged_by=judge,
        retriever=retrievers[0] if retrievers else None,
        readers=reader,
        concat=concat_settings,
        ablations=AblationSettings() if ablations else None,
        labels=_parse_labels(label),
        risk=None if abstain is None else _DEFAULT_RISK if risk is None else risk,
        threshold=None if abstain_below is None else Threshold.parse(abstain_below),
        route=load_route(route, reader, store, is_chosen_later=choose_route is not None),
        choose_route=choose_route is not None,
        decoding=DecodingSettings(beams, max_tokens),
    )
    check_paths(*map(_to_text, (abstain, choose_route)), questions=questions)
    files = {"rows": _to_text(rows), "kilt": _to_text(kilt), "report": _to_text(report)}
    try:
        outcome, refusal = run_flow(evaluate_flow, store, model, questions, ref, settings, **files, asks=asks), ""
    except CollapseRefusedError as error:
        outcome, refusal = error.outcome, str(error)
    if abstain is not None:
        refusal = _write_threshold(outcome, abstain) or refusal
    if choose_route is not None and outcome.routing is not None:
        _write_route(outcome, choose_route)
    return Reply({**asdict(outcome), "index": outcome.retriever}, _format_outcome(outcome), refusal)


def _to_text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _parse_labels(options: Sequence[str]) -> dict[str, str]:
    label_pairs = [option.partition("=") for option in options]
    if invalid_option := next(
        (option for option, parts in zip(options, label_pairs, strict=True) if not parts[0] or not parts[2]), None
    ):
        raise UsageError(f"--label {invalid_option!r} is not LABEL=WORD: give one such as SUPPORTS=true")
    return {label.strip(): word.strip() for label, _, word in label_pairs}


def _refuse_options(options: dict[str, Any], advice: str) -> None:
    for name, option_value in options.items():
        if option_value:
            raise UsageError(f"{name} {advice}")


def _write_threshold(outcome: EvaluateOutcome, path: Path) -> str:
    """Write the chosen threshold; return the reason in one sentence if none was chosen."""
    abstention = outcome.abstaining or {}
    if abstention.get("threshold") is None:
        reason = f"{outcome.abstained[:1].lower()}{outcome.abstained[1:]}"
        return f"{reason}, so {path} is not written: give a larger --risk"
    provenance = {"model": outcome.model, **_describe_choice(outcome)}
    statistics = {name: value for name, value in abstention.items() if name != "threshold"}
    Threshold(**abstention["threshold"]).write(path, **statistics, **provenance)
    return ""


def _write_route(outcome: EvaluateOutcome, path: Path) -> None:
    """Write the chosen route."""
    routing = outcome.routing or {}
    statistics = {name: value for name, value in routing.items() if name != "route"}
    provenance = _describe_choice(outcome) | {"evaluation": outcome.evaluation}
    Route(**routing["route"]).write(path, **statistics, **provenance)


def _describe_choice(outcome: EvaluateOutcome) -> dict[str, Any]:
    """Describe the choice of a threshold or route by snapshot, retriever and question count."""
    return {"snapshot": outcome.snapshot, "retriever": outcome.retriever, "n": outcome.n}


def _format_differences(row: dict[str, Any]) -> list[str]:
    """Format how a further reader differs from the first reader, and what its answers cost."""
    differences = ", ".join(f"{name} {format_paired_difference(value)}" for name, value in row["against_open"].items())
    return [f"  minus the first reader: {differences}", *([f"  {format_costs(row['costs'])}"] if row["costs"] else [])]


def format_costs(costs_per_question: Mapping[str, float]) -> str:
    """Format the mean costs of an answer.

    >>> format_costs({"seconds": 0.5, "read": 512.0, "written": 9.0})
    '0.50 s, 512 tokens read and 9 written a question'
    """
    seconds_text = [f"{costs_per_question['seconds']:.2f} s"] if "seconds" in costs_per_question else []
    tokens_text = (
        [f"{costs_per_question['read']:,.0f} tokens read and {costs_per_question['written']:,.0f} written"]
        if "read" in costs_per_question
        else []
    )
    return f"{', '.join([*seconds_text, *tokens_text])} a question"


def format_stages(milliseconds_by_stage: Mapping[str, float]) -> str:
    """Format the milliseconds of each stage and their sum.

    >>> format_stages({"hnsw": 0.25, "assembly": 1.0, "generation": 240.0})
    'hnsw 0.25 ms, assembly 1 ms, generation 240 ms: together 241 ms a question'
    """
    stages_text = ", ".join(f"{name} {milliseconds:.3g} ms" for name, milliseconds in milliseconds_by_stage.items())
    return f"{stages_text}: together {sum(milliseconds_by_stage.values()):.3g} ms a question"


def _format_outcome(outcome: EvaluateOutcome) -> str:
    lines = [
        f"{format_count(outcome.n, 'question')}, model {outcome.model_label}, snapshot "
        f"{outcome.snapshot[:12]}, answered from {format_count(outcome.k, 'passage')} each by "
        f"{outcome.reader}",
        *iter_metric_lines({**outcome.metrics, **outcome.ranks}, outcome.intervals),
    ]
    lines += [f"costs        {format_costs(outcome.costs)}"] if outcome.costs else []
    lines += [f"stages       {format_stages(outcome.stages)}"] if outcome.stages else []
    reader_conditions = {f"{name}, {OPEN_BOOK}" for name in get_args(ReaderName)}
    for row in outcome.ablations[1:]:
        metrics = ", ".join(f"{name} {estimate['value']:.3f}" for name, estimate in row["metrics"].items())
        lines.append(f"{row['condition']}: {metrics} ({format_count(row['n'], 'question')})")
        lines += _format_differences(row) if row["condition"] in reader_conditions else []
    collapse = outcome.collapse
    lines.append(f"{collapse['distinct']:,} distinct passages, spread {collapse['spread']:.2f}")
    lines += [sentence for sentence in (*outcome.notes, outcome.worth, outcome.abstained) if sentence]
    return "\n".join(
        [*lines, *([f"report       {outcome.report}"] if outcome.report else []), describe_record(outcome)]
    )


def format_comparison(outcome: CompareOutcome) -> str:
    """Format a comparison of retrievers for a terminal."""
    return "\n".join(_iter_comparison_lines(outcome))


def iter_metric_lines(metrics: Mapping[str, float], intervals: Mapping[str, tuple[float, float]]) -> Iterator[str]:
    """Yield a line for each metric, with its confidence interval if there is one."""
    for name, metric in metrics.items():
        interval = intervals.get(name)
        yield f"{name:<12} {metric:.3f}" + (f"  [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else "")


def _iter_comparison_lines(outcome: CompareOutcome) -> Iterator[str]:
    first_comparison = outcome.comparisons[outcome.first_retriever]
    yield (
        f"{outcome.n} questions on snapshot {outcome.snapshot[:12]}, judged by "
        f"{outcome.judged_by}, retriever {outcome.first_retriever}"
    )
    yield from iter_metric_lines(
        {**first_comparison["metrics"], **first_comparison["ranks"]}, first_comparison["intervals"]
    )
    if shares_by_kind := first_comparison.get("kinds"):
        yield "answered by  " + ", ".join(f"{kind} {share:.3f}" for kind, share in shares_by_kind.items())
    if len(outcome.comparisons) > 1:
        yield ""
        yield from _align_columns(_iter_retriever_rows(outcome))
    if any(len(comparison["stages"]) > 1 for comparison in outcome.comparisons.values()):
        yield ""
        yield from _align_columns(_iter_stage_rows(outcome))
    if any(comparison["groups"] for comparison in outcome.comparisons.values()):
        yield ""
        yield from _align_columns(_iter_group_rows(outcome))
    yield from (f"note         {note}" for note in outcome.notes)
    yield describe_record(outcome)
    yield f"advice       {outcome.advice}"
    if outcome.report:
        yield f"report       {outcome.report}"


def describe_record(outcome: CompareOutcome | EvaluateOutcome) -> str:
    """Return a line with the id of a recorded evaluation, or the reason why it was not recorded."""
    if outcome.evaluation is None:
        return f"evaluation   not recorded: {outcome.unrecorded}"
    return f"evaluation   {outcome.evaluation[:12]}"


def _iter_retriever_rows(outcome: CompareOutcome) -> Iterator[Sequence[str]]:
    """Yield for each retriever a row of metrics, and a row of differences from the first one."""
    names = list(outcome.comparisons[outcome.first_retriever]["metrics"])
    yield "retriever", *names, "ms", "bytes"
    for expression, comparison in outcome.comparisons.items():
        cost_cells = f"{comparison['milliseconds']:.3g}", format_bytes(comparison["bytes"])
        yield expression, *(f"{comparison['metrics'][name]:.3f}" for name in names), *cost_cells
        if differences := comparison.get("differences"):
            yield (
                f"  minus {outcome.first_retriever}",
                *(format_paired_difference(differences[name]) for name in names),
                "",
                "",
            )


def _iter_stage_rows(outcome: CompareOutcome) -> Iterator[Sequence[str]]:
    yield "stage", outcome.measure, "own ms", "own bytes"
    for expression, comparison in outcome.comparisons.items():
        if comparison["encoder"]["milliseconds"]:
            yield (
                f"{expression}: {ENCODER}",
                "",
                f"{comparison['encoder']['milliseconds']:.3g}",
                format_bytes(comparison["encoder"]["bytes"]),
            )
        for stage in comparison["stages"]:
            value = f"{stage['metrics'][outcome.measure]:.3f}"
            yield f"{expression}: {stage['stage']}", value, f"{stage['milliseconds']:.3g}", format_bytes(stage["bytes"])


def _iter_group_rows(outcome: CompareOutcome) -> Iterator[Sequence[str]]:
    yield "questions", "n", "retriever", outcome.measure, f"minus {outcome.first_retriever}"
    for name in outcome.comparisons[outcome.first_retriever]["groups"]:
        for expression, comparison in outcome.comparisons.items():
            group = comparison["groups"][name]
            differences = group.get("differences")
            difference_text = format_paired_difference(differences[outcome.measure]) if differences else ""
            yield name, f"{group['n']:,}", expression, f"{group['metrics'][outcome.measure]:.3f}", difference_text


def _align_columns(table_rows: Iterator[Sequence[str]]) -> Iterator[str]:
    all_rows = list(table_rows)
    widths = [max(len(row[column]) for row in all_rows) for column in range(len(all_rows[0]))]
    for row in all_rows:
        yield "  ".join(f"{cell:<{column_width}}" for cell, column_width in zip(row, widths, strict=True)).rstrip()
