"""The factory of retrievers: the indexes and models that it opens, when it does, and refused expressions."""

import math
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from rag_model.encoders.encoder import AnyEncoder, Encoder
from rag_model.encoders.space import Space
from rag_model.errors import InputError, StoreError, UsageError
from rag_model.index.files.engine import Vectors
from rag_model.retrieve import factory as factories
from rag_model.retrieve.context import RetrieverContext
from rag_model.retrieve.dense import DenseRetriever
from rag_model.retrieve.expression import Call
from rag_model.retrieve.factory import build_retriever, open_retriever, plan_retriever
from rag_model.retrieve.indexes import scores_are_products
from rag_model.retrieve.models import PairScorerCache
from rag_model.retrieve.retriever import ChildRetriever, Queries, RankedRows, SnapshotRetriever
from rag_model.store.pulling.pull import pull
from rag_model.store.store import Store
from rag_model.store.versions.manifest import EMBEDDINGS, Content, Manifest, select_files
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.plugin_package import install_package
from tests.fixtures.tiny import save_bert, save_cross_encoder

ORDERS = [order for n in (2, 3) for order in permutations(("hnsw", "ivfpq", "exact"), n)]
FUSIONS = ", ".join(f"rrf({', '.join(order)})" for order in ORDERS)
QUESTIONS = ["who wrote animal farm?", "which unit measures electric current"]
KEYS = ["rank", "score", "id", "page_id", "title", "section", "text", "url", "revised", "licence", "kind"]


class CountingEncoder:
    """A real encoder that counts how often it is called."""

    def __init__(self, encoder: AnyEncoder) -> None:
        self._encoder = encoder
        self.calls = list[int]()

    def space(self) -> Space:
        return self._encoder.space()

    def encode_questions(self, questions: Sequence[str]) -> Vectors:
        self.calls.append(len(questions))
        return self._encoder.encode_questions(questions)


def test_name_opens_the_index_of_that_name(snapshot: Snapshot, encoder: Encoder) -> None:
    for name in ("hnsw", "ivfpq", "exact"):
        results = open_retriever(snapshot, name, encoder=encoder).search(QUESTIONS, 3)
        assert results == DenseRetriever(snapshot, encoder, name).search(QUESTIONS, 3)
        for hits in results:
            for hit in hits:
                assert [(leg.leg, leg.rank, leg.score) for leg in hit.legs] == [(name, hit.rank, hit.score)]
                assert list(hit.to_json()) == KEYS


def test_without_an_expression_the_default_index_is_opened(content: tuple[Store, Content], snapshot: Snapshot) -> None:
    store, base_content = content
    assert open_retriever(snapshot).search(QUESTIONS, 3) == open_retriever(snapshot, "hnsw").search(QUESTIONS, 3)
    lists = replace(base_content, indexes={"ivfpq": base_content.indexes["ivfpq"]})
    assert lists.default_retriever == "ivfpq"
    assert replace(base_content, indexes={"b": {}, "a": {}}).default_retriever == "a"
    assert replace(base_content, indexes={}).default_retriever == "exact"
    lists_snapshot = Snapshot.from_store(store, store.snapshots.publish(Manifest(lists)))
    assert open_retriever(lists_snapshot).search(QUESTIONS, 1)[0][0].legs[0].leg == "ivfpq"


def test_batch_is_encoded_once_for_all_legs(snapshot: Snapshot, encoder: Encoder) -> None:
    counting = CountingEncoder(encoder)
    retriever = open_retriever(snapshot, "rrf(rrf(hnsw, ivfpq), exact:5)", encoder=counting, products=True)
    assert counting.calls == []
    retriever.search(QUESTIONS, 3)
    assert counting.calls == [2]


def test_parts_of_a_batch_are_encoded_together(snapshot: Snapshot, encoder: Encoder) -> None:
    counting = CountingEncoder(encoder)
    queries = Queries([*QUESTIONS, "what relieves pain?"])
    retriever = open_retriever(snapshot, "hnsw", encoder=counting)
    results = [*retriever.search_queries(queries.subset([2, 0]), 2), *retriever.search_queries(queries.subset([1]), 2)]
    assert counting.calls == [3]
    expected = open_retriever(snapshot, "hnsw", encoder=encoder).search(queries.texts, 2)
    for hits, number in zip(results, (2, 0, 1), strict=True):
        assert [hit.row for hit in hits] == [hit.row for hit in expected[number]]


def test_invalid_expression_is_refused_before_an_encoder_is_loaded(snapshot: Snapshot, tmp_path: Path) -> None:
    missing_folder = str(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="'bm52'"):
        open_retriever(snapshot, f"rerank(rrf(hnsw, bm52), {missing_folder})", encoder=missing_folder)
    with pytest.raises(InputError, match="nowhere"):
        open_retriever(snapshot, "hnsw", encoder=missing_folder)


def test_depth_limits_k_and_does_not_change_hits(snapshot: Snapshot, encoder: Encoder) -> None:
    retriever = open_retriever(snapshot, "exact:8", encoder=encoder)
    assert retriever.search(QUESTIONS, 3) == open_retriever(snapshot, "exact", encoder=encoder).search(QUESTIONS, 3)
    with pytest.raises(UsageError, match="k is 9 but exact gives 8 passages"):
        retriever.search(QUESTIONS, 9)
    deep_retriever = open_retriever(snapshot, "exact:1000000000", encoder=encoder)
    assert len(deep_retriever.search(QUESTIONS, snapshot.n)[0]) == snapshot.n


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("bm25", r"has no index 'bm25': choose one of hnsw, ivfpq, exact"),
        ("rrf(hnsw, bm52)", r"character 11: snapshot \w+ has no index 'bm52': choose one of hnsw, ivfpq, exact"),
        (
            "fuse(hnsw, ivfpq)",
            "character 1: there is no call 'fuse': choose one of interpolate, maxsim, rerank, rrf, where, or",
        ),
        ("hnsw(ivfpq)", "hnsw is an index: it takes only search parameters"),
        ("rrf(hnsw(efSearch=0), ivfpq)", "character 5: efSearch must be at least 1, not 0"),
        ("ivfpq(efSearch=9)", "efSearch is not a search parameter of this index: it takes nprobe"),
        ("hnsw(efSearch=many)", "efSearch of hnsw is many: give a number"),
        ("exact(efSearch=2)", "efSearch is not a search parameter of exact, which has none"),
        ("hnsw(efSearch=1000000)", "efSearch is 1,000,000, but the index holds"),
        ("rrf(hnsw, __import__)", "has no index '__import__'"),
        (f"rrf({FUSIONS})", "more than 16 indexes are searched"),
        ("rerank(hnsw)", "rerank takes a retriever, a model and the number"),
        ("rerank(hnsw, ce, 0)", "argument 3 of rerank is 0: give a whole number from 1 to 1,000"),
        ("rerank(hnsw, ce, 1001)", "argument 3 of rerank is 1001: give a whole number from 1 to 1,000"),
        ("rerank(hnsw, ce, many)", "argument 3 of rerank is many"),
        ("rerank(hnsw, [ce])", r"\[ce\] is not a model"),
        ("rerank(hnsw, ce, 50, 3)", "rerank takes a retriever"),
        ("rerank(hnsw, ce, k=3)", "rerank has no option 'k': it has no options"),
    ],
)
def test_error_of_an_invalid_expression_names_the_choices(snapshot: Snapshot, expression: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_retriever(snapshot, expression)


def test_products_are_those_of_the_stored_vectors(snapshot: Snapshot, encoder: Encoder, tmp_path: Path) -> None:
    model = save_cross_encoder(tmp_path / "cross")
    rows = np.concatenate([snapshot.embeddings(part.name) for part in snapshot.parts]).astype(np.float32)
    products = encoder.encode_questions(QUESTIONS) @ rows.T
    for expression in ("hnsw", "exact", "rrf(hnsw, ivfpq)", f"rerank(hnsw, {model}, 6)"):
        results = open_retriever(snapshot, expression, encoder=encoder, products=True).search(QUESTIONS, 5)
        for number, hits in enumerate(results):
            for hit in hits:
                assert hit.inner_product == pytest.approx(float(products[number, hit.row]), abs=1e-5)
    fused = open_retriever(snapshot, "rrf(hnsw, ivfpq)", encoder=encoder).search(QUESTIONS, 5)
    assert fused[0][0].inner_product is None, "products were not requested"
    reranked = open_retriever(snapshot, f"rerank(hnsw, {model}, 6)", encoder=encoder).search(QUESTIONS, 5)[0]
    assert all(hit.inner_product == hit.legs[0].score for hit in reranked), "the leg has the product"


def test_products_need_vectors_only_if_no_index_returns_them(
    content: tuple[Store, Content], snapshot: Snapshot, encoder: Encoder, tmp_path: Path
) -> None:
    store, base_content = content
    pull(store, snapshot.id, tmp_path, select=select_files(base_content, embeddings=False))
    pulled = Snapshot.from_folder(tmp_path)
    hit = open_retriever(pulled, "hnsw", encoder=encoder, products=True).search(QUESTIONS, 1)[0][0]
    assert hit.inner_product == hit.score
    assert len(open_retriever(pulled, "rrf(hnsw, ivfpq)", encoder=encoder).search(QUESTIONS, 3)[0]) == 3
    with pytest.raises(StoreError, match="was not pulled"):
        open_retriever(pulled, "rrf(hnsw, ivfpq)", encoder=encoder, products=True)
    assert plan_retriever(pulled, "rrf(hnsw, ivfpq)", products=True).vectors == (EMBEDDINGS,)
    assert not plan_retriever(pulled, "hnsw:5", products=True).vectors


@pytest.mark.parametrize(
    ("entry", "exact"),
    [
        ({"factory": "Flat", "metric": "ip"}, True),
        ({"factory": "HNSW32", "metric": "ip"}, True),
        ({"factory": "HNSW32", "metric": "l2"}, False),
        ({"factory": "HNSW32_SQ8", "metric": "ip"}, False),
        ({"factory": "IVF4,Flat", "metric": "ip"}, True),
        ({"factory": "IVF4,PQ4np", "metric": "ip"}, False),
        ({"factory": "IVF4,PQ4np", "metric": "ip", "refine": "vectors"}, True),
        ({"factory": "IVF4,PQ4np,Refine(Flat)", "metric": "ip"}, True),
        ({"factory": "IVF4,PQ4np,Refine(SQ8)", "metric": "ip"}, False),
        ({"kind": "bm25"}, False),
    ],
)
def test_scores_of_codes_and_distances_are_not_inner_products(entry: dict[str, str], exact: bool) -> None:
    assert scores_are_products({"one": entry}, "one") == exact


def test_planning_opens_no_file(content: tuple[Store, Content], tmp_path: Path) -> None:
    store, base_content = content
    bare = Snapshot.from_manifest(store, Manifest(replace(base_content, files={})))
    plan = plan_retriever(bare, "rerank(rrf(ivfpq, exact:5), model:ce, 5)")
    assert (plan.indexes, plan.models) == (("ivfpq", "exact"), ("model:ce",))
    assert plan_retriever(bare, None).indexes == ("hnsw",)


def test_index_is_opened_once(snapshot: Snapshot, encoder: Encoder) -> None:
    context = RetrieverContext(snapshot, lambda: encoder)
    context.open(build_retriever(context, "rrf(hnsw, rrf(hnsw, exact))").needs)
    first = context.index("hnsw")
    context.open(build_retriever(context, "hnsw:3").needs)
    assert context.index("hnsw") is first
    assert context.with_encoder(CountingEncoder(encoder)).index("hnsw") is first


class ReversedRetriever(SnapshotRetriever):
    """A retriever of another package, which returns the worst hits of a leg first."""

    def __init__(self, leg: ChildRetriever) -> None:
        super().__init__(leg.retriever.snapshot, f"reversed({leg.name})")
        self._leg = leg

    def find(self, queries: Queries, k: int) -> RankedRows:
        ranking = self._leg.find(queries, self.snapshot.n)
        return RankedRows(self.name, ranking.rows[:, ::-1], -ranking.scores[:, ::-1], legs=(ranking,)).truncate(k)


def build_reversed(call: Call, factory: factories.RetrieverFactory) -> SnapshotRetriever:
    call.check_options()
    return ReversedRetriever(factory.leg(call.arguments[0]))


def test_package_can_register_a_call(
    snapshot: Snapshot, encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = {"worst": "others_retrieve:build_reversed", "rrf": "others_retrieve:build_reversed"}
    calls = "".join(f"{name} = {target}\n" for name, target in {**targets, "lost": "others_gone:build"}.items())
    install_package(tmp_path, "retrievers", calls)
    (tmp_path / "others_retrieve.py").write_text(f"from {__name__} import build_reversed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(__import__("sys").modules, __name__, __import__("sys").modules[__name__])
    monkeypatch.setattr(factories.CALLS, "_loaded", {})
    assert {point.name for point in entry_points(group=factories.CALLS.group)} == {"worst", "rrf", "lost"}
    hits = open_retriever(snapshot, "rrf(worst(exact), hnsw)", encoder=encoder).search(QUESTIONS, 12)[0]
    ranks = {leg.leg: leg.rank for leg in hits[0].legs}
    assert ranks["exact"] + ranks["reversed(exact)"] == 13
    with pytest.raises(InputError, match=r"retriever 'lost' \(others_gone:build.*\) cannot be imported"):
        open_retriever(snapshot, "lost(hnsw)")
    with pytest.raises(UsageError, match="choose one of interpolate, maxsim, rerank, rrf, where, lost, worst"):
        open_retriever(snapshot, "found(hnsw)")


def test_reranking_orders_by_the_models_scores(snapshot: Snapshot, encoder: Encoder, tmp_path: Path) -> None:
    model = save_cross_encoder(tmp_path / "cross")
    scorer = PairScorerCache().load(str(model))
    candidates = open_retriever(snapshot, "hnsw", encoder=encoder).search(QUESTIONS, 6)
    results = open_retriever(snapshot, f"rerank(hnsw, {model}, 6)", encoder=encoder).search(QUESTIONS, 4)
    for question, question_candidates, hits in zip(QUESTIONS, candidates, results, strict=True):
        passages = [hit.passage for hit in question_candidates]
        scores = scorer.scores(
            [question] * 6, [passage.title for passage in passages], [passage.text for passage in passages]
        )
        order = np.argsort(-scores)[:4]
        assert [hit.row for hit in hits] == [question_candidates[number].row for number in order]
        assert [hit.score for hit in hits] == pytest.approx(scores[order].tolist(), abs=1e-5)
        assert [[(leg.leg, leg.rank) for leg in hit.legs] for hit in hits] == [
            [("hnsw", number + 1)] for number in order.tolist()
        ]
        assert list(hits[0].to_json()) == [*KEYS, "legs"]
    with pytest.raises(UsageError, match=r"k is 7 but rerank\(hnsw, .*\) gives 6 passages.* third argument"):
        open_retriever(snapshot, f"rerank(hnsw, {model}, 6)", encoder=encoder).search(QUESTIONS, 7)
    with pytest.raises(UsageError, match="question 2 is empty"):
        open_retriever(snapshot, "hnsw", encoder=encoder).search(["a", "\u200b\u2060 "], 1)
    deep = open_retriever(snapshot, f"rerank(rrf(hnsw, ivfpq), {model}, 3)", encoder=encoder).search(QUESTIONS, 3)
    assert [leg.leg for leg in deep[0][0].legs] == ["hnsw", "ivfpq", "rrf(hnsw, ivfpq)"]


def test_a_model_that_scores_no_pairs_is_refused(snapshot: Snapshot, encoder: Encoder, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a BertModel, which does not score pairs: give a cross-encoder"):
        open_retriever(snapshot, f"rerank(hnsw, {save_bert(tmp_path / 'bi')})")
    with pytest.raises(StoreError, match="nowhere"):
        open_retriever(snapshot, "rerank(hnsw, model:nowhere)")
    damaged = save_cross_encoder(tmp_path / "broken")
    _write_nan_bias(damaged)
    with pytest.raises(InputError, match="score that is not finite"):
        open_retriever(snapshot, f"rerank(hnsw, {damaged}, 3)", encoder=encoder).search(QUESTIONS, 1)


def _write_nan_bias(folder: Path) -> None:
    from safetensors.numpy import load_file, save_file  # noqa: PLC0415

    tensors = load_file(folder / "model.safetensors")
    tensors["classifier.bias"][:] = math.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
