"""Mine hard negatives and missing positives in a snapshot, and sample passages to rank.

Hard negatives are the passages that BM25 ranks highest and that contain no answer (Karpukhin et al.
2020, sections 3.2 and 4.2). If a question has no gold passage, its positive is the highest ranked
passage that contains an answer. A question is discarded if none of the first 100 passages contains
an answer. The search uses BM25, or a snapshot with the encoder that is to be trained (Xiong et al.
2021, "ANCE"). KILT names the pages that contain an answer; a positive is then from such a page.
FEVER's claims need this, because passages do not contain the labels of claims.
"""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from rag_model.arrays import RowPartition
from rag_model.corpus.records import Passage
from rag_model.errors import UsageError
from rag_model.evaluation.matching import AnswerMatcher
from rag_model.index.files.engine import Rows
from rag_model.index.kind import IndexFiles, get_kind, get_kind_of_entry
from rag_model.index.plan import IndexPlan
from rag_model.index.recipe import IndexRecipe
from rag_model.resources.estimates import estimate_retriever_bytes
from rag_model.retrieve.factory import open_retriever
from rag_model.retrieve.retriever import Queries, check_queries
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.recorded_tasks import OnProgress, PartTask, RecordedTask, TaskRunner, run_tasks
from rag_model.store.store import Store
from rag_model.store.versions.manifest import passages_path
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.batches import split_batches
from rag_model.training.data.examples import Example
from rag_model.training.data.memory import GROUP_SECONDS_PER_ROW, open_passages, read_passages
from rag_model.training.data.temporary_index import Indexer, build_temporary_index
from rag_model.training.loop.loop_settings import check_bounds

_SEARCH_BATCH = 256  # number of questions per search in this process
_TASK_QUESTIONS = 4_096  # number of questions per task of a worker
_SEARCH_SECONDS = 1e-9  # seconds of one core to score one passage of the corpus for one question
_CHECK_SECONDS = 3e-5  # seconds of one core to check one passage for one question
SearchName = Literal["bm25", "snapshot", "own"]
_BM25 = "bm25"  # name of the index kind
# Fields of the checks of one candidate, a passage that was retrieved for a question.
CHECKS = np.dtype(
    [
        ("hash", "<u8"),  # the first 64 bits of the passage's hash
        ("is_own", "?"),  # whether the passage is from the document that is the question itself
        ("is_positive", "?"),  # whether the passage is a known positive
        ("is_on_named_page", "?"),  # whether the example names the page of the passage
        ("text_answers", "?"),  # whether the text contains an answer
        ("title_answers", "?"),  # whether the title contains an answer
    ]
)
Checks = npt.NDArray[Any]  # structured array of dtype `CHECKS`


@dataclass(frozen=True, slots=True)
class MiningSettings:
    """Settings for the mining of negatives and positives."""

    depth: int = 100  # number of retrieved passages per question; DPR, section 4.2: 100
    # maximum number of hard negatives per example; DPR's published sets have up to 30
    negatives: int = 30
    # number of top passages that are not negatives, because they may answer in other words; DPR: 0
    skip: int = 0
    # whether the first passage with an answer becomes the positive of an example without one, as in
    # DPR, section 4.2
    find_positives: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.skip < self.depth or self.negatives < 0:
            raise UsageError(
                f"depth = {self.depth}, skip = {self.skip} and negatives = {self.negatives} are "
                "invalid: give 0 <= skip < depth and negatives >= 0"
            )


class CandidateChecker:
    """Checks whether candidates can be positives or negatives of one question."""

    def __init__(
        self,
        answers: Sequence[str],
        positive_hashes: Sequence[str],
        pages: Sequence[str],
        own_document: Sequence[str],
    ) -> None:
        """Store the answers, passages and pages with which candidates are compared.

        `own_document` has the page id and the hash of the document that is the question itself, or
        is empty.
        """
        self._answers, self._positive_hashes, self._pages = AnswerMatcher(answers), {*positive_hashes}, {*pages}
        self._own_names = {*own_document}

    @staticmethod
    def list_arguments(example: Example) -> list[Sequence[str]]:
        """Return the arguments of the constructor for an example, as JSON values."""
        document = example.own_document
        positive_hashes = [passage.hash for passage in example.positives]
        return [example.answers, positive_hashes, example.pages, [document.id, document.hash] if document else []]

    def check(self, page_id: str, title: str, text: str, passage_hash: str) -> tuple[int | bool, ...]:
        """Return the values of `CHECKS` for a passage."""
        return (
            int(passage_hash[:16], 16),
            page_id in self._own_names or passage_hash in self._own_names,
            passage_hash in self._positive_hashes,
            page_id in self._pages,
            self._answers.match(text),
            self._answers.match(title),
        )


def select_candidates(example: Example, checks: Checks, settings: MiningSettings) -> tuple[list[int], list[int]]:
    """Return the positions of new positives (at most one) and of negatives, hardest first.

    `checks` are the checks of the retrieved passages, best first. A negative does not contain the
    tokens of an answer in its text or title, is not a positive, and is neither from a page that the
    example names nor from the document that is the question itself.

    An example without a positive gets the first passage of a named page that contains an answer,
    else the first passage of a named page, else the first passage that contains an answer.
    """
    candidates = np.flatnonzero(~checks["is_own"])
    checks, positives = checks[candidates], list[int]()
    is_on_page, has_answer = checks["is_on_named_page"], checks["text_answers"]
    is_excluded = is_on_page | has_answer | checks["title_answers"] | checks["is_positive"]
    if not example.positives and settings.find_positives:
        criteria = (criterion for criterion in (is_on_page & has_answer, is_on_page, has_answer) if criterion.any())
        positives = [int(criterion.argmax()) for criterion in criteria][:1]
        is_excluded |= np.isin(checks["hash"], checks["hash"][positives])
    negatives = settings.skip + np.flatnonzero(~is_excluded[settings.skip :])[: settings.negatives]
    return candidates[positives].tolist(), candidates[negatives].tolist()


@dataclass(frozen=True, slots=True)
class SearchTask(RecordedTask):
    """A task that searches a BM25 index for a block of questions."""

    questions: BlobRef  # JSON list of the questions
    n_questions: int
    index: BlobRef
    entry: Mapping[str, Any]  # manifest entry of the index
    n: int  # number of passages in the corpus
    depth: int

    stage: ClassVar[str] = "mine-search"

    def inputs(self) -> dict[str, Any]:
        """Return all inputs that determine the result of `compute`."""
        entry = {name: self.entry[name] for name in ("settings", "search")}
        return {"questions": self.questions.id, "index": self.index.id, **entry, "depth": self.depth, "code": 1}

    def compute(self, store: Store) -> list[list[int]]:
        """Return the rows of the best passages of each question, padded with -1."""
        files = IndexFiles(store.blobs.get_local_path(self.index), list, self.n)
        index = get_kind(_BM25).open(files, self.entry)
        hit_rows: list[list[int]] = index.search(json.loads(store.blobs.read(self.questions)), self.depth)[1].tolist()
        return hit_rows

    def estimate_seconds(self) -> float:
        """Return the estimated seconds of the search."""
        return self.n_questions * self.n * _SEARCH_SECONDS

    @property
    def memory_bytes(self) -> int:
        """Memory in bytes of a process that has read the whole index."""
        return super(SearchTask, self).memory_bytes + self.index.size


@dataclass(frozen=True, slots=True)
class CheckTask(PartTask):
    """A task that checks the candidates in one part of the snapshot."""

    checkers: BlobRef  # JSON list with the arguments of a `CandidateChecker` for each question
    # .npy file of (2, p) int32: positions in `checkers`, and ascending rows of the part
    candidates: BlobRef

    stage: ClassVar[str] = "mine-check"
    code: ClassVar[int] = 1

    def compute(self, store: Store) -> str:
        """Return the checks of all candidates as the hex digits of an array of dtype `CHECKS`."""
        checker_arguments = json.loads(store.blobs.get_local_path(self.checkers).read_bytes())
        questions, rows = np.load(io.BytesIO(store.blobs.read(self.candidates)), allow_pickle=False)
        distinct_rows, row_starts = np.unique(rows, return_index=True)
        checker_by_question = {q: CandidateChecker(*checker_arguments[q]) for q in np.unique(questions).tolist()}
        with open_passages(store, self.file) as file:
            batches = file.iter_selected(distinct_rows.tolist(), ["page_id", "title", "text", "hash"])
            passages = chain.from_iterable(
                zip(*(column.to_pylist() for column in batch), strict=True) for batch in batches
            )
            checks = [
                checker_by_question[q].check(*passage)
                for passage, passage_questions in zip(passages, np.split(questions, row_starts[1:]), strict=True)
                for q in passage_questions.tolist()
            ]
        return np.array(checks, CHECKS).tobytes().hex()

    def estimate_seconds(self) -> float:
        """Return the estimated seconds to read the row groups and to look for answers."""
        n_candidates = self.candidates.size / 8
        read_seconds = min(super(CheckTask, self).estimate_seconds(), n_candidates * GROUP_SECONDS_PER_ROW)
        return read_seconds + n_candidates * _CHECK_SECONDS


def mine_passages(
    examples: Sequence[Example],
    rows: Rows,
    snapshot: Snapshot,
    settings: MiningSettings,
    runner: TaskRunner | None = None,
    on_progress: OnProgress = lambda _, __: None,
) -> list[Example]:
    """Return the examples, in order, with the passages that `select_candidates` selects.

    An example keeps its own negatives, except copies of its new positive. It gets mined negatives
    only if none of its own is left.

    Args:
        examples: the examples to mine passages for.
        rows: (q, k) snapshot rows of the retrieved passages, best first, padded with -1.
        snapshot: the snapshot that was searched.
        settings: settings of the selection.
        runner: reads the texts on workers, one task per part; if None, this process reads them.
        on_progress: called with the number of finished tasks and the number of all tasks.
    """
    checks = _check_candidates(examples, rows, snapshot, runner, lambda done, total: on_progress(done, 2 * total))
    selections = list[tuple[list[int], list[int]]]()
    for example, example_rows, example_checks in zip(examples, rows, checks, strict=True):
        positives, negatives = select_candidates(example, example_checks[example_rows >= 0], settings)
        selections.append((example_rows[positives].tolist(), example_rows[negatives].tolist()))
    chosen_rows = sorted({row for selection in selections for row in chain(*selection)})
    passages = read_passages(snapshot, chosen_rows, runner, lambda done, total: on_progress(total + done, 2 * total))
    mined_examples = list[Example]()
    for example, (positive_rows, negative_rows) in zip(examples, selections, strict=True):
        all_positives = tuple(passages[row] for row in positive_rows) or example.positives
        positive_hashes = {passage.hash for passage in all_positives}
        own_negatives = tuple(passage for passage in example.negatives if passage.hash not in positive_hashes)
        all_negatives = own_negatives or tuple(passages[row] for row in negative_rows)
        mined_examples.append(replace(example, positives=all_positives, negatives=all_negatives))
    return mined_examples


def _check_candidates(
    examples: Sequence[Example],
    rows: Rows,
    snapshot: Snapshot,
    runner: TaskRunner | None,
    on_progress: OnProgress,
) -> Checks:
    """Return the (q, k) checks of the retrieved passages; where a row is -1, they are undefined."""
    store, files = snapshot.store, snapshot.manifest.content.files
    checkers_ref = store.blobs.put_bytes(json.dumps([*map(CandidateChecker.list_arguments, examples)]).encode())
    # positions in `rows.ravel()` of the retrieved passages, by ascending row; -1 is left out
    order = np.argsort(rows, axis=None, kind="stable")[np.count_nonzero(rows < 0) :]
    questions, tasks, spans = order // max(1, rows.shape[1]), list[CheckTask](), list[slice]()
    for part_index, span, local_rows in RowPartition(part.rows for part in snapshot.parts).split(rows.ravel()[order]):
        np.save(buffer := io.BytesIO(), np.array([questions[span], local_rows], np.int32), allow_pickle=False)
        file = files[passages_path(snapshot.parts[part_index].name)]
        tasks.append(CheckTask(file, checkers_ref, store.blobs.put_bytes(buffer.getvalue())))
        spans.append(span)
    checks = np.zeros(rows.shape, CHECKS)
    for span, part_checks in zip(spans, run_tasks(store, tasks, runner, on_progress), strict=True):
        checks.ravel()[order[span]] = np.frombuffer(bytes.fromhex(part_checks), CHECKS)
    return checks


@dataclass(frozen=True, slots=True)
class NegativesRecipe:
    """Settings for the source of negatives; examples that already have negatives keep them."""

    # source of the negatives: `bm25` searches with BM25 as in DPR, section 5; `snapshot` searches
    # with `retriever`; `own` uses only the negatives in the file of examples
    search: SearchName = "bm25"
    # retriever expression for `snapshot`; if not set, the snapshot's default is used
    retriever: str | None = None
    mining: MiningSettings = field(default_factory=MiningSettings)
    # number of snapshot passages that are ranked for dev questions together with the passages of
    # the dev set
    ranked: int = 10_000

    def __post_init__(self) -> None:
        check_bounds(self, "[negatives]", {"ranked": 0})


def add_mined_passages(
    examples: Mapping[str, Sequence[Example]],
    snapshot: Snapshot,
    recipe: NegativesRecipe,
    on_progress: OnProgress = lambda _, __: None,
    indexer: Indexer | None = None,
    runner: TaskRunner | None = None,
) -> dict[str, list[Example]]:
    """Mine missing positives and negatives, and return the examples of every set, in order.

    An example with a blank question, or without answers, positives and pages, is unchanged.

    Args:
        examples: the examples by the name of their set.
        snapshot: the snapshot to search.
        recipe: settings of the search and of the selection.
        on_progress: called with the number of finished tasks and the number of all tasks.
        indexer: builds a BM25 index if the snapshot has none; if None, this process builds it.
        runner: searches BM25 and reads texts on workers; if None, this process does both.

    Raises:
        ResourceError: the snapshot has no BM25 index, and the disk has no space to build one.
        UsageError: the retriever expression is wrong.
    """
    examples_by_set = {name: list(set_examples) for name, set_examples in examples.items()}
    minable_keys = [
        (name, position)
        for name, set_examples in examples_by_set.items()
        for position, example in enumerate(set_examples)
        if not (example.positives and example.negatives)
        and example.question.strip()
        and (example.answers or example.positives or example.pages)
    ]
    if recipe.search == "own" or not minable_keys:
        return examples_by_set
    minable_examples = [examples_by_set[name][position] for name, position in minable_keys]
    questions = [example.question for example in minable_examples]
    check_queries(questions)
    if recipe.search == "bm25":
        hit_rows = _search_bm25(questions, snapshot, recipe.mining.depth, indexer, runner)
    else:
        hit_rows = _search_snapshot(questions, snapshot, recipe, on_progress)
    mined_examples = mine_passages(minable_examples, hit_rows, snapshot, recipe.mining, runner, on_progress)
    for (name, position), example in zip(minable_keys, mined_examples, strict=True):
        examples_by_set[name][position] = example
    return examples_by_set


def sample_passages(snapshot: Snapshot, count: int, runner: TaskRunner | None = None) -> list[Passage]:
    """Return up to `count` passages of a snapshot at evenly spaced rows.

    `runner` reads them on workers; if None, this process reads them.
    """
    sampled_rows = np.unique(np.linspace(0, snapshot.n - 1, min(count, snapshot.n), dtype=np.int64))
    return [*read_passages(snapshot, sampled_rows.tolist(), runner).values()]


def estimate_mining_bytes(snapshot: Snapshot, recipe: NegativesRecipe) -> int:
    """Return the estimated memory in bytes of the search for negatives.

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


def _search_bm25(
    questions: Sequence[str], snapshot: Snapshot, depth: int, indexer: Indexer | None, runner: TaskRunner | None
) -> Rows:
    """Return the (q, k) rows of the best passages by BM25, padded with -1."""
    content, store, name = snapshot.manifest.content, snapshot.store, _find_bm25_index(snapshot)
    if name is not None:
        index_ref, entry = content.files[content.index_file(name)], content.indexes[name]
    else:
        plan = _plan_bm25(snapshot)
        index_ref, entry = build_temporary_index(snapshot, plan, indexer=indexer), plan.entry()
    k = min(depth, snapshot.n)
    search_tasks = [
        SearchTask(store.blobs.put_bytes(json.dumps(block).encode()), len(block), index_ref, dict(entry), snapshot.n, k)
        for block in split_batches(questions, _TASK_QUESTIONS)
    ]
    return np.concatenate([np.array(rows, np.int64) for rows in run_tasks(store, search_tasks, runner)])


def _search_snapshot(
    questions: Sequence[str], snapshot: Snapshot, recipe: NegativesRecipe, on_progress: OnProgress
) -> Rows:
    """Return the (q, k) rows of the best passages by the recipe's retriever, padded with -1."""
    retriever, row_batches = open_retriever(snapshot, recipe.retriever), list[Rows]()
    k = min(recipe.mining.depth, retriever.most, snapshot.n)
    for batch in split_batches(questions, _SEARCH_BATCH):
        row_batches.append(retriever.find(Queries(batch), k).rows)
        on_progress(sum(map(len, row_batches)), len(questions))
    return np.concatenate(row_batches)


def _plan_bm25(snapshot: Snapshot) -> IndexPlan:
    return get_kind(_BM25).plan(IndexRecipe("BM25"), snapshot.n, 0)


def _find_bm25_index(snapshot: Snapshot) -> str | None:
    """Return the name of the snapshot's first BM25 index, or None."""
    entries = snapshot.manifest.content.indexes.items()
    return next((name for name, entry in entries if get_kind_of_entry(entry).name == _BM25), None)
