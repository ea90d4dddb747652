"""`bookwheel doctor` reports all checks, and failed ones with their repair."""

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
    """Answers as a JobManager does; other paths are unknown."""

    server: Any

    def do_GET(self) -> None:
        reply = self.server.replies.get(self.path)
        self.send_response(404 if reply is None else 200)
        self.end_headers()
        self.wfile.write(b"no" if reply is None else json.dumps(reply).encode())

    def log_message(self, *_: Any) -> None:
        """Do not print requests."""


@pytest.fixture
def job_manager() -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Flink) as server:
        server.replies = {  # type: ignore[attr-defined]
            "/overview": {"flink-version": "1.19.3", "slots-available": 2},
            "/jobmanager/config": [{"key": "restart-strategy.type", "value": "fixed-delay"}],
        }
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def flink(job_manager: Any) -> str:
    return f"127.0.0.1:{job_manager.server_port}"


def index_findings(result: Any) -> dict[str, Any]:
    return {finding["what"]: finding for finding in result.json["findings"]}


def test_a_complete_machine_and_store_have_no_failed_check(bookwheel: Any, tmp_path: Path) -> None:
    Store.open(str(tmp_path / "store"), create=True)
    result = bookwheel("doctor", "--store", str(tmp_path / "store"), "--json")
    findings = index_findings(result)
    assert findings["store, conditional create"]["ok"]
    assert findings["faiss"]["ok"]
    assert findings["faiss"]["found"] in [f"{name} {version}" for name, version in list_faiss_packages().items()]
    assert {"memory", "disk, cache", "gpu", "prefect", "beam", "store, clock"} <= set(findings)


def test_a_process_prints_only_its_findings(command: Callable[..., Any]) -> None:
    result = command("doctor")
    assert result.out.startswith("ok    bookwheel")
    assert result.err == ""


def test_failed_checks_are_named_with_their_repair(bookwheel: Any, tmp_path: Path) -> None:
    flags = ["--", "--runner=FlinkRunner", "--flink_master=127.0.0.1:9", "--sdk_container_image=elsewhere:0.0"]
    result = bookwheel("doctor", "--store", str(tmp_path / "none"), *flags)
    assert result.code == 3
    for name, todo in (("store", "correct this"), ("flink", "start the cluster"), ("beam, image", "use the image")):
        (line,) = [
            line for line in result.out.splitlines() if line.split("  ")[0].removeprefix("AMISS").strip() == name
        ]
        assert todo in line
    assert "checks failed" in result.err


def test_a_suitable_cluster_passes_all_checks(bookwheel: Any, flink: str) -> None:
    flags = ["--runner=FlinkRunner", f"--flink_master={flink}", "--flink_version=1.19", "--parallelism=2"]
    findings = index_findings(bookwheel("doctor", "--json", "--", *flags))
    assert all(findings[name]["ok"] for name in ("flink", "flink, version", "flink, restarts"))
    assert "2 free slots" in findings["flink"]["found"]


def test_an_unsuitable_cluster_fails_its_checks(bookwheel: Any, job_manager: Any, flink: str) -> None:
    job_manager.replies["/jobmanager/config"] = []
    flags = ["--runner=FlinkRunner", f"--flink_master={flink}", "--parallelism=3", "--job_server_java_launcher=no-java"]
    findings = index_findings(bookwheel("doctor", "--json", "--", *flags))
    repairs = {"flink": "--parallelism=3", "flink, version": "--flink_version=1.19", "flink, restarts": "fixed-delay"}
    for name, expected in {**repairs, "flink, java": "install Java"}.items():
        assert not findings[name]["ok"]
        assert expected in findings[name]["todo"]


def test_an_unreachable_prefect_server_is_reported(bookwheel: Any, flink: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", f"http://{flink}/api")
    finding = index_findings(bookwheel("doctor", "--json"))["prefect"]
    assert not finding["ok"]
    assert "prefect server start" in finding["todo"]


@pytest.mark.usefixtures("prefect_server")
def test_a_prefect_server_with_leases_in_memory_is_reported(bookwheel: Any) -> None:
    assert "its leases are in memory" in index_findings(bookwheel("doctor", "--json"))["prefect"]["found"]


def test_an_untested_version_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.machine.doctor.requires", lambda _: ["numpy>=900", "no-such-thing>=1"])
    (_, finding) = check_versions()
    assert (finding.what, finding.ok, finding.todo) == ("numpy", False, "pip install 'numpy>=900'")


@pytest.mark.parametrize(
    ("packages", "ok", "description", "todo"),
    [
        ({"faiss-gpu": "1.15.1"}, True, "faiss-gpu 1.15.1", ""),
        ({"faiss-gpu": "1.9.0"}, False, "faiss-gpu 1.9.0", "pip install 'faiss-gpu<1.16,>=1.15.1'"),
        ({}, False, "none", "pip install 'faiss-cpu<1.16,>=1.15.1'"),
    ],
)
def test_any_single_faiss_package_of_a_tested_version_passes(
    packages: dict[str, str], ok: bool, description: str, todo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.machine.doctor.list_faiss_packages", lambda: packages)
    (finding,) = (finding for finding in check_versions() if finding.what == "faiss")
    assert (finding.ok, finding.found) == (ok, description)
    assert todo in finding.todo
