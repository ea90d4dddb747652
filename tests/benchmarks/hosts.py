"""Hosts that share nothing, on one machine: each has its own Linux namespaces for network, files and processes.

A host sees the machine's programs and this project's code, as an image has them, and writes only in its own folder,
which no other host sees; its path is the same inside and outside. The hosts reach only each other, by name, through a
bridge. All live in one user namespace: root is not needed where the kernel lets users make one.

A host's first process reads from a pipe that the kernel closes when this process ends, however it ends. The kernel then
ends the host's other processes, and removes its network and its mounts.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

ROOT = Path(__file__).parents[2]
NETWORK = "10.77.0"  # the only network that the hosts have
APART = ("--net", "--mount", "--pid", "--ipc", "--uts")
LIVES = "echo up; exec cat"  # until standard input is closed
SWITCH = f"ip link add bridge type bridge; ip link set bridge up; {LIVES}"
# $0: name of the host. $1: its folder. $2: the hidden folder. From $3: folders of programs, which may be within the
# hidden folder or in /tmp. The code's folder stays writable, because Python and numba cache compiled code there.
MACHINE = f"""
own=$1; hidden=$2; shift 2
hostname "$0"
mount --rbind / /mnt
for one in /tmp /dev/shm "$hidden"; do mkdir -p "$one"; mount -t tmpfs none "$one"; done
for one in "$own" "$@"; do mkdir -p "$one"; mount --rbind "/mnt$one" "$one"; done
mount --bind "$own/hosts" /etc/hosts
umount --lazy /mnt
mount -o remount,bind,ro /
ip link set lo up
{LIVES}
"""


class NoHostsError(RuntimeError):
    """This machine cannot make such hosts; the message says what to do."""


@dataclass(slots=True)
class Host:
    """One of the hosts; `folder` is where it may write."""

    name: str
    folder: Path
    init: int  # its first process, as this process sees it
    parent: "subprocess.Popen[str]"  # of that one
    started: "list[subprocess.Popen[str]]" = field(default_factory=list)

    @property
    def enter(self) -> list[str]:
        """The command prefix that runs a command on the host."""
        return ["nsenter", f"--target={self.init}", "--user", "--preserve-credentials", *APART]

    def environment(self, more: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a command on the host, which inherits nothing from this process."""
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        variables = {"HOME": str(self.folder), "TMPDIR": str(self.folder), "PATH": path, "PYTHONPATH": str(ROOT)}
        return {"LANG": "C.UTF-8", **variables, **more}

    def start(
        self, command: Sequence[object], more: Mapping[str, str], out: IO[bytes] | int, errors: IO[bytes] | int
    ) -> "subprocess.Popen[str]":
        """Start a command on the host, in `folder`."""
        words = [*self.enter, "sh", "-c", 'cd "$HOME"; exec "$@"', self.name, *map(str, command)]
        self.started.append(subprocess.Popen(words, stdout=out, stderr=errors, text=True, env=self.environment(more)))
        return self.started[-1]

    def lose(self) -> None:
        """Kill the host's processes and remove its network without any notice, like a power failure."""
        if self.parent.poll() is None:
            psutil.Process(self.init).kill()
        for process in (self.parent, *self.started):
            process.wait()


@contextmanager
def hosts(names: Sequence[str], folder: Path, hidden: Path, programs: Sequence[Path] = ()) -> Iterator[dict[str, Host]]:
    """Make hosts that reach each other by name.

    Args:
        names: names of the hosts.
        folder: an empty folder within `hidden`; each host writes in a folder below it.
        hidden: a folder of this machine that no host sees, as none sees /tmp.
        programs: further folders that all hosts see, beside the project's and Python's environment.

    Raises:
        NoHostsError: the kernel does not allow namespaces, or a tool is missing.
    """
    if missing_tools := [tool for tool in ("unshare", "nsenter", "ip") if not shutil.which(tool)]:
        raise NoHostsError(
            f"no namespaces without {' and '.join(missing_tools)}: `apt-get install util-linux iproute2`"
        )
    host_lines = "".join(f"{NETWORK}.{number} {name}\n" for number, name in enumerate(names, start=1))
    visible_folders = [str(path.resolve()) for path in (ROOT, Path(sys.prefix), *programs)]
    with ExitStack() as ended:
        switch = ended.enter_context(_first(["unshare", "--user", "--map-root-user", "--net"], [SWITCH]))
        enter = ["nsenter", f"--target={switch.pid}", "--user", "--preserve-credentials", "--net"]
        host_by_name = {}
        for number, name in enumerate(names, start=1):
            host_folder = folder / name
            host_folder.mkdir()
            (host_folder / "hosts").write_text(f"127.0.0.1 localhost\n{host_lines}")
            apart = [*enter, "unshare", *APART, "--fork", "--kill-child", "--mount-proc"]
            parent = ended.enter_context(
                _first(apart, [MACHINE, name, str(host_folder), str(hidden), *visible_folders])
            )
            (init,) = psutil.Process(parent.pid).children()
            host_by_name[name] = Host(name, host_folder, init.pid, parent)
            ended.callback(host_by_name[name].lose)
            port = f"ip link add port{number} type veth peer name eth0 netns {init.pid}"
            _do([*enter, "sh", "-ec", f"{port}; ip link set port{number} master bridge up"])
            address = f"ip address add {NETWORK}.{number}/24 dev eth0; ip link set eth0 up"
            _do([*host_by_name[name].enter, "sh", "-ec", address])
        yield host_by_name


@contextmanager
def _first(apart: Sequence[str], script: Sequence[str]) -> Iterator["subprocess.Popen[str]"]:
    """Run a script that says `up` when it is ready, and then lives until its input is closed."""
    with subprocess.Popen(
        [*apart, "sh", "-ec", *script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:  # waits for the end, with its input closed
        assert process.stdout is not None
        if process.stdout.readline() != "up\n":
            raise _build_error(process.communicate()[1])
        yield process


def _do(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise _build_error(done.stderr)


def _build_error(error_output: str) -> NoHostsError:
    last = (error_output.strip().splitlines() or ["nothing said"])[-1]
    return NoHostsError(f"no namespaces for hosts ({last}): let users make them, or run as root with CAP_SYS_ADMIN")
