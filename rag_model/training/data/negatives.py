"""Mine hard negatives and missing positives in a snapshot, and sample passages to rank.

Karpukhin et al. 2020, sections 3.2 and 4.2: hard negatives are the passages that BM25 ranks highest
and that hold no answer. For a question without a gold passage, the highest ranked passage with an
answer is its positive, and a question is discarded if none of the first 100 holds an answer. The
search uses BM25 or a snapshot with the encoder to be trained (Xiong et al. 2021, "ANCE"). KILT
names the pages that hold an answer: a positive is then from such a page. FEVER's claims need this,
because passages do not contain their labels.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np

from rag_model.corpus.records import Passage
from rag_model.errors import UsageError
from rag_model.evaluation.matching import AnswerMatcher
from rag_model.index.kind import get_kind, get_kind_of_entry
from rag_model.index.plan import IndexPlan
from rag_model.index.recipe import IndexRecipe
from rag_model.resources.estimates import estimate_retriever_bytes
from rag_model.retrieve.dense import TextRetriever
from rag_model.retrieve.factory import open_retriever
from rag_model.retrieve.hits import Retriever
from rag_model.store.recorded_tasks import OnProgress
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.examples import Example
from rag_model.training.data.temporary_index import Indexer, open_temporary_index

SearchFunction = Callable[
    [Sequence[str], int], list[list[Passage]]
]  # questions, k -> the best k passages of each, best first
_AT_ONCE = 256  # questions
SearchName = Literal["bm25", "snapshot", "own"]
_BM25 = "bm25"  # an index kind


@dataclass(frozen=True, slots=True)
class MiningSettings:
    """Settings of mining negatives and positives."""

    depth: int = 100  # retrieved passages per question; DPR, section 4.2: 100
    # kept per example, hardest first; DPR code: its sets have up to 30 for evaluation
    negatives: int = 30
    skip: int = 0  # first passages to skip: they may answer in other words; DPR: 0
    # for examples without one; DPR, section 4.2: the first passage with an answer
    find_positives: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.skip < self.depth or self.negatives < 0:
            raise UsageError(
                f"depth {self.depth}, skip {self.skip} and negatives {self.negatives}: need 0 <= "
                "skip < depth and negatives >= 0"
            )


def mine_negatives(
    examples: Sequence[Example],
    search: SearchFunction,
    settings: MiningSettings | None = None,
    on_progress: OnProgress = lambda _, __: None,
) -> list[Example]:
    """Return the examples, in order, with their negatives replaced by hard negatives from `search`.

    `on_progress` is called with the number of questions searched, and of all questions.

    A negative holds no answer (DPR's token match, in text or title), is not a positive, and is not
    of a page that the example names, nor of the document whose text is the question. An example
    with a blank question, or without answers, positives and pages, is unchanged.
    """
    chosen_settings = settings or MiningSettings()
    mined = list(examples)
    indexes = [index for index, example in enumerate(examples) if example.question.strip() and _can_be_judged(example)]
    for start in range(0, len(indexes), _AT_ONCE):
        batch = indexes[start : start + _AT_ONCE]
        results = search([examples[index].question for index in batch], chosen_settings.depth)
        for index, passages in zip(batch, results, strict=True):
            mined[index] = _mine_example(examples[index], passages, chosen_settings)
        on_progress(start + len(batch), len(indexes))
    return mined


def _can_be_judged(example: Example) -> bool:
    return bool(example.answers or example.positives or example.pages)


def _mine_example(example: Example, candidates: Sequence[Passage], settings: MiningSettings) -> Example:
    answers = AnswerMatcher(example.answers)
    if (own := example.own_document) is not None:
        candidates = [passage for passage in candidates if own.id != passage.page_id and own.hash != passage.hash]
    holds_answer = [answers.match(passage.text) for passage in candidates]
    positives = example.positives
    if not positives and settings.find_positives:
        positives = _choose_positives(example, candidates, holds_answer)
    positive_hashes = {passage.hash for passage in positives}
    negatives = [
        passage
        for passage, is_answer in list(zip(candidates, holds_answer, strict=True))[settings.skip :]
        if not (
            is_answer
            or passage.hash in positive_hashes
            or passage.page_id in example.pages
            or answers.match(passage.title)
        )
    ]
    return replace(example, positives=positives, negatives=tuple(negatives[: settings.negatives]))


def _choose_positives(
    example: Example, candidates: Sequence[Passage], holds_answer: Sequence[bool]
) -> tuple[Passage, ...]:
    """Return the first passage that holds an answer and is of a named page.

    Without one, return the first passage of a named page, else the first that holds an answer.
    """
    is_on_named_page = [passage.page_id in example.pages for passage in candidates]
    for criterion in (
        [is_named and is_answer for is_named, is_answer in zip(is_on_named_page, holds_answer, strict=True)],
        is_on_named_page,
        holds_answer,
    ):
        if any(criterion):
            return (candidates[criterion.index(True)],)
    return ()


def build_search(retriever: Retriever, n: int) -> SearchFunction:
    """Return a search function over a snapshot of `n` passages."""

    def search(questions: Sequence[str], k: int) -> list[list[Passage]]:
        return [[hit.passage for hit in hits] for hits in retriever.search(questions, min(k, n))]

    return search


@dataclass(frozen=True, slots=True)
class NegativesRecipe:
    """Settings of negatives; examples that have negatives keep them."""

    # DPR, section 5: BM25; snapshot: by `retriever`; own: the file's negatives alone
    search: SearchName = "bm25"
    # retriever expression for the snapshot and its encoder; not set: its default
    retriever: str | None = None
    mining: MiningSettings = field(default_factory=MiningSettings)
    # passages of the snapshot that dev questions rank, besides those of the dev set
    ranked: int = 10_000

    def __post_init__(self) -> None:
        if self.search not in get_args(SearchName) or self.ranked < 0:
            raise UsageError(
                f"search is {self.search!r} and ranked {self.ranked}: use one of "
                f"{', '.join(get_args(SearchName))} for search, and ranked >= 0"
            )


def add_mined_passages(
    examples: Mapping[str, Sequence[Example]],
    snapshot: Snapshot,
    recipe: NegativesRecipe,
    on_progress: OnProgress = lambda _, __: None,
    indexer: Indexer | None = None,
) -> dict[str, list[Example]]:
    """Return the examples of every set, in order, with missing positives and negatives mined.

    `on_progress` is called with the number of questions searched, and of all questions. `indexer`
    builds the BM25 index that a snapshot lacks; None: this process does.

    Raises:
        ResourceError: the snapshot has no BM25 index, and the disk has no space to build one.
        UsageError: the retriever expression is wrong.
    """
    incomplete = [
        (name, index)
        for name, group in examples.items()
        for index, example in enumerate(group)
        if not (example.positives and example.negatives)
    ]
    completed = {name: list(group) for name, group in examples.items()}
    if recipe.search == "own" or not incomplete:
        return completed
    incomplete_examples = [completed[name][index] for name, index in incomplete]
    search = _open_search(snapshot, recipe, indexer)
    mined = mine_negatives(incomplete_examples, search, recipe.mining, on_progress)
    for (name, index), example in zip(incomplete, mined, strict=True):
        completed[name][index] = example
    return completed


def sample_passages(snapshot: Snapshot, count: int) -> list[Passage]:
    """Return up to `count` passages of a snapshot, evenly spaced over its rows."""
    rows = np.unique(np.linspace(0, snapshot.n - 1, min(count, snapshot.n), dtype=np.int64))
    return snapshot.passages(rows.tolist())


def estimate_mining_bytes(snapshot: Snapshot, recipe: NegativesRecipe) -> int:
    """Return the memory in bytes of the search for negatives.

    Raises:
        UsageError: the recipe's retriever expression is wrong.
    """
    if recipe.search == "snapshot":
        return estimate_retriever_bytes(snapshot, recipe.retriever)
    if recipe.search == "own":
        return 0
    name = _find_bm25_index(snapshot)
    if name is not None:
        return estimate_retriever_bytes(snapshot, name)
    return get_kind(_BM25).estimate(_plan_bm25(snapshot)).peak_bytes(serving=True)


def _open_search(snapshot: Snapshot, recipe: NegativesRecipe, indexer: Indexer | None) -> SearchFunction:
    if recipe.search == "snapshot":
        retriever = open_retriever(snapshot, recipe.retriever)
        return build_search(retriever, retriever.most)
    name = _find_bm25_index(snapshot)
    if name is not None:
        return build_search(open_retriever(snapshot, name), snapshot.n)
    index = open_temporary_index(snapshot, _plan_bm25(snapshot), indexer=indexer)
    return build_search(TextRetriever(snapshot, _BM25, index), snapshot.n)


def _plan_bm25(snapshot: Snapshot) -> IndexPlan:
    return get_kind(_BM25).plan(IndexRecipe("BM25"), snapshot.n, 0)


def _find_bm25_index(snapshot: Snapshot) -> str | None:
    """Return the name of the snapshot's first BM25 index, or None."""
    entries = snapshot.manifest.content.indexes.items()
    return next((name for name, entry in entries if get_kind_of_entry(entry).name == _BM25), None)
