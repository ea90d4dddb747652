"""Processes reuse or release freed memory, by the kernel's counts, and children are bounded and explain their death."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rag_model.errors import BookwheelError, InputError, StoreError
from rag_model.process import ChildDiedError, is_allocator_configured, run_in_child

_CHILD = """
import resource, sys, threading
from rag_model.process import trim_memory, release_freed_memory, keep_freed_memory

def get_resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() >> 20

def allocate_layers():
    blocks = [bytearray(b"x") * (8 << 20) for _ in range(6)]

def print_faults():
    allocate_layers(), allocate_layers()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        allocate_layers()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, get_resident_mib())

is_applied = None
for setting in sys.argv[1].split("-"):
    is_applied = {"plain": lambda: None, "reuse": keep_freed_memory, "release": release_freed_memory}[setting]()
work = threading.Thread(target=print_faults)
work.start() if sys.argv[2] == "thread" else work.run()
work.join() if sys.argv[2] == "thread" else None
trim_memory()
print(is_applied, get_resident_mib())
"""
_ALLOCATE_BESIDE_SMALL_BLOCKS = """
import resource, sys
from rag_model.process import release_freed_memory

result = release_freed_memory() if sys.argv[1] == "release" else None
del [bytearray(b"x") * (8 << 20) for _ in range(2)][:]  # from now on glibc takes such blocks from its heap
pairs = []
for _ in range(12):
    block = bytearray(b"x") * (8 << 20)
    pairs.append((bytearray(b"x") * (256 << 10), block))
small_blocks = [small_block for small_block, _ in pairs]
del pairs, block
print(result, int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() >> 20)
"""
_GLIBC = "CS_GNU_LIBC_VERSION" in getattr(os, "confstr_names", {}) and bool(os.confstr("CS_GNU_LIBC_VERSION"))
_LAYERS_MIB, _HEAP_MIB = 48, 64  # memory of six blocks, and of a thread's heap
_ENVIRONMENT = {name: value for name, value in os.environ.items() if not is_allocator_configured({name: value})}


def run_allocations(settings: str, thread: str, **environment: str) -> tuple[int, int, str, int]:
    """Return the page faults of five rounds, the MiB after them, the result of the last setting, and the final MiB."""
    process = subprocess.run(
        [sys.executable, "-c", _CHILD, settings, thread],
        env=_ENVIRONMENT | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    faults, used_mib, result, final_mib = process.stdout.split()
    return int(faults), int(used_mib), result, int(final_mib)


@pytest.mark.skipif(not _GLIBC, reason="the C library is not glibc")
@pytest.mark.parametrize("thread", ["main", "thread"])
def test_freed_memory_is_reused_and_released_on_request(thread: str) -> None:
    plain, plain_mib, _, _ = run_allocations("plain", thread)
    faults, used_mib, result, final_mib = run_allocations("reuse", thread)
    assert result == "True"
    assert 10 * faults < plain
    assert final_mib <= used_mib - _LAYERS_MIB / 2 if thread == "main" else final_mib <= plain_mib + _HEAP_MIB


@pytest.mark.skipif(not _GLIBC, reason="the C library is not glibc")
def test_the_last_of_two_settings_applies() -> None:
    released, reused = run_allocations("reuse-release", "main"), run_allocations("reuse-release-reuse", "main")
    assert released[2] == reused[2] == "True"
    assert 10 * reused[0] < released[0]


@pytest.mark.skipif(not _GLIBC, reason="the C library is not glibc")
def test_released_blocks_leave_no_holes_between_live_blocks() -> None:
    outputs = [
        subprocess.run(
            [sys.executable, "-c", _ALLOCATE_BESIDE_SMALL_BLOCKS, setting],
            env=_ENVIRONMENT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for setting in ("plain", "release")
    ]
    (_, plain), (result, released) = outputs
    assert result == "True"
    assert int(released) < int(plain) - 8 * 12 // 2


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX"])
def test_settings_of_the_environment_are_kept(name: str) -> None:
    assert run_allocations("reuse", "main", **{name: "100000"})[2] == "False"


def test_other_allocators_are_detected() -> None:
    assert is_allocator_configured({"LD_PRELOAD": "/usr/lib/libtcmalloc.so.4"})
    assert is_allocator_configured({"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"})
    assert not is_allocator_configured({"LD_PRELOAD": "/usr/lib/libfaketime.so", "GLIBC_TUNABLES": "glibc.rtld.nns=4"})


@pytest.mark.parametrize("package", ["flows", "beam_jobs"])
@pytest.mark.parametrize(("choice", "expected"), [(None, "system"), ("mimalloc", "mimalloc")])
def test_arrow_and_openblas_are_configured_unless_the_environment_says_otherwise(
    package: str, choice: str | None, expected: str
) -> None:
    code = (
        "import os, pyarrow; print(pyarrow.default_memory_pool().backend_name, os.environ['OPENBLAS_THREAD_TIMEOUT'])"
    )
    start = f"import {package}, subprocess, sys; assert 'numpy' not in sys.modules"
    child = f"{start}; subprocess.run([sys.executable, '-c', {code!r}], check=True); {code}"
    names = {"ARROW_DEFAULT_MEMORY_POOL", "OPENBLAS_THREAD_TIMEOUT"}
    environment_without_choice = {name: value for name, value in os.environ.items() if name not in names}
    environment = environment_without_choice | ({"ARROW_DEFAULT_MEMORY_POOL": choice} if choice else {})
    process = subprocess.run([sys.executable, "-c", child], env=environment, capture_output=True, text=True, check=True)
    assert process.stdout.split() == [expected, "4"] * 2  # of the child process and of its parent


MIB = 1 << 20


def test_the_result_of_a_child_is_returned() -> None:
    result = run_in_child("tests.fixtures.crashing_child", {"é": [1]}, seconds=60, memory=64 * MIB)
    assert result == [{"é": [1]}, "lives"]


@pytest.mark.parametrize(
    ("action", "seconds", "sentence"),
    [
        ("segfault", 60, "was ended by SIGSEGV"),
        ("memory", 60, "needed more than 64 MiB of memory"),
        ("loop", 1, "took more than 1 s of CPU time"),
        ("wait", 0.3, "did not end within 3 s"),
        ("silence", 60, "ended without a reply"),
        ("exit", 60, "ended without a reply"),
    ],
)
def test_the_death_of_a_child_is_explained(
    action: str, seconds: float, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if action == "loop":  # on a busy machine, one CPU second may take longer than 10 seconds
        monkeypatch.setattr("rag_model.process._ELAPSED_FACTOR", 300)
    with pytest.raises(ChildDiedError, match=sentence):
        run_in_child("tests.fixtures.crashing_child", action, seconds=seconds, memory=64 * MIB)


_CALLS_UNDER_A_CPU_LIMIT = """
import resource
from rag_model.process import ChildWorker
resource.setrlimit(resource.RLIMIT_CPU, (4, 4))
worker = ChildWorker("tests.fixtures.crashing_child", None, memory=1 << 26)
for _ in range(10):
    worker.call("half a second", seconds=1)
"""


def test_the_cpu_seconds_of_many_calls_do_not_add_up_to_the_users_limit() -> None:
    subprocess.run([sys.executable, "-c", _CALLS_UNDER_A_CPU_LIMIT], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_to_stop_is_not_reported_as_a_death(name: str) -> None:
    with pytest.raises(BookwheelError, match=f"{name}, a request to stop: run it again") as raised:
        run_in_child("tests.fixtures.crashing_child", name, seconds=60, memory=64 * MIB)
    assert not isinstance(raised.value, ChildDiedError), "a file or model that was being read would be refused for it"


def test_errors_of_a_child_are_raised_in_the_parent() -> None:
    with pytest.raises(StoreError, match="a sentence"):
        run_in_child("tests.fixtures.crashing_child", "refuse", seconds=60, memory=64 * MIB)
    with pytest.raises(InputError, match="ZeroDivisionError: by zero"):
        run_in_child("tests.fixtures.crashing_child", "raise", seconds=60, memory=64 * MIB)


def test_a_child_ends_although_its_parent_was_killed() -> None:
    calls = (
        "from rag_model.process import run_in_child\n"
        "run_in_child('tests.fixtures.crashing_child', 'loop', seconds=1, memory=1 << 26)"
    )
    with subprocess.Popen([sys.executable, "-c", calls]) as parent:
        while not (children := psutil.Process(parent.pid).children()):
            assert parent.poll() is None
        parent.kill()
    (child,) = children
    child.wait(300)  # raises if it is still there


_HOLD_A_FOLDER = """
import sys
from rag_model.process import temporary_folder
with temporary_folder("test") as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_only_the_temporary_folder_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", _HOLD_A_FOLDER]

    def start() -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    (killed_process, killed_folder), (old_process, old_folder) = start(), start()
    killed_process.kill()
    killed_process.communicate()
    for folder in (killed_folder, old_folder):
        (folder / "file").write_text("x")
        os.utime(folder, (0, 0))
    new_process, new_folder = start()
    assert [folder.exists() for folder in (killed_folder, old_folder, new_folder)] == [False, True, True]
    for process, folder in ((old_process, old_folder), (new_process, new_folder)):
        process.communicate()  # its input ends
        assert not folder.exists()


_CLAIM = """
import sys
from rag_model.process import claim_gpu

print(claim_gpu(int(sys.argv[1])), claim_gpu(int(sys.argv[1])), flush=True)
sys.stdin.read()
"""


def start_worker(folder: Path, visible_gpus: str = "") -> tuple[subprocess.Popen[str], list[int]]:
    """Start a process that claims one of two GPUs twice and then waits; return it and its claims."""
    environment = {**os.environ, "TMPDIR": str(folder), "CUDA_VISIBLE_DEVICES": visible_gpus}
    command = [sys.executable, "-c", _CLAIM, "2"]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert worker.stdout is not None
    return worker, [int(word) for word in worker.stdout.readline().split()]


@pytest.mark.parametrize("visible_gpus", ["", "GPU-8f1a,GPU-02c3"])
def test_no_two_processes_share_a_gpu_while_one_is_free(tmp_path: Path, visible_gpus: str) -> None:
    workers = [start_worker(tmp_path, visible_gpus) for _ in range(4)]
    try:
        assert all(claims[0] == claims[1] for _, claims in workers)
        numbers = [claims[0] for _, claims in workers]
        assert sorted(numbers[:2]) == sorted(numbers[2:]) == [0, 1]
        workers[1][0].kill()  # the kernel releases its claim
        workers[1][0].wait()
        workers.append(start_worker(tmp_path, visible_gpus))
        assert workers[4][1][0] == numbers[1]
    finally:
        for worker, _ in workers:
            worker.kill()
            worker.communicate()


def test_a_gpu_has_the_same_name_in_all_processes(tmp_path: Path) -> None:
    workers = [start_worker(tmp_path, visible_gpus) for visible_gpus in ("5,3", "3,5")]
    try:
        assert [claims[0] for _, claims in workers] == [0, 0]  # GPU 5, and then the first that is free: GPU 3
    finally:
        for worker, _ in workers:
            worker.kill()
            worker.communicate()
