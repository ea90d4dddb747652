"""Panics of native libraries are not derived from `Exception`: they fail one question, and no thread is lost."""

import threading
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch

from rag_model.index.files.engine import faiss
from rag_model.serving.monitoring.metrics import ServiceMetrics
from rag_model.serving.runtime import SupervisedThread, limit_compute_threads
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Manifest
from rag_model.store.versions.moves import tag
from tests.fixtures.panic_tokenizers import PANIC_TEXT, SLOW_PATTERN, add_split_pattern, make_always_panic
from tests.fixtures.serving import QUICK, TIMEOUT, Library, make_settings, run_service, wait_until
from tests.fixtures.tiny import save_bert
from tests.fixtures.tiny_snapshot import publish_tiny


class PanicError(BaseException):
    """Like a panic of Rust code, this is no `Exception`."""


@pytest.fixture
def fragile_store(tmp_path: Path) -> str:
    """The URL of a store whose encoder panics at some questions."""
    encoder = save_bert(tmp_path / "encoder")
    add_split_pattern(encoder / "tokenizer.json", SLOW_PATTERN)
    store = Store.open(str(tmp_path / "fragile"), create=True)
    (tmp_path / "work").mkdir()
    publish_tiny(store, encoder, {f"river {i}": f"The river of king {i}." for i in range(20)}, tmp_path / "work")
    return store.url


def test_panic_at_a_question_fails_no_other_question(fragile_store: str, dest: Path) -> None:
    with run_service(fragile_store, dest, make_settings(workers=2)) as service:
        replies: dict[str, httpx.Response] = {}

        def ask(question: str) -> None:
            request = {"questions": [question], "k": 1}
            replies[question] = service.client.post("/search", json=request)

        questions = [*(f"{PANIC_TEXT} {i}" for i in range(2)), *(f"who is king {i}?" for i in range(4))]
        threads = [threading.Thread(target=ask, args=(question,)) for question in questions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [replies[question].status_code for question in questions] == [500] * 2 + [200] * 4
        assert set(replies[questions[0]].json()) == {"detail"}
        assert service.client.get("/readyz").status_code == 200
        service.search("who?")


def test_snapshot_with_a_panicking_tokenizer_is_refused(library: Library, dest: Path, tmp_path: Path) -> None:
    content = library.store.snapshots.get(library.blue).content
    file = "encoder/question/tokenizer.json"
    (tmp_path / "tokenizer.json").write_bytes(Path(library.url, content.files[file].path).read_bytes())
    broken_tokenizer = library.store.blobs.put_file(make_always_panic(tmp_path / "tokenizer.json"))
    manifest = Manifest(replace(content, files={**content.files, file: broken_tokenizer}))
    with run_service(library.url, dest) as service:
        tag(library.store, library.store.snapshots.publish(manifest), "latest")
        assert service.wait_until_refused("cannot split a text")["snapshot"] == manifest.id
        assert "\n" not in service.snapshot()["refused"]["reason"]
        service.search("who?")
        library.move(library.blue)
        service.wait_until_served(library.blue)


def test_dead_thread_is_reported_counted_and_restarted(shared_library: Library, dest: Path) -> None:
    metrics = ServiceMetrics(QUICK)
    with run_service(shared_library.url, dest, observer=metrics) as service:
        (thread,) = service.service._search_batcher.threads
        wait_for_batch = service.service._search_batcher._wait_for_batch
        is_broken, messages = threading.Event(), []

        def wait_or_die(sleeper: int, last: int) -> list[object]:
            if is_broken.is_set():
                raise PanicError("out of luck")
            return wait_for_batch(sleeper, last)  # type: ignore[return-value]

        service.service._search_batcher._wait_for_batch = wait_or_die  # type: ignore[method-assign,assignment]
        is_broken.set()
        service.search("who?")  # The thread dies in the next round.
        wait_until(lambda: messages.append(service.client.get("/readyz")) or messages[-1].status_code == 503)  # type: ignore[func-returns-value]
        assert "the thread search died of PanicError" in messages[-1].json()["detail"]
        assert service.client.get("/healthz").status_code == 200
        is_broken.clear()
        wait_until(lambda: service.client.get("/readyz").status_code == 200)
        service.search("who?")
        deaths = [line for line in service.client.get("/metrics").text.splitlines() if "thread_deaths_total" in line]
        assert float(next(line for line in deaths if 'thread="search"' in line).split()[-1]) >= 1
        assert 'bookwheel_thread_deaths_total{thread="follower"} 0.0' in deaths
        assert thread.problem == ""


def test_thread_that_dies_at_shutdown_is_not_restarted() -> None:
    runs, go = [], threading.Event()

    def run() -> None:
        runs.append(go.wait(TIMEOUT))
        raise PanicError

    thread = SupervisedThread("test", run)
    assert thread.problem == ""
    thread.start()
    thread._is_ending.set()
    go.set()
    thread.join()
    assert runs == [True]
    assert "has ended" in thread.problem or "died of PanicError" in thread.problem


def test_each_thread_keeps_its_own_share_of_the_cores() -> None:
    thread_counts: dict[int, list[int]] = {1: [], 3: []}
    set_all = threading.Barrier(2, timeout=TIMEOUT)

    def compute(threads: int) -> None:
        limit_compute_threads(threads)
        set_all.wait()
        thread_counts[threads] += [torch.get_num_threads(), faiss.omp_get_max_threads()]

    initial_threads = torch.get_num_threads()
    workers = [threading.Thread(target=compute, args=(threads,)) for threads in thread_counts]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    torch.set_num_threads(initial_threads)
    assert thread_counts == {1: [1, 1], 3: [3, 3]}
