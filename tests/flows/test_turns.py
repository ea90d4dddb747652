"""Runs of deployments take turns in one store, even if a Prefect server marks a live run as crashed."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.flow_engine import run_flow as run_engine
from prefect.states import Crashed
from prefect.utilities.callables import parameter_schema

from flows.stage import RUN_HOURS_VARIABLE, STAGE_HOURS_VARIABLE, deployment_flow, read_time_limit, stage
from rag_model.errors import UsageError
from rag_model.store.store import Store

DEADLINE = 300.0  # seconds


@dataclass
class RunEvents:
    """Events that tell when a run has started and when it may end."""

    started: threading.Event = field(default_factory=threading.Event)
    may_end: threading.Event = field(default_factory=threading.Event)


events: dict[str, RunEvents] = {}


@deployment_flow("first-builder", takes_turns=True)
def build(store: str, name: str, dry_run: bool = False) -> None:
    """Run until the test lets it end."""
    events[name].started.set()
    assert events[name].may_end.wait(DEADLINE)


@deployment_flow("other-builder", takes_turns=True)
def release(store: str, name: str, dry_run: bool = False) -> None:
    """Call another builder, as a release does."""
    build.fn(store, name, dry_run)


@dataclass
class Runs:
    """Flow runs in threads of this process, started as a worker starts them."""

    threads: list[threading.Thread] = field(default_factory=list)

    def start(self, flow: object, store: Path, name: str, *, dry_run: bool = False) -> UUID:
        events[name] = RunEvents()
        parameters = {"store": str(store), "name": name, "dry_run": dry_run}
        with get_client(sync_client=True) as client:
            schema = parameter_schema(flow.fn).model_dump_for_openapi()  # type: ignore[attr-defined]
            form = client.create_deployment(client.create_flow(flow), "turns", parameter_openapi_schema=schema)  # type: ignore[arg-type]
            run: FlowRun = client.create_flow_run_from_deployment(form, parameters=parameters)
        arguments = run_engine, flow, run, parameters
        # The context has the URL of the Prefect server; without it the thread would start a server of its own.
        thread = threading.Thread(target=copy_context().run, args=arguments, kwargs={"return_type": "state"})
        thread.start()
        self.threads.append(thread)
        return run.id


@pytest.fixture
def runs(prefect_server: None) -> Iterator[Runs]:
    flow_runs = Runs()
    yield flow_runs
    for run_events in events.values():
        run_events.may_end.set()
    for thread in flow_runs.threads:
        thread.join(DEADLINE)
    assert not any(thread.is_alive() for thread in flow_runs.threads)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    Store.open(str(tmp_path / "store"), create=True)
    return tmp_path / "store"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_run_waits_for_live_process_of_crashed_run(runs: Runs, store: Path) -> None:
    crashed_run = runs.start(build, store, "crashed")
    assert events["crashed"].started.wait(DEADLINE)
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(crashed_run, Crashed(message="no heartbeat"), force=True)
        assert client.read_flow_run(crashed_run).state_type == StateType.CRASHED
    runs.start(release, store, "scheduled")
    wait_until(lambda: len([*(store / "intents").glob("turn-*.json")]) == 2)
    assert not events["scheduled"].started.wait(3)
    events["crashed"].may_end.set()
    assert events["scheduled"].started.wait(DEADLINE)


def test_dry_runs_and_runs_in_other_stores_do_not_wait(runs: Runs, store: Path, tmp_path: Path) -> None:
    Store.open(str(tmp_path / "other"), create=True)
    runs.start(build, store, "long")
    assert events["long"].started.wait(DEADLINE)
    runs.start(build, tmp_path / "other", "elsewhere")
    runs.start(build, store, "rehearsal", dry_run=True)
    assert events["elsewhere"].started.wait(DEADLINE)
    assert events["rehearsal"].started.wait(DEADLINE)


def test_command_does_not_wait(store: Path) -> None:
    events["command"] = RunEvents()
    events["command"].may_end.set()
    with Store.open(str(store)).intents.hold_turn("somebody", print):
        build.fn(str(store), "command")


def test_turn_of_killed_process_ends(store: Path) -> None:
    intents, waits = Store.open(str(store)).intents, list[str]()
    (store / "intents").mkdir(exist_ok=True)
    turn = store / "intents" / "turn-killed.json"
    turn.write_text('{"format": 1, "started": 1.0, "needs": []}')

    def let_time_pass(name: str) -> None:
        waits.append(name)
        os.utime(turn, (time.time() - 1000,) * 2)

    with intents.hold_turn("next", let_time_pass):
        assert waits == ["killed"]


def test_waiting_turn_is_earlier_than_turns_that_start_later(store: Path) -> None:
    intents, waits = Store.open(str(store)).intents, list[str]()
    turn_content = {"format": 1, "started": None, "needs": []}
    intents.write_timed("intents/turn-running.json", turn_content)

    def end_turn_after_another_starts(name: str) -> None:
        waits.append(name)
        if name == "running":
            intents.write_timed("intents/turn-second.json", turn_content)
        intents.files.remove(f"intents/turn-{name}.json")

    with intents.hold_turn("first", end_turn_after_another_starts):
        assert waits == ["running"]


def test_run_and_stage_end_after_their_hours(prefect_server: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_HOURS_VARIABLE, str(1 / 3600))

    @deployment_flow("slow")
    def slow() -> None:
        for _ in range(600):
            time.sleep(0.1)

    assert slow(return_state=True).name == "TimedOut"
    monkeypatch.delenv(RUN_HOURS_VARIABLE)
    monkeypatch.setenv(STAGE_HOURS_VARIABLE, str(1 / 3600))

    @stage
    def wait_long() -> None:
        for _ in range(600):
            time.sleep(0.1)

    @deployment_flow("slow-stage")
    def slow_stage() -> None:
        wait_long()

    state = slow_stage(return_state=True)
    assert state.is_failed()
    assert "timed out" in str(state.message).lower() or "timeout" in str(state.message).lower(), state.message


@pytest.mark.parametrize("value", ["many", "0", "-1", "nan", "inf"])
def test_invalid_hours_are_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(RUN_HOURS_VARIABLE, value)
    with pytest.raises(UsageError, match=f"{RUN_HOURS_VARIABLE} is '{value}': set it to a number of hours"):
        read_time_limit(RUN_HOURS_VARIABLE)
