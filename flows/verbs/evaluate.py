"""`bookwheel evaluate`: how often the answer is among the passages found, and, with a model, how well it answers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from cyclopts import Parameter

from flows.command.reading import AbstainBelow, BudgetTokens, Cite, OrderName, PromptFile, concat_of
from flows.command.reply import AsksName, Common, EncoderName, Reply, SnapshotName, StoreUrl, whole
from rag_model.errors import UsageError
from rag_model.evaluation.answers.ablation import OPEN, Ablations
from rag_model.evaluation.answers.scores import AnswerKind
from rag_model.evaluation.reports.run_files import check_paths
from rag_model.evaluation.retrieval.judging import JudgedBy
from rag_model.reading.confidence import Threshold
from rag_model.reading.reader import ReaderName
from rag_model.retrieve.expression import all_of

if TYPE_CHECKING:
    from flows.outcome import Evaluated

_RISK = 0.2  # share of wrong answers among those given, at most, unless told otherwise
_DEPTH = 20  # passages that retrieval is measured to, unless told otherwise


def evaluate(
    *,
    store: StoreUrl,
    questions: Annotated[str, Parameter(help="DPR's CSV, JSONL with `question` and `answers`, KILT's, a BEIR folder.")],
    ref: SnapshotName = "latest",
    retriever: Annotated[
        tuple[str, ...],
        Parameter(
            negative="",
            env_var_split=whole,
            help="How to find passages: an index, rrf(A, B, k=60, weights=[1, 1]) of several, rerank(A, MODEL, 50); "
            "A:100 asks A for 100. Again for one more, to compare it with the first. By default the snapshot's own.",
        ),
    ] = (),
    index: Annotated[
        tuple[str, ...],
        Parameter(
            negative="",
            help="An index of the snapshot, or `exact`; again for one more: the short form of --retriever.",
        ),
    ] = (),
    k: Annotated[
        int | None, Parameter(alias="-k", help="Passages a question; 20, and to answer from as many as in training.")
    ] = None,
    encoder: EncoderName = None,
    judge: Annotated[
        JudgedBy | None,
        Parameter(
            help="What is relevant: a passage that holds one of the `answers`, or `pages` or `passages` that the "
            "questions name. By default the pages of a BEIR folder, passages if every question names one, else answers."
        ),
    ] = None,
    model: Annotated[
        str | None,
        Parameter(
            help="Answer the questions too, with this RAG model of the store, or folder of one; with --reader concat "
            "also a folder of a generator alone, or openai:MODEL."
        ),
    ] = None,
    reader: Annotated[
        tuple[ReaderName, ...],
        Parameter(
            negative="",
            help="With --model: how passages are read, as in `answer`; again for one more, to compare it with the "
            "first on the same passages.",
        ),
    ] = (),
    order: OrderName = None,
    budget: BudgetTokens = None,
    prompt: PromptFile = None,
    cite: Cite = False,
    answers: Annotated[
        AnswerKind,
        Parameter(
            help="What the answers are: `spans`, `patterns` (CuratedTREC), `labels` (FEVER), `texts`, or `clues` "
            "(Jeopardy: the question is an entity, the answer a clue that asks for it)."
        ),
    ] = "spans",
    label: Annotated[
        tuple[str, ...],
        Parameter(
            negative="",
            help="With --answers labels: a label and the word of one token that the model says for it, such as "
            "SUPPORTS=true; again for each. The likeliest is the answer, instead of one that is written.",
        ),
    ] = (),
    asks: AsksName = None,
    beams: Annotated[int, Parameter(help="With --model: beams of the search for an answer; 1 is greedy.")] = 1,
    ablations: Annotated[
        bool,
        Parameter(
            negative="",
            help="With --model: also closed book, gold passage, shuffled passages, k swept, what BM25 and the frozen "
            "retriever find for this same model (the paper trains one with each), all passages where they fit into one "
            "prompt; and a sentence that says whether retrieval earns its price.",
        ),
    ] = False,
    abstain: Annotated[
        Path | None,
        Parameter(
            help="With --model: choose on these questions the score below which the model gives no answer, at the "
            "risk of --risk, and write it to this file."
        ),
    ] = None,
    risk: Annotated[
        float | None, Parameter(help="With --abstain: wrong answers among those given, at most; by default 0.2.")
    ] = None,
    abstain_below: AbstainBelow = None,
    report: Annotated[Path | None, Parameter(help="Write an HTML report to this file.")] = None,
    kilt: Annotated[Path | None, Parameter(help="With --model: write KILT's prediction file to this file.")] = None,
    trec: Annotated[Path | None, Parameter(help="Write a TREC run to this file.")] = None,
    dpr: Annotated[Path | None, Parameter(help="Write DPR's retrieval JSON to this file.")] = None,
    rows: Annotated[Path | None, Parameter(help="Write one JSON line a question to this file.")] = None,
    common: Common | None = None,
) -> Reply:
    """Search every question of a set; report Success@k by DPR's token match, or measures against judgements.

    Several retrievers are asked the same questions, each stage of them is measured with its milliseconds and bytes, and
    the reply says in one sentence which one the corpus wants. Files that they write are numbered: run.1-hnsw.trec.
    Questions with a `source` are also reported by source, and questions that name their passages also those that share
    few words with it.

    With a model also exact match, F1 and the like. Answers are kept in the store: the same questions to the same
    snapshot and model are not answered twice.

    What was measured is kept in the store as an evaluation, once for the same snapshot, model, questions and settings:
    `show` lists it, `diff` compares it. In a store that cannot be written nothing is kept, and the reply says so.
    """
    retrievers = all_of(index, retriever)
    if model is None:
        of_models: dict[str, Any] = {"--ablations": ablations, "--kilt": kilt, "--asks": asks, "--reader": reader}
        of_models |= {"--label": label}
        of_models |= {"--abstain": abstain, "--risk": risk, "--abstain-below": abstain_below}
        of_models |= {"--order": order, "--budget": budget, "--prompt": prompt, "--cite": cite}
        _refuse(of_models, "needs a model: give one with --model")
        asked = {"k": _DEPTH if k is None else k, "judged_by": judge, "patterns": answers == "patterns"}
        return _compare(store, questions, retrievers, ref, asked | {"encoder": encoder}, report, (trec, dpr, rows))
    why = "measures retrieval alone: leave it out, or leave out --model"
    _refuse({"--question-encoder": encoder, "--trec": trec, "--dpr": dpr}, why)
    if len(retrievers) > 1:
        raise UsageError(
            f"a model answers from one retriever, and {len(retrievers)} are given: leave out --model, or them"
        )
    settings: dict[str, Any] = {"kind": answers, "k": k, "depth": max(_DEPTH, k or 0), "judged_by": judge}
    settings["retriever"] = retrievers[0] if retrievers else None
    settings["readers"], settings["concat"] = reader, concat_of(reader, model, order, budget, prompt, cite)
    settings["ablations"] = Ablations() if ablations else None
    if risk is not None and abstain is None:
        raise UsageError("--risk says how a threshold is chosen: give --abstain too")
    settings["labels"] = _labels(label)
    settings["risk"] = (_RISK if risk is None else risk) if abstain is not None else None
    settings["threshold"] = None if abstain_below is None else Threshold.read(abstain_below)
    check_paths(None if abstain is None else str(abstain), questions=questions)
    named = {"rows": rows, "kilt": kilt, "report": report, "asks": asks}
    return _answer(store, model, questions, ref, settings, beams, named, abstain)


def _labels(given: Sequence[str]) -> dict[str, str]:
    pairs = [one.partition("=") for one in given]
    if bad := next((one for one, pair in zip(given, pairs, strict=True) if not pair[0] or not pair[2]), None):
        raise UsageError(f"--label {bad!r} is no label with a word: give one such as SUPPORTS=true")
    return {label.strip(): word.strip() for label, _, word in pairs}


def _refuse(given: dict[str, Any], why: str) -> None:
    for name, value in given.items():
        if value:
            raise UsageError(f"{name} {why}")


def _compare(
    store: str,
    questions: str,
    retrievers: Sequence[str],
    ref: str,
    asked: dict[str, Any],
    report: Path | None,
    paths: tuple[Path | None, Path | None, Path | None],
) -> Reply:
    from flows.command.comparison import words  # noqa: PLC0415 - Prefect, which `--help` does without
    from flows.compare import RunFiles, compare  # noqa: PLC0415
    from flows.stage import run_flow  # noqa: PLC0415

    files = RunFiles(*(None if path is None else str(path) for path in paths))
    page = None if report is None else str(report)
    outcome = run_flow(compare, store, questions, retrievers, ref, **asked, report=page, files=files)
    return Reply(outcome.to_json(), words(outcome))


def _answer(
    store: str,
    model: str,
    questions: str,
    ref: str,
    settings: dict[str, Any],
    beams: int,
    others: dict[str, Path | str | None],
    abstain: Path | None,
) -> Reply:
    # Torch and Prefect, which `--help` does without.
    from flows.evaluate import evaluate as evaluate_flow  # noqa: PLC0415
    from flows.outcome import CollapseRefusedError  # noqa: PLC0415
    from flows.stage import run_flow  # noqa: PLC0415
    from rag_model.evaluation.answers.settings import Evaluation  # noqa: PLC0415
    from rag_model.generate.decoding import Decoding  # noqa: PLC0415

    examined = Evaluation(**settings, decoding=Decoding(beams=beams))
    named = {name: None if path is None else str(path) for name, path in others.items()}
    try:
        outcome, refusal = run_flow(evaluate_flow, store, model, questions, ref, examined, **named), ""
    except CollapseRefusedError as refused:
        outcome, refusal = refused.outcome, str(refused)
    if abstain is not None:
        refusal = _write_threshold(outcome, abstain) or refusal
    return Reply({**outcome.to_json(), "index": outcome.retriever}, _words(outcome), refusal)


def _write_threshold(outcome: "Evaluated", path: Path) -> str:
    """Write the threshold that was chosen; return one sentence where none was."""
    found = outcome.abstaining or {}
    if found.get("threshold") is None:
        why = f"{outcome.abstained[:1].lower()}{outcome.abstained[1:]}"
        return f"{why}, so {path} is not written: give a larger --risk"
    chosen = {"model": outcome.model, "snapshot": outcome.snapshot, "retriever": outcome.retriever, "n": outcome.n}
    rest = {name: value for name, value in found.items() if name != "threshold"}
    Threshold(**found["threshold"]).write(path, **rest, **chosen)
    return ""


def _against(row: dict[str, Any]) -> list[str]:
    """Say how another reader differs from the first, and what it costs."""
    differences = ", ".join(
        f"{name} {one['value']:+.3f} [{one['low']:+.3f}, {one['high']:+.3f}]"
        for name, one in row["against_open"].items()
    )
    return [f"  minus the first reader: {differences}", *([f"  {costs(row['costs'])}"] if row["costs"] else [])]


def costs(found: Mapping[str, float]) -> str:
    """Return what an answer costs, in words.

    >>> costs({"seconds": 0.5, "read": 512.0, "written": 9.0})
    '0.50 s, 512 tokens read and 9 written a question'
    """
    seconds = [f"{found['seconds']:.2f} s"] if "seconds" in found else []
    tokens = [f"{found['read']:,.0f} tokens read and {found['written']:,.0f} written"] if "read" in found else []
    return f"{', '.join([*seconds, *tokens])} a question"


def stages(found: Mapping[str, float]) -> str:
    """Return what each stage takes and their sum, in words.

    >>> stages({"hnsw": 0.25, "assembly": 1.0, "generation": 240.0})
    'hnsw 0.25 ms, assembly 1 ms, generation 240 ms: together 241 ms a question'
    """
    each = ", ".join(f"{name} {milliseconds:.3g} ms" for name, milliseconds in found.items())
    return f"{each}: together {sum(found.values()):.3g} ms a question"


def _words(outcome: "Evaluated") -> str:
    from flows.command.comparison import figures, kept  # noqa: PLC0415 - as above

    lines = [
        f"{outcome.n:,} questions, model {outcome.named}, snapshot {outcome.snapshot[:12]}, "
        f"answered from {outcome.k} passages each by {outcome.reader}",
        *figures({**outcome.metrics, **outcome.ranks}, outcome.intervals),
    ]
    lines += [f"costs        {costs(outcome.costs)}"] if outcome.costs else []
    lines += [f"stages       {stages(outcome.stages)}"] if outcome.stages else []
    read = {f"{name}, {OPEN}" for name in get_args(ReaderName)}
    for row in outcome.ablations[1:]:
        found = ", ".join(f"{name} {figure['value']:.3f}" for name, figure in row["metrics"].items())
        lines.append(f"{row['condition']}: {found} ({row['n']:,} questions)")
        lines += _against(row) if row["condition"] in read else []
    seen = outcome.collapse
    lines.append(f"{seen['distinct']:,} distinct passages, spread {seen['spread']:.2f}")
    lines += [sentence for sentence in (*outcome.notes, outcome.worth, outcome.abstained) if sentence]
    return "\n".join([*lines, *([f"report       {outcome.report}"] if outcome.report else []), kept(outcome)])
