"""`bookwheel doctor`: what is well is said, what is amiss is said with what to do."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from flows.machine.doctor import check_versions
from rag_model.extras import list_faiss_packages
from rag_model.store.store import Store


class _Flink(BaseHTTPRequestHandler):
    """What a JobManager answers of itself; everything else is unknown."""

    server: Any

    def do_GET(self) -> None:
        said = self.server.said.get(self.path)
        self.send_response(404 if said is None else 200)
        self.end_headers()
        self.wfile.write(b"no" if said is None else json.dumps(said).encode())

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def job_manager() -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Flink) as server:
        server.said = {  # type: ignore[attr-defined]
            "/overview": {"flink-version": "1.19.3", "slots-available": 2},
            "/jobmanager/config": [{"key": "restart-strategy.type", "value": "fixed-delay"}],
        }
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def flink(job_manager: Any) -> str:
    return f"127.0.0.1:{job_manager.server_port}"


def of(ran: Any) -> dict[str, Any]:
    return {finding["what"]: finding for finding in ran.json["findings"]}


def test_a_sound_machine_and_store(bookwheel: Any, tmp_path: Path) -> None:
    Store.open(str(tmp_path / "store"), create=True)
    result = bookwheel("doctor", "--store", str(tmp_path / "store"), "--json")
    found = of(result)
    assert found["store, conditional create"]["ok"]
    assert found["faiss"]["ok"]
    assert found["faiss"]["found"] in [f"{name} {own}" for name, own in list_faiss_packages().items()]
    assert {"memory", "disk, cache", "gpu", "prefect", "beam", "store, clock"} <= set(found)


def test_a_process_says_nothing_but_its_findings(command: Callable[..., Any]) -> None:
    result = command("doctor")
    assert result.out.startswith("ok    bookwheel")
    assert result.err == ""


def test_what_is_amiss_is_named_with_what_to_do(bookwheel: Any, tmp_path: Path) -> None:
    flags = ["--", "--runner=FlinkRunner", "--flink_master=127.0.0.1:9", "--sdk_container_image=elsewhere:0.0"]
    result = bookwheel("doctor", "--store", str(tmp_path / "none"), *flags)
    assert result.code == 3
    for what, todo in (("store", "correct this"), ("flink", "start the cluster"), ("beam, image", "use the image")):
        (line,) = [
            line for line in result.out.splitlines() if line.split("  ")[0].removeprefix("AMISS").strip() == what
        ]
        assert todo in line
    assert "checks failed" in result.err


def test_a_cluster_that_answers(bookwheel: Any, flink: str) -> None:
    flags = ["--runner=FlinkRunner", f"--flink_master={flink}", "--flink_version=1.19", "--parallelism=2"]
    found = of(bookwheel("doctor", "--json", "--", *flags))
    assert all(found[what]["ok"] for what in ("flink", "flink, version", "flink, restarts"))
    assert "2 free slots" in found["flink"]["found"]


def test_a_cluster_that_would_keep_a_job_waiting_or_drop_it(bookwheel: Any, job_manager: Any, flink: str) -> None:
    job_manager.said["/jobmanager/config"] = []
    flags = ["--runner=FlinkRunner", f"--flink_master={flink}", "--parallelism=3", "--job_server_java_launcher=no-java"]
    found = of(bookwheel("doctor", "--json", "--", *flags))
    todo = {"flink": "--parallelism=3", "flink, version": "--flink_version=1.19", "flink, restarts": "fixed-delay"}
    for what, expected in {**todo, "flink, java": "install Java"}.items():
        assert not found[what]["ok"]
        assert expected in found[what]["todo"]


def test_a_prefect_server_that_does_not_answer(bookwheel: Any, flink: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", f"http://{flink}/api")
    found = of(bookwheel("doctor", "--json"))["prefect"]
    assert not found["ok"]
    assert "prefect server start" in found["todo"]


@pytest.mark.usefixtures("prefect_server")
def test_a_prefect_server_whose_restart_would_end_runs(bookwheel: Any) -> None:
    assert "its leases are in memory" in of(bookwheel("doctor", "--json"))["prefect"]["found"]


def test_a_version_that_was_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.machine.doctor.requires", lambda _: ["numpy>=900", "no-such-thing>=1"])
    (_, finding) = check_versions()
    assert (finding.what, finding.ok, finding.todo) == ("numpy", False, "pip install 'numpy>=900'")


@pytest.mark.parametrize(
    ("found", "ok", "says", "todo"),
    [
        ({"faiss-gpu": "1.15.1"}, True, "faiss-gpu 1.15.1", ""),
        ({"faiss-gpu": "1.9.0"}, False, "faiss-gpu 1.9.0", "pip install 'faiss-gpu<1.16,>=1.15.1'"),
        ({}, False, "none", "pip install 'faiss-cpu<1.16,>=1.15.1'"),
    ],
)
def test_one_faiss_is_sound_whichever_it_is(
    found: dict[str, str], ok: bool, says: str, todo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.machine.doctor.list_faiss_packages", lambda: found)
    (finding,) = (one for one in check_versions() if one.what == "faiss")
    assert (finding.ok, finding.found) == (ok, says)
    assert todo in finding.todo
