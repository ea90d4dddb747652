"""`maxsim` orders the candidates of a leg and their neighbors in a graph by MaxSim."""

import numpy as np
import pytest

from rag_model.errors import UsageError
from rag_model.index.files.engine import Rows, Vectors
from rag_model.retrieve.factory import plan_retriever
from rag_model.retrieve.rerank import MaxSimRetriever
from rag_model.retrieve.retriever import ChildRetriever, Queries, RankedRows, SnapshotRetriever
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.tiny import save_bert
from tests.fixtures.tiny_snapshot import publish_tiny

N = 40


class Scores:
    """An index of token vectors that returns the row as the score, and records the scored rows."""

    name = "tokens"

    def __init__(self) -> None:
        self.scored: list[int] = []

    def encode(self, queries: Queries) -> Vectors:
        return np.ones((len(queries), 1, 1), np.float32)

    def score(self, query: Vectors, rows: Rows) -> Vectors:
        self.scored += rows.tolist()
        return rows.astype(np.float32)  # the larger the row, the better


class RingGraph:
    """A graph in which each row is linked to the next four."""

    name = "ring"

    def read_links(self, nodes: Rows) -> np.ndarray:
        neighbors = nodes[:, None] + np.arange(1, 5)
        return np.where(neighbors < N, neighbors, -1).astype(np.int32)


class FirstRows(SnapshotRetriever):
    """A retriever that returns the first rows."""

    def find(self, queries: Queries, k: int) -> RankedRows:
        rows = np.tile(np.arange(k), (len(queries), 1))
        return RankedRows(self.name, rows, -rows.astype(np.float32))


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    work = tmp_path_factory.mktemp("snapshot")
    articles = {f"t{n}": f"the river {n} of the city" for n in range(N)}
    return publish_tiny(Store.open(str(work / "store"), create=True), save_bert(work / "bert"), articles, work)


def build(snapshot: Snapshot, depth: int, rounds: int, leg_depth: int | None = None) -> tuple[MaxSimRetriever, Scores]:
    scores = Scores()
    leg = ChildRetriever(FirstRows(snapshot, "first"), leg_depth)
    return MaxSimRetriever("maxsim(first, tokens)", leg, scores, RingGraph(), depth, rounds), scores


@pytest.mark.parametrize(("rounds", "best"), [(0, 3), (1, 7), (2, 11), (3, 15)])
def test_each_round_adds_the_neighbours_of_the_best(snapshot: Snapshot, rounds: int, best: int) -> None:
    retriever, scores = build(snapshot, 30, rounds, 4)
    ranking = retriever.find(Queries(["x", "y"]), 3)
    assert ranking.rows.tolist() == [[best, best - 1, best - 2]] * 2
    assert ranking.scores.tolist() == [[best, best - 1, best - 2]] * 2
    assert len(scores.scored) == 2 * len(set(scores.scored))  # once for each query
    assert [leg.name for leg in ranking.legs] == ["first", "neighbours(ring)"]
    hit = retriever.search(["x"], 3)[0][0]
    assert [leg.leg for leg in hit.legs] == (["neighbours(ring)"] if rounds else ["first"])


def test_at_most_the_depth_is_scored(snapshot: Snapshot) -> None:
    for depth in (1, 2, 5, 10):
        for rounds in (0, 1, 2):
            retriever, scores = build(snapshot, depth, rounds)
            retriever.find(Queries(["x"]), 1)
            assert len(scores.scored) == len(set(scores.scored)) <= depth
            assert retriever.most == depth


def test_equal_scores_are_ordered_by_row_and_lists_end(snapshot: Snapshot) -> None:
    retriever, scores = build(snapshot, 6, 0, 6)
    scores.score = lambda question, rows: np.where(rows == 2, -np.inf, 1).astype(np.float32)  # type: ignore[method-assign]
    assert retriever.find(Queries(["x"]), 6).rows.tolist() == [[0, 1, 3, 4, 5, -1]]
    assert len(retriever.search(["x"], 6)[0]) == 5
    with pytest.raises(UsageError, match="gives 6 passages"):
        retriever.search(["x"], 7)


def test_invalid_calls_of_maxsim_are_refused(snapshot: Snapshot) -> None:
    for expression, message in (
        ("maxsim(hnsw, hnsw)", "hnsw is not an index over token vectors: the snapshot has none, add one to its recipe"),
        ("maxsim(hnsw, hnsw, 0)", "is not an index over token vectors"),
        ("maxsim(hnsw)", "maxsim takes a retriever, an index over token vectors"),
        ("maxsim(hnsw, hnsw, 5, near=2)", "maxsim has no option 'near': its options are graph and rounds"),
        ("maxsim(nothing, hnsw)", "has no index 'nothing'"),
    ):
        with pytest.raises(UsageError, match="character"):
            plan_retriever(snapshot, expression)
        with pytest.raises(UsageError) as error:
            plan_retriever(snapshot, expression)
        assert message in str(error.value)
