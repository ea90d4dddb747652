"""The hosts of the tests share what an image shares, and leave nothing behind."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.benchmarks.hosts import ROOT, Host, NoHostsError, hosts
from tests.fixtures.machine_requirements import missing

MAKER = """
import signal, sys
from pathlib import Path
from tests.benchmarks.hosts import hosts

with hosts(["one"], Path(sys.argv[1]) / "folders", Path(sys.argv[1])) as made:
    print(made["one"].parent.pid, made["one"].init, flush=True)
    made["one"].start(["sleep", "3600"], {}, subprocess.DEVNULL, subprocess.DEVNULL)
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
        with hosts(["one", "two"], folders, tmp_path) as made:
            yield made["one"], made["two"]
    except NoHostsError as refused:
        missing("hosts", str(refused))


def said(host: Host, script: str) -> str:
    """Return what a script prints there."""
    told: str = host.start(["sh", "-c", script], {}, subprocess.PIPE, subprocess.STDOUT).communicate()[0]
    return told


def test_a_host_sees_no_file_and_no_process_of_others(pair: tuple[Host, Host], tmp_path: Path) -> None:
    one, two = pair
    (tmp_path / "unseen").touch()
    (two.folder / "unseen").touch()
    assert said(one, f"touch made; find {tmp_path} -type f | sort").split() == [
        str(one.folder / name) for name in ("hosts", "made")
    ]
    assert (one.folder / "made").exists()
    assert "Read-only file system" in said(one, "touch /var/tmp/left")
    assert said(one, "cat /proc/1/comm; hostname") == "cat\none\n"


def test_a_host_reaches_another_by_its_name_until_that_one_is_lost(pair: tuple[Host, Host]) -> None:
    one, two = pair
    (two.folder / "seen").touch()
    server = two.start([sys.executable, "-m", "http.server", "8000"], {}, subprocess.DEVNULL, subprocess.DEVNULL)
    assert "seen" in said(one, f"{FETCH} http://two:8000/")
    assert "Couldn't connect" in said(one, f"{CURL} http://localhost:8000/")
    two.lose()
    server.wait()
    lost = said(one, f"{CURL} http://two:8000/")  # refused for as long as the kernel takes to remove its network
    assert lost.startswith("curl: (")
    assert "seen" not in lost


def test_hosts_end_with_a_process_that_is_killed(pair: tuple[Host, Host], tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "folders").mkdir()
    words = [sys.executable, "-c", f"import subprocess\n{MAKER}", str(tmp_path / "inner")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as maker:
        assert maker.stdout is not None
        started = [psutil.Process(int(pid)) for pid in maker.stdout.readline().split()]
        maker.kill()
    assert len(started) == 2
    left = [one for one in psutil.wait_procs(started, timeout=300)[1] if one.status() != psutil.STATUS_ZOMBIE]
    assert left == []


def test_without_the_tools_a_sentence_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    without = pytest.raises(NoHostsError, match="no namespaces without unshare and nsenter and ip: `apt-get install")
    with without, hosts(["one"], tmp_path, tmp_path):
        pass
