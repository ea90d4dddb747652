"""`bookwheel search`: find passages for questions."""

import sys
from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter

from flows.command.reply import Common, EncoderName, IndexName, Reply, RetrieverName, SnapshotName, StoreUrl
from rag_model.corpus.records import PROSE, format_day
from rag_model.errors import UsageError
from rag_model.retrieve.expression import add_condition, choose_expression
from rag_model.retrieve.factory import open_retriever
from rag_model.retrieve.hits import Hit
from rag_model.store.versions.snapshot import Snapshot

_MAX_RANGED_QUESTIONS = 64  # with more questions a local copy of the files is faster


def search(
    *question: str,
    store: StoreUrl,
    ref: SnapshotName = "latest",
    k: Annotated[int | None, Parameter(alias="-k")] = None,
    retriever: RetrieverName = None,
    index: IndexName = None,
    where: str | None = None,
    questions_file: Annotated[str | None, Parameter(name="--questions", allow_leading_hyphen=True)] = None,
    encoder: EncoderName = None,
    common: Common | None = None,
) -> Reply:
    """Find passages of a snapshot for questions, best first.

    Args:
        question: One or more questions, one per argument.
        k: Passages per question; by default 5, or all of a smaller corpus.
        where: Only passages of a kind, kind=table or kind=table,infobox, or of pages with a
            language=, wikidata= or category=, or whose title begins with title=.
        questions_file: A file of questions; `-` means standard input.
    """
    questions = collect_questions(question, questions_file)
    expression = add_condition(choose_expression(index, retriever), where)
    # many questions read most of the files, so that fetching the files first is faster
    snapshot = Snapshot.open(store, ref, by_ranges=len(questions) <= _MAX_RANGED_QUESTIONS)
    opened_retriever = open_retriever(snapshot, expression, encoder=encoder)
    hits_by_question = opened_retriever.search(questions, opened_retriever.choose_depth(k))
    result_entries = [
        {"question": question, "hits": [hit.to_json() for hit in hits]}
        for question, hits in zip(questions, hits_by_question, strict=True)
    ]
    text = "\n\n".join(_format_hits(question, hits) for question, hits in zip(questions, hits_by_question, strict=True))
    return Reply({"snapshot": snapshot.id, "results": result_entries}, text)


def collect_questions(arguments: Sequence[str], file: str | None) -> list[str]:
    """Return the questions given as arguments, then those of a file; `-` is standard input.

    Raises:
        UsageError: no question is given.
    """
    questions = [*arguments]
    if file:
        from rag_model.evaluation.questions import read_questions  # noqa: PLC0415 - rarely needed

        questions += [question.text for question in read_questions(sys.stdin if file == "-" else file).questions]
    if not questions:
        raise UsageError("there is no question: give one as an argument, --questions FILE, or --questions - for stdin")
    return questions


def format_title(title: str, section: str, day: str, kind: str = PROSE) -> str:
    """Format a passage's title with its section, its kind unless it is prose, and the day of its
    revision.
    """
    title_details = [kind] * (kind != PROSE) + [day] * bool(day)
    return ", ".join([title + (f" § {section}" if section else ""), *title_details])


def _format_hits(question: str, hits: Sequence[Hit]) -> str:
    lines = [question] if hits else [question, "     nothing found"]
    for hit in hits:
        passage = hit.passage
        title = format_title(passage.title, passage.section, format_day(passage.revised), passage.kind)
        child_ranks = ", ".join(f"{child.leg} {child.rank}" for child in hit.visible_legs)
        lines += [
            f"{hit.rank:3}. {hit.score:.3f}  {title}" + (f"  ({child_ranks})" if child_ranks else ""),
            *(f"     {line}" for line in passage.text.split("\n")),
            f"     {hit.licence}",
        ]
    return "\n".join(line for line in lines if line.strip())
