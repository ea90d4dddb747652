"""Simulated hosts are isolated like containers of one image, and leave no process behind."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.benchmarks.hosts import ROOT, Host, NoHostsError, hosts
from tests.fixtures.machine_requirements import skip_or_fail

START_HOST = """
import signal, subprocess, sys
from pathlib import Path
from tests.benchmarks.hosts import hosts

with hosts(["one"], Path(sys.argv[1]) / "folders", Path(sys.argv[1])) as hosts_by_name:
    host = hosts_by_name["one"]
    print(host.parent.pid, host.init, flush=True)
    host.start(["sleep", "3600"], {}, subprocess.DEVNULL, subprocess.DEVNULL)
    signal.pause()
"""
CURL = "curl --silent --show-error --max-time 5 --connect-timeout 2"
FETCH = f"{CURL} --fail --retry 60 --retry-connrefused --retry-delay 1"


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    folders = tmp_path / "folders"
    folders.mkdir()
    return folders


@pytest.fixture
def pair(folders: Path, tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    try:
        with hosts(["one", "two"], folders, tmp_path) as hosts_by_name:
            yield hosts_by_name["one"], hosts_by_name["two"]
    except NoHostsError as error:
        skip_or_fail("hosts", str(error))


def run_script(host: Host, script: str) -> str:
    """Run a shell script on a host, and return its output."""
    output: str = host.start(["sh", "-c", script], {}, subprocess.PIPE, subprocess.STDOUT).communicate()[0]
    return output


def test_a_host_sees_no_files_and_processes_of_others(pair: tuple[Host, Host], tmp_path: Path) -> None:
    first, second = pair
    (tmp_path / "unseen").touch()
    (second.folder / "unseen").touch()
    assert run_script(first, f"touch made; find {tmp_path} -type f | sort").split() == [
        str(first.folder / name) for name in ("hosts", "made")
    ]
    assert (first.folder / "made").exists()
    assert "Read-only file system" in run_script(first, "touch /var/tmp/new")
    assert run_script(first, "cat /proc/1/comm; hostname") == "cat\none\n"


def test_a_host_reaches_another_by_its_name_until_it_is_lost(pair: tuple[Host, Host]) -> None:
    first, second = pair
    (second.folder / "seen").touch()
    server = second.start([sys.executable, "-m", "http.server", "8000"], {}, subprocess.DEVNULL, subprocess.DEVNULL)
    assert "seen" in run_script(first, f"{FETCH} http://two:8000/")
    assert "Couldn't connect" in run_script(first, f"{CURL} http://localhost:8000/")
    second.lose()
    server.wait()
    curl_output = run_script(first, f"{CURL} http://two:8000/")  # the kernel removes its network after a while
    assert curl_output.startswith("curl: (")
    assert "seen" not in curl_output


def test_hosts_end_with_a_process_that_is_killed(pair: tuple[Host, Host], tmp_path: Path) -> None:
    (tmp_path / "inner" / "folders").mkdir(parents=True)
    command = [sys.executable, "-c", START_HOST, str(tmp_path / "inner")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as starter:
        assert starter.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in starter.stdout.readline().split()]
        starter.kill()
    assert len(processes) == 2
    survivors = [
        process for process in psutil.wait_procs(processes, timeout=300)[1] if process.status() != psutil.STATUS_ZOMBIE
    ]
    assert survivors == []


def test_the_error_names_missing_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    message = "no namespaces without unshare and nsenter and ip: `apt-get install"
    with pytest.raises(NoHostsError, match=message), hosts(["one"], tmp_path, tmp_path):
        pass
