"""Retrievers over HTTP: given on the command line, composed by requests, or refused."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rag_model.client.replies import SearchReply
from rag_model.errors import UsageError
from rag_model.reading.answer import answer_json
from rag_model.reading.model import open_reader
from rag_model.retrieve.factory import open_retriever
from rag_model.serving.answering import available_retrievers
from rag_model.serving.answering.available_retrievers import AvailableRetrievers
from rag_model.serving.http import messages
from rag_model.serving.monitoring.metrics import ServiceMetrics
from rag_model.serving.monitoring.quality import MonitorSettings, QualityMonitor
from rag_model.serving.settings import ServiceSettings
from rag_model.store.pulling.pull import pull
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.serving import (
    HttpService,
    Library,
    SearchGate,
    make_settings,
    round_floats,
    run_service,
    wait_until,
)
from tests.fixtures.tiny import save_bert, save_cross_encoder
from tests.fixtures.tiny_rag import save_tiny_rag
from tests.fixtures.tiny_snapshot import publish_tiny

QUESTIONS = ["who was the king of the river?", "born in city number 7"]
FUSED = "rrf(hnsw, exact:7, k=10)"


@pytest.fixture(scope="module")
def cross(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_cross_encoder(tmp_path_factory.mktemp("cross") / "model")


@pytest.fixture(scope="module")
def service(
    shared_library: Library, model: Path, cross: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HttpService]:
    settings = make_settings(retrievers=(FUSED, f"rerank(hnsw, {cross}, 6)", "hnsw"), max_depth=50)
    with run_service(shared_library.url, tmp_path_factory.mktemp("dest"), settings, model=str(model)) as service:
        yield service


@pytest.mark.parametrize("expression", [None, FUSED, "hnsw", "exact", " rrf(exact:3,hnsw , weights=[2,1]) ", "hnsw:50"])
def test_request_may_name_or_compose_served_retrievers(
    expression: str | None, service: HttpService, shared_library: Library
) -> None:
    body = {"questions": QUESTIONS, "k": 4, **({} if expression is None else {"retriever": expression})}
    reply = service.client.post("/search", json=body).json()
    with Snapshot.open(shared_library.url) as snapshot:
        hit_lists = open_retriever(snapshot, expression or FUSED).search(QUESTIONS, 4)
    hits = [[hit.to_json() for hit in ranked] for ranked in hit_lists]
    assert [result["hits"] for result in reply["results"]] == round_floats(hits)
    assert messages.create_model(SearchReply).model_validate(reply).model_dump(mode="json") == reply
    assert ("legs" in hits[0][0]) == (expression is None or "rrf" in expression)


def test_request_may_name_a_served_reranker(service: HttpService, shared_library: Library, cross: Path) -> None:
    expression = f"rerank(hnsw,{cross},6)"
    reply = service.client.post("/search", json={"questions": QUESTIONS, "k": 4, "retriever": expression}).json()
    with Snapshot.open(shared_library.url) as snapshot:
        hits = open_retriever(snapshot, expression).search(QUESTIONS, 4)
    assert [r["hits"] for r in reply["results"]] == round_floats([[hit.to_json() for hit in ranked] for ranked in hits])


@pytest.mark.parametrize("composition", [None, "hnsw", "rrf(hnsw, exact)", "rerank"])
def test_answers_are_weighted_by_inner_products_for_every_retriever(
    composition: str | None, service: HttpService, shared_library: Library, model: Path, cross: Path
) -> None:
    expression = f"rerank(hnsw, {cross}, 6)" if composition == "rerank" else composition
    body = {"questions": QUESTIONS, "k": 4, **({} if expression is None else {"retriever": expression})}
    reply = service.client.post("/answer", json=body).json()
    with Snapshot.open(shared_library.url) as snapshot:
        _, reader = open_reader(snapshot, shared_library.url, str(model), expression or FUSED)
        assert reply["answers"] == round_floats([answer_json(answer) for answer in reader.answer(QUESTIONS, 4)])
        _, exact = open_reader(snapshot, shared_library.url, str(model), "exact")
        expected = {entry.hit.passage.id: entry.weight for entry in exact.answer(QUESTIONS[:1], snapshot.n)[0].support}
    weights = {passage["id"]: passage["weight"] for passage in reply["answers"][0]["passages"]}
    total = sum(expected[passage] for passage in weights)
    assert weights == {passage: pytest.approx(expected[passage] / total, abs=1e-3) for passage in weights}


def test_snapshot_reply_lists_retrievers_and_indexes(service: HttpService, cross: Path) -> None:
    state = service.snapshot()
    assert state["retrievers"] == [FUSED, f"rerank(hnsw, {cross}, 6)", "hnsw"]
    assert state["indexes"] == ["hnsw", "exact"]


INVALID = [
    ("", "the retriever is empty"),
    ("bm25", "index 'bm25' is not served here: choose one of hnsw, exact"),
    ("rrf(hnsw, ivfpq)", "at character 11: index 'ivfpq' is not served here"),
    ("fuse(hnsw, exact)", "there is no call 'fuse': choose one of interpolate, maxsim, rerank, rrf, where"),
    ("rerank(hnsw, /etc, 5)", "a request may not name a model"),
    ("rrf(hnsw, exact", "at character 4: the bracket '(' is not closed: add ')'"),
    ("hnsw)", "should end here"),
    ("x" * 4_000, "has 4,000 characters: use at most 1,000"),
    ("rrf(" * 240, "nested more than 8 levels deep"),
    ("rrf(" * 20 + "hnsw" + ")" * 20, "nested more than 8 levels deep"),
    ("hnsw:-1", "the depth of 'hnsw' is -1 passages"),
    ("hnsw:51", "hnsw:51 asks for 51 passages: ask for at most 50 here"),
    ("rrf(hnsw, exact:1000000)", "ask for at most 50 here"),
    ("rrf(hnsw, exact, k=0)", "k of rrf is 0"),
    ("rrf(hnsw, exact, weights=[1])", "weights of rrf is a list of 1 for 2 retrievers"),
    ("rrf(hnsw, hnsw)", "the retriever hnsw is given twice"),
    ("hnsw:2", "k is 4 but hnsw gives 2 passages"),
    ("\ud800", "not JSON"),
]


@pytest.mark.parametrize(
    ("path", "expression", "words"),
    [*(("/search", *case) for case in INVALID), ("/answer", *INVALID[0]), ("/answer", *INVALID[-1])],
    ids=range(len(INVALID) + 2),
)
def test_bad_retriever_is_explained_in_one_sentence(
    service: HttpService, path: str, expression: str, words: str
) -> None:
    body = json.dumps({"questions": ["a"], "k": 4, "retriever": expression})
    reply = service.client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400, reply.text
    assert words in reply.json()["detail"]
    assert "\n" not in reply.json()["detail"]
    assert len(reply.json()["detail"]) < 300


def test_index_is_a_short_form_of_retriever(service: HttpService) -> None:
    for body in ({"index": "exact"}, {"index": "exact", "retriever": "exact "}):
        assert service.client.post("/search", json={"questions": ["a"], **body}).status_code == 200
    reply = service.client.post("/search", json={"questions": ["a"], "index": "exact", "retriever": "hnsw"})
    assert (reply.status_code, "are both given" in reply.text) == (400, True)
    reply = service.client.post("/search", json={"questions": ["a"], "retriever": 5})
    assert (reply.status_code, "retriever" in reply.json()["detail"]) == (422, True)


def test_questions_of_one_batch_are_grouped_by_retriever(shared_library: Library, dest: Path) -> None:
    gate = SearchGate()
    with run_service(shared_library.url, dest, make_settings(retrievers=("hnsw", "exact")), gate) as http_service:
        service = http_service.service
        gate.open.clear()

        async def search_all() -> list[Any]:
            blocking = asyncio.ensure_future(service.search(["held"], 1))
            await asyncio.to_thread(gate.is_waiting.wait)
            searches = [
                asyncio.ensure_future(service.search([text], k, retriever))
                for text, k, retriever in [
                    ("a", 1, None),
                    ("b", 2, "exact"),
                    ("c", 3, None),
                    ("d", 4, "rrf(hnsw, exact)"),
                    ("e", 5, "none"),
                ]
            ]
            while service._search_batcher.queued_questions < len(searches):
                await asyncio.sleep(0)
            gate.open.set()
            return list(await asyncio.gather(blocking, *searches, return_exceptions=True))

        _, a, b, c, d, e = asyncio.run(search_all())
        assert [len(result.hits[0]) for result in (a, b, c, d)] == [1, 2, 3, 4]
        assert str(e).startswith("index 'none' is not served here")
        assert gate.batches[1:] == [["a", "c"], ["b"], ["d"]]
        assert [leg.leg for leg in d.hits[0][0].legs] == ["hnsw", "exact"]


def test_without_vectors_only_answers_that_need_them_are_refused(
    shared_library: Library, dest: Path, tmp_path: Path
) -> None:
    model = str(save_tiny_rag(tmp_path / "rag", shared_library.encoder))
    with run_service(shared_library.url, dest, make_settings(pull_embeddings=False), model=model) as service:
        assert service.client.post("/answer", json={"questions": ["a"]}).status_code == 200
        reply = service.client.post("/search", json={"questions": ["a"], "retriever": "exact"})
        assert (reply.status_code, "not served here" in reply.text) == (400, True)


def test_collapse_but_not_recall_is_monitored_for_a_fused_default(shared_library: Library, dest: Path) -> None:
    quality = QualityMonitor(MonitorSettings(window=8, min_samples=2, sample_every=1, samples=2, share=1))
    metrics = ServiceMetrics(ServiceSettings(), quality)
    with run_service(shared_library.url, dest, make_settings(retrievers=("rrf(hnsw, exact)",)), metrics) as service:
        service.search("who?", "the king", "a river", "born")
        wait_until(lambda: "search" in metrics.quality.compute_metrics().collapse)
        assert not quality._state or not quality._state.has_task
        assert metrics.quality.compute_metrics().recall_mean is None
        assert metrics.served_snapshot is not None
        assert metrics.served_snapshot.index == "rrf(hnsw, exact)"


ARTICLES = {f"Town {number}": f"The town {number} has a mill by river {number % 5}." for number in range(40)}
ALL_RETRIEVERS = ["hnsw", "bm25", "flat", "rrf(hnsw, bm25)"]


@pytest.fixture(scope="module")
def several_indexes(tmp_path_factory: pytest.TempPathFactory) -> Store:
    encoder = save_bert(tmp_path_factory.mktemp("bert"))
    store = Store.open(str(tmp_path_factory.mktemp("several")), create=True)
    recalls = {name: {"recall@20": recall, "recall@20_p5": 0.9} for name, recall in (("hnsw", 0.985), ("flat", 0.953))}
    work = tmp_path_factory.mktemp("work")
    publish_tiny(store, encoder, ARTICLES, work, bm25=True, more_indexes={"flat": "Flat"}, metrics=recalls)
    return store


def test_a_question_without_hits_is_monitored_at_the_default_depth(several_indexes: Store, dest: Path) -> None:
    quality = QualityMonitor(MonitorSettings(window=8, min_samples=2, sample_every=1, samples=2, share=1))
    metrics = ServiceMetrics(ServiceSettings(), quality)
    with run_service(several_indexes.url, dest, make_settings(retrievers=("bm25",)), metrics) as service:
        reply = service.client.post("/search", json={"questions": ["xyzzy", "qwertz", "the mill of town 7"]}).json()
        assert [len(result["hits"]) for result in reply["results"]] == [0, 0, 5]
        state = quality._state
        wait_until(
            lambda: (
                quality.compute_metrics().recall_mean is not None
                or quality._state is None
                or (state is not None and state.has_exact_search_failed)
            )
        )
        assert quality.compute_metrics().recall_mean == 1


def test_all_indexes_and_the_fusion_with_bm25_are_served_by_default(several_indexes: Store, dest: Path) -> None:
    with run_service(several_indexes.url, dest) as service:
        assert service.snapshot()["retrievers"] == ALL_RETRIEVERS
        assert service.snapshot()["indexes"] == ["hnsw", "bm25", "flat"]
        for retriever in [None, *ALL_RETRIEVERS]:
            body = {"questions": ["the mill of town 7"], "k": 3, "retriever": retriever}
            reply = service.client.post("/search", json=body).json()
            with Snapshot.open(several_indexes.url) as snapshot:
                hits = open_retriever(snapshot, retriever or "hnsw").search(body["questions"], 3)
            assert reply["results"][0]["hits"] == round_floats([hit.to_json() for hit in hits[0]])


def test_a_pulled_folder_offers_the_indexes_that_were_pulled(several_indexes: Store, dest: Path) -> None:
    pull(several_indexes, "latest", dest, select=lambda file: file != "index/flat.faiss")
    with Snapshot.from_folder(dest) as snapshot:
        plan = AvailableRetrievers.plan(snapshot, make_settings(), uses_inner_products=False)
    assert plan.retrievers == ("hnsw", "bm25", "rrf(hnsw, bm25)")


def test_an_index_that_is_not_served_is_refused_with_the_option_that_serves_it(
    several_indexes: Store, dest: Path
) -> None:
    with run_service(several_indexes.url, dest, make_settings(retrievers=("hnsw",))) as service:
        reply = service.client.post("/search", json={"questions": ["a"], "k": 1, "retriever": "bm25"})
    assert reply.json()["detail"].endswith("choose one of hnsw, or start the service with --retriever bm25")


@pytest.mark.parametrize(("free_bytes", "indexes"), [(None, ["hnsw", "bm25", "flat"]), (0, ["hnsw"])])
def test_an_index_that_does_not_fit_into_memory_is_left_out(
    free_bytes: int | None, indexes: list[str], several_indexes: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(available_retrievers, "get_free_bytes", lambda: free_bytes)
    with Snapshot.open(several_indexes.url) as snapshot:
        plan = AvailableRetrievers.plan(snapshot, make_settings(in_memory=True), uses_inner_products=False)
    assert list(plan.indexes) == indexes


def test_the_index_with_the_most_recall_that_fits_into_the_allowed_memory_is_the_default(
    several_indexes: Store, dest: Path
) -> None:
    with Snapshot.open(several_indexes.url) as snapshot:
        content = snapshot.manifest.content
        encoder = sum(ref.size for path, ref in content.files.items() if path.startswith("encoder/question/"))
        base = encoder + available_retrievers._LIBRARY_BYTES

        def plan(memory_bytes: int, *retrievers: str, processes: int = 1) -> AvailableRetrievers:
            settings = make_settings(memory_bytes=memory_bytes, retrievers=retrievers, processes=processes)
            return AvailableRetrievers.plan(snapshot, settings, uses_inner_products=False)

        sizes = {name: content.files[content.index_file(name)].size for name in ("hnsw", "flat", "bm25")}
        decoded = 15 * sizes["bm25"]
        total_bytes = base + sum(sizes.values()) + decoded
        assert plan(total_bytes).retrievers == ("hnsw", "bm25", "flat", "rrf(hnsw, bm25)")
        assert "bm25" not in plan(total_bytes - sizes["flat"] - 1).retrievers
        assert plan(total_bytes + base + decoded, processes=2).retrievers == plan(total_bytes).retrievers
        assert "bm25" not in plan(total_bytes + base + decoded - sizes["flat"] - 1, processes=2).retrievers
        small_plan = plan(base + sizes["hnsw"] - 1)
        assert small_plan.retrievers == ("flat", "bm25", "rrf(flat, bm25)")
        assert [re.sub(r"needs .* are allowed", "…", note) for note in small_plan.notes] == [
            "hnsw is not served: it …; flat has recall@20 0.953, hnsw has 0.985"
        ]
        with pytest.raises(UsageError, match=r"hnsw of snapshot .* need .*, and --memory allows"):
            plan(base + sizes["hnsw"] - 1, "hnsw")
        with pytest.raises(UsageError, match=r"the smallest index of snapshot .* is .*, which needs"):
            plan(available_retrievers._LIBRARY_BYTES)
    with run_service(several_indexes.url, dest, make_settings(memory_bytes=base + sizes["hnsw"] - 1)) as service:
        state = service.snapshot()
        assert state["notes"] == list(small_plan.notes)
        assert state["explanations"] == [
            "by meaning: compares the question with every passage; recall@20 0.953",
            "by the words of the question; rare words count more",
            "joins the rankings of flat and bm25",
        ]
        assert service.search("king", k=2)["results"][0]["hits"]
