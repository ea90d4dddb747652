"""`bookwheel answer`: answer questions, and show the passages that each answer was read from."""

from typing import Annotated

from cyclopts import Parameter

from flows.command.console import show_live_answer
from flows.command.reading import ReadingOptions
from flows.command.reply import AsksName, Common, IndexName, Reply, RetrieverName, SnapshotName, StoreUrl
from flows.verbs.search import collect_questions, format_title
from rag_model.corpus.records import format_day
from rag_model.reading.answer import Answer, ContextEntry, SupportingPassage, answer_json
from rag_model.reading.model import open_reader
from rag_model.reading.reader import AnswerCallbacks
from rag_model.retrieve.expression import choose_expression
from rag_model.store.versions.snapshot import Snapshot

ModelName = Annotated[
    str,
    Parameter(
        help="A RAG model of the store (a ref, ref@number, an id, a unique prefix), or a folder of one; with --reader "
        "concat also a folder of a generator alone, or openai:MODEL behind the endpoint that the "
        "environment names."
    ),
]


def answer(
    *question: str,
    store: StoreUrl,
    model: ModelName,
    ref: SnapshotName = "latest",
    k: Annotated[int | None, Parameter(alias="-k")] = None,
    retriever: RetrieverName = None,
    index: IndexName = None,
    asks: AsksName = None,
    beams: int = 1,
    reading: ReadingOptions | None = None,
    questions_file: Annotated[str | None, Parameter(name="--questions", allow_leading_hyphen=True)] = None,
    common: Common | None = None,
) -> Reply:
    """Answer questions from passages of a snapshot, and show what each answer was read from.

    A RAG model weighs its passages, and the reply has each passage's share of the answer. The
    reader `concat` numbers the passages in its prompt, and the reply lists the passage of each
    number. A terminal shows the answer while it is generated.

    Args:
        question: One or more questions, one per argument.
        k: Passages per question; by default as in training.
        beams: Beams of the search for an answer; 1 means greedy decoding.
        questions_file: A file of questions; `-` means standard input.
    """
    questions, named_retriever = collect_questions(question, questions_file), choose_expression(index, retriever)
    settings = (reading or ReadingOptions()).build_reader_settings(model, store, beams)
    snapshot = Snapshot.open(store, ref)
    model_id, opened_reader = open_reader(snapshot, store, model, named_retriever, settings, asks)
    with show_live_answer(_format_question(questions[0]), common) as live_answer:
        answers = opened_reader.answer(questions, k, AnswerCallbacks(on_text=live_answer))
    document = {"snapshot": snapshot.id, "model": model_id, "answers": [answer_json(answer_) for answer_ in answers]}
    text = "\n\n".join(_format_answer(answer_) for answer_ in answers)
    return Reply(document, text if live_answer is None else live_answer.remove_shown_text(text))


def _format_answer(answer: Answer) -> str:
    problem_message = "" if answer.problem is None else answer.problem.message
    empty_text = "(the library does not hold it)" if answer.abstained else f"({problem_message or 'nothing'})"
    ellipsis_suffix = "" if answer.ended or answer.abstained else " …"
    lines = [f"{_format_question(answer.question)}{answer.text or empty_text}{ellipsis_suffix}"]
    lines += [f"  warning: {problem_message}"] if problem_message and answer.text else []
    if answer.memory == "weights":
        lines.append("  from the model's weights, without passages")
    elif answer.memory == "passages":
        lines.append("  from passages:")
    if answer.context:
        return "\n".join(
            [
                *lines,
                *(line for entry in answer.context for line in _format_context_entry(entry, answer) if line.strip()),
            ]
        )
    for support in sorted(answer.support, key=_get_posterior, reverse=True):
        passage = support.hit.passage
        title = format_title(passage.title, passage.section, format_day(passage.revised), passage.kind)
        has_share = support.weight is not None and support.posterior is not None
        share_line = (
            f"{support.posterior:5.0%} of it from {title} (retrieved {support.weight:.0%})"
            if has_share
            else f"   {title}"
        )
        lines += [share_line, f"      {support.hit.licence}"]
    return "\n".join(line for line in lines if line.strip())


def _format_question(question: str) -> str:
    return f"{question}\n  "


def _format_context_entry(entry: ContextEntry, answer: Answer) -> list[str]:
    day = (entry.revised or "").partition("T")[0]
    title = format_title(entry.title, entry.section, day, answer.support[entry.places[0]].hit.kind)
    return [
        f"  [{entry.number}] {title}{', cut' if entry.cut else ''}",
        f"      {answer.support[entry.places[0]].hit.licence}",
    ]


def _get_posterior(support: SupportingPassage) -> float:
    return support.posterior or 0.0
