"""`bookwheel answer`: questions in, answers out, each with the passages that it was read from."""

from typing import Annotated

from cyclopts import Parameter

from flows.command.live import live
from flows.command.reading import AbstainBelow, BudgetTokens, Cite, OrderName, PromptFile, ReadBy, concat_of
from flows.command.reply import AsksName, Common, IndexName, Reply, RetrieverName, SnapshotName, StoreUrl
from flows.verbs.search import asked_of, titled
from rag_model.corpus.moments import day_of
from rag_model.generate.decoding import Decoding
from rag_model.reading.answer import Answer, Excerpt, Support, answer_json
from rag_model.reading.confidence import Threshold
from rag_model.reading.opening import open_reader
from rag_model.reading.settings import ReaderSettings
from rag_model.retrieve.expression import one_of
from rag_model.store.versions.snapshot import Snapshot

ModelName = Annotated[
    str,
    Parameter(
        help="A RAG model of the store (a ref, ref@number, an id, a unique prefix), or a folder of one; with --reader "
        "concat also a folder of a generator alone, or openai:MODEL behind the endpoint that the environment names."
    ),
]


def answer(
    *question: str,
    store: StoreUrl,
    model: ModelName,
    ref: SnapshotName = "latest",
    k: Annotated[int | None, Parameter(alias="-k", help="Passages a question; by default as in training.")] = None,
    retriever: RetrieverName = None,
    index: IndexName = None,
    asks: AsksName = None,
    beams: Annotated[int, Parameter(help="Beams of the search for an answer; 1 is greedy.")] = 1,
    reader: ReadBy = None,
    order: OrderName = None,
    budget: BudgetTokens = None,
    prompt: PromptFile = None,
    cite: Cite = False,
    abstain_below: AbstainBelow = None,
    questions_file: Annotated[
        str | None,
        Parameter(name="--questions", allow_leading_hyphen=True, help="A file of questions; `-` reads standard input."),
    ] = None,
    common: Common | None = None,
) -> Reply:
    """Answer questions from passages of a snapshot, and show what each answer was read from.

    A RAG model weighs its passages, and the reply has each passage's share of the answer. In one prompt, passages are
    numbered, and the reply has what stands under each number. On a terminal its words are shown as they come.

    Parameters
    ----------
    question
        One or more questions, each one argument.
    """
    asked, named_retriever = asked_of(question, questions_file), one_of(index, retriever)
    concat = concat_of([reader], model, order, budget, prompt, cite)
    threshold = None if abstain_below is None else Threshold.read(abstain_below)
    settings = ReaderSettings(reader, Decoding(beams=beams), concat, threshold=threshold)
    snapshot = Snapshot.open(store, ref)
    named, opened = open_reader(snapshot, store, model, named_retriever, settings, asks)
    with live(_head(asked[0]), common) as shown:
        answers = opened.answer(asked, k, tell=shown)
    document = {"snapshot": snapshot.id, "model": named, "answers": [answer_json(one) for one in answers]}
    text = "\n\n".join(_words(one) for one in answers)
    return Reply(document, text if shown is None else shown.rest(text))


def _words(answer: Answer) -> str:
    nothing = "(the library does not hold it)" if answer.abstained else "(nothing)"
    cut = "" if answer.ended or answer.abstained else " …"
    lines = [f"{_head(answer.question)}{answer.text or nothing}{cut}"]
    if answer.context:
        return "\n".join([*lines, *(line for one in answer.context for line in _entry(one, answer) if line.strip())])
    for one in sorted(answer.support, key=_share, reverse=True):
        passage = one.hit.passage
        title = titled(passage.title, passage.section, day_of(passage.revised))
        known = one.weight is not None and one.posterior is not None
        share = f"{one.posterior:5.0%} of it from {title} (retrieved {one.weight:.0%})" if known else f"   {title}"
        lines += [share, f"      {one.hit.licence}"]
    return "\n".join(line for line in lines if line.strip())


def _head(question: str) -> str:
    return f"{question}\n  "


def _entry(one: Excerpt, answer: Answer) -> list[str]:
    title = titled(one.title, one.section, (one.revised or "").partition("T")[0])
    return [
        f"  [{one.number}] {title}{', cut' if one.cut else ''}",
        f"      {answer.support[one.places[0]].hit.licence}",
    ]


def _share(one: Support) -> float:
    return one.posterior or 0.0
