"""Mine hard negatives, which are found for a question and do not answer it, and missing positives.

Karpukhin et al. 2020, sections 3.2 and 4.2: the hard negatives are the passages that BM25 ranks highest and that hold
no answer; for a question without a gold passage, the highest ranked passage with an answer is its positive, and a
question is discarded if none of the first 100 holds an answer. The search uses BM25 or a snapshot with the encoder to
be trained (Xiong et al. 2021, "ANCE"). KILT names the pages that hold an answer: a positive is then from such a page.
FEVER's claims need this, because passages do not contain their labels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rag_model.corpus.records import Passage
from rag_model.errors import UsageError
from rag_model.evaluation.questions.match import Answers
from rag_model.retrieve.retriever import Retriever
from rag_model.training.data.examples import Example
from rag_model.training.data.teaching import Tell

Search = Callable[[Sequence[str], int], list[list[Passage]]]  # questions, k -> the best k passages of each, best first
_AT_ONCE = 256  # questions


@dataclass(frozen=True, slots=True)
class Mining:
    """Settings of mining."""

    depth: int = 100  # passages searched per question; DPR, section 4.2: 100
    negatives: int = 30  # kept per example, hardest first; DPR code: its sets have up to 30 for evaluation
    skip: int = 0  # first passages to skip: they may answer in other words; DPR: 0
    find_positives: bool = True  # of examples without one; DPR, section 4.2: the first with an answer; KILT's: above

    def __post_init__(self) -> None:
        if not 0 <= self.skip < self.depth or self.negatives < 0:
            raise UsageError(
                f"depth {self.depth}, skip {self.skip} and negatives {self.negatives}: need 0 <= skip < depth "
                "and negatives >= 0"
            )


def mine(
    examples: Sequence[Example], search: Search, mining: Mining | None = None, tell: Tell = lambda _, __: None
) -> list[Example]:
    """Return the examples, in order, with their negatives replaced by those that `search` finds.

    `tell` is called with the number of questions searched, and of how many.

    A negative holds no answer (DPR's token match, in text or title), is not a positive, and is not of a page that the
    example names. An example with a blank question, or without answers, positives and pages, is unchanged.
    """
    chosen = mining or Mining()
    mined = list(examples)
    places = [place for place, one in enumerate(examples) if one.question.strip() and _can_be_judged(one)]
    for start in range(0, len(places), _AT_ONCE):
        batch = places[start : start + _AT_ONCE]
        found = search([examples[place].question for place in batch], chosen.depth)
        for place, passages in zip(batch, found, strict=True):
            mined[place] = _mined(examples[place], passages, chosen)
        tell(start + len(batch), len(places))
    return mined


def _can_be_judged(example: Example) -> bool:
    return bool(example.answers or example.positives or example.pages)


def _mined(example: Example, found: Sequence[Passage], mining: Mining) -> Example:
    answers = Answers(example.answers)
    answering = [answers.are_in(passage.text) for passage in found]
    positives = example.positives
    if not positives and mining.find_positives:
        positives = _positives(example, found, answering)
    known = {passage.hash for passage in positives}
    negatives = [
        passage
        for passage, holds in list(zip(found, answering, strict=True))[mining.skip :]
        if not (holds or passage.hash in known or passage.page_id in example.pages or answers.are_in(passage.title))
    ]
    return replace(example, positives=positives, negatives=tuple(negatives[: mining.negatives]))


def _positives(example: Example, found: Sequence[Passage], answering: Sequence[bool]) -> tuple[Passage, ...]:
    """Return the first passage with an answer of a named page, else the first of a named page, else with an answer."""
    named = [passage.page_id in example.pages for passage in found]
    for wanted in ([here and holds for here, holds in zip(named, answering, strict=True)], named, answering):
        if any(wanted):
            return (found[wanted.index(True)],)
    return ()


def searching(retriever: Retriever, n: int) -> Search:
    """Return a search of a snapshot of `n` passages, whose near passages are hard negatives for its encoder."""

    def search(questions: Sequence[str], k: int) -> list[list[Passage]]:
        return [[hit.passage for hit in hits] for hits in retriever.search(questions, min(k, n))]

    return search
