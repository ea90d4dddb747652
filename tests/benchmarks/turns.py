"""Trainings that take turns on one core, each in a new process, and the rebuilds of their indexes on another core.

A training that waits for its turn is stopped, and so are its rebuilds. So the trainings meet the same load of other
programs, in blocks of a few seconds, and can be compared by wall-clock time. The share of both cores that other
programs had is measured.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flows.rebuild import RebuildLauncher, RebuildProcess
from rag_model.evaluation.bootstrap import estimate_mean
from rag_model.training.moving_index import RebuildOrder

_TICKS = os.sysconf("SC_CLK_TCK")
_IDLE = (4, 5)  # columns of a core's line in /proc/stat: idle, and waiting for a disk


@dataclass(frozen=True, slots=True)
class Block:
    """The steps of one turn."""

    seconds: float
    cpu_seconds: float  # of the trainer
    busy: tuple[float, float]  # share of the trainer's core and of the other core that was busy
    steps_beside_rebuild: int  # steps during which a rebuild ran


def choose_two_cores() -> tuple[int, int]:
    """Return the core of the trainers, and the core of the rebuilds."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("this process may use one core only: rebuilds need another one")
    return cores[0], cores[1]


@dataclass
class Turn:
    """The turns of a training's process: pass `report` to it, and start rebuilds by `SpareCoreLauncher`."""

    pipe: Connection
    steps: int  # of a block
    cores: tuple[int, int] = field(default_factory=choose_two_cores)
    children: list[RebuildProcess] = field(default_factory=list)
    steps_beside_rebuild: int = 0
    began: tuple[float, ...] = ()

    def report(self, kind: str, step: int, _: int, __: Mapping[str, float]) -> None:
        """Wait for this process's turn before a block, and send the cost of the block after it."""
        if kind == "move" and (step - 1) % self.steps == 0:
            self._stand_still()
            self.began, self.steps_beside_rebuild = self._read_clocks(), 0
        if kind == "train":
            self.steps_beside_rebuild += any(child._process.poll() is None for child in self.children)
            if step % self.steps == 0:
                seconds, cpu, *busy = (end - start for end, start in zip(self._read_clocks(), self.began, strict=True))
                first, second = (busy_seconds / seconds for busy_seconds in busy)
                self.pipe.send(Block(seconds, cpu, (first, second), self.steps_beside_rebuild))

    def _read_clocks(self) -> tuple[float, ...]:
        return time.perf_counter(), time.process_time(), *(_read_busy_seconds(core) for core in self.cores)

    def _stand_still(self) -> None:
        self._signal(signal.SIGSTOP)
        try:
            self.pipe.send(None)
            self.pipe.recv()
        finally:  # also when the other end is gone, because stopped rebuilds would never end
            self._signal(signal.SIGCONT)

    def _signal(self, signal_number: signal.Signals) -> None:
        for child in self.children:
            with suppress(ProcessLookupError):
                os.killpg(child._process.pid, signal_number)


@dataclass
class SpareCoreLauncher:
    """A launcher of rebuilds on the core that the trainers do not use."""

    rebuilds: RebuildLauncher
    turn: Turn

    def start(self, order: RebuildOrder) -> RebuildProcess:
        trainer_core, rebuild_core = self.turn.cores
        os.sched_setaffinity(0, {rebuild_core})  # of this thread, whose affinity a child inherits
        try:
            child = self.rebuilds.start(order)
        finally:
            os.sched_setaffinity(0, {trainer_core})
        self.turn.children.append(child)
        return child


def run_in_turns(trainings: Sequence[Callable[[Turn], Any]], steps: int) -> list[tuple[list[Block], Any]]:
    """Run trainings, which must pickle, in blocks of `steps` steps; return the blocks and the value of each."""
    context, running = get_context("spawn"), []
    for training in trainings:
        pipe_end, child_pipe_end = context.Pipe()
        child = context.Process(target=_serve, args=(child_pipe_end, training, steps))
        child.start()
        child_pipe_end.close()
        running.append((pipe_end, list[Block](), list[Any]()))
    for pipe, _, _ in running:
        pipe.recv()  # the training is at its first step
    while unfinished := [state for state in running if not state[2]]:
        for pipe, blocks, values in unfinished:
            pipe.send(None)
            while isinstance(message := pipe.recv(), Block):
                blocks.append(message)
            if message is not None:
                values.extend(message)
    return [(blocks, values[0]) for _, blocks, values in running]


def compare_blocks(mine: Sequence[Block], other: Sequence[Block], steps: int) -> dict[str, Any]:
    """Return how much longer `mine` took than `other` in wall-clock time, with a 95 % interval over pairs of blocks."""
    mean = np.mean([block.seconds for block in other])
    slower = estimate_mean([float((a.seconds - b.seconds) / mean) for a, b in zip(mine, other, strict=True)])
    cpu = [sum(block.cpu_seconds for block in blocks) for blocks in (mine, other)]
    other_shares = [block.busy[0] - block.cpu_seconds / block.seconds for block in (*mine, *other)]
    return {
        "slower": [round(x, 3) for x in (slower.value, slower.low, slower.high)],
        "steps_per_s": [
            round(steps * len(blocks) / sum(block.seconds for block in blocks), 3) for blocks in (mine, other)
        ],
        "cpu_ratio": round(cpu[0] / cpu[1], 3),
        "blocks": len(mine),
        "steps_beside_a_rebuild": sum(block.steps_beside_rebuild for block in mine),
        "others_on_the_trainers_core": round(float(np.mean(other_shares)), 3),
        "others_on_the_rebuilds_core": round(float(np.mean([block.busy[1] for block in other])), 3),
    }


def _serve(pipe: Connection, training: Callable[[Turn], Any], steps: int) -> None:
    turn = Turn(pipe, steps)
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), {turn.cores[0]})
    torch.set_num_threads(1)
    pipe.send([training(turn)])


def _read_busy_seconds(core: int) -> float:
    """Return the seconds that a core was busy since the machine started."""
    lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    words = next(line.split() for line in lines if line.startswith(f"cpu{core} "))
    return (
        sum(int(word) for position, word in enumerate(words) if position and position not in (*_IDLE, 9, 10)) / _TICKS
    )
