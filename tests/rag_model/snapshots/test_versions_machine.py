"""Two writers change one store in random order, and the store must always equal a model in memory.

The machine simulates the passing of time by changing the modification times of all files.
"""

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rag_model.errors import StoreError, UsageError
from rag_model.evaluation.gate import GateVerdict
from rag_model.snapshots.publish import publish
from rag_model.store import Content, Manifest, Snapshot, Store
from rag_model.store.pulling.pull import pull
from rag_model.store.upkeep.expire import ExpirePolicy, expire_store
from rag_model.store.upkeep.gc import collect_garbage
from rag_model.store.versions.moves import rollback, tag, untag
from tests.fixtures.store_files import age_files, are_snapshots_intact

DAY = 86400.0
TRUST_DAYS = 0.5  # the days for which a writer trusts a blob
REFS = ("latest", "good")


@dataclass
class RefLog:
    """The history of a ref: the snapshot ("" after a deletion) and the day of each kept move."""

    moves: dict[int, tuple[str, float]] = field(default_factory=dict)
    last: int = 0

    def move(self, snapshot: str, day: float) -> None:
        self.last += 1
        self.moves[self.last] = (snapshot, day)

    @property
    def current(self) -> str | None:
        return self.moves[self.last][0] or None if self.moves else None

    def forget(self, keep: int, bound: float) -> None:
        for number in sorted(self.moves)[: -keep if self.current else -1]:
            if self.moves[number + 1][1] > bound:
                break
            del self.moves[number]


class StoreMachine(RuleBasedStateMachine):
    """The expected content of a store, two writers and a reader."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="bookwheel-test-"))
        self.writers = [Store.open(str(self.folder / "store"), create=True) for _ in range(2)]
        self.day = 0.0
        self.refs = {name: RefLog() for name in REFS}
        self.snapshots: dict[str, tuple[str, float]] = {}  # by id: its letters, and the day of its manifest
        self.blobs: dict[str, float] = {}  # by letter: the day of its blob
        self.pulled: str | None = None

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @rule(writer=st.integers(0, 1), letters=st.sets(st.sampled_from("abcd"), min_size=1), ref=st.sampled_from(REFS))
    def publish(self, writer: int, letters: set[str], ref: str) -> None:
        store, key = self.writers[writer], "".join(sorted(letters))
        blobs = {f"index/{letter}": store.blobs.put_bytes(letter.encode()) for letter in key}
        snapshot = publish(store, Manifest(Content({}, (), blobs)), ref, lambda parent: GateVerdict(True, ())).snapshot
        for letter in key:
            if self.day - self.blobs.get(letter, -9.0) >= TRUST_DAYS:
                self.blobs[letter] = self.day
        self.snapshots.setdefault(snapshot, (key, self.day))
        if self.refs[ref].current != snapshot:
            self.refs[ref].move(snapshot, self.day)

    @rule(writer=st.integers(0, 1), number=st.integers(0, 20), ref=st.sampled_from(REFS))
    def tag(self, writer: int, number: int, ref: str) -> None:
        snapshot_ids = sorted(self.snapshots)
        if snapshot_ids:
            snapshot = snapshot_ids[number % len(snapshot_ids)]
            tag(self.writers[writer], snapshot[:20], ref)
            if self.refs[ref].current != snapshot:
                self.refs[ref].move(snapshot, self.day)

    @rule(writer=st.integers(0, 1), ref=st.sampled_from(REFS))
    def untag(self, writer: int, ref: str) -> None:
        if self.refs[ref].current is None:
            with pytest.raises(StoreError):
                untag(self.writers[writer], ref)
        else:
            untag(self.writers[writer], ref)
            self.refs[ref].move("", self.day)

    @rule(writer=st.integers(0, 1), number=st.integers(1, 9), ref=st.sampled_from(REFS))
    def roll_back(self, writer: int, number: int, ref: str) -> None:
        log = self.refs[ref]
        target = log.moves.get(number)
        if log.current is None or target is None or target[0] in {log.current, ""}:
            with pytest.raises((StoreError, UsageError)):
                rollback(self.writers[writer], ref, number)
        else:
            rollback(self.writers[writer], ref, number)
            log.move(target[0], self.day)

    @rule(writer=st.integers(0, 1), keep=st.integers(1, 3), days=st.integers(0, 3))
    def expire(self, writer: int, keep: int, days: int) -> None:
        expire_store(self.writers[writer], ExpirePolicy(keep, days * DAY))
        for log in self.refs.values():
            log.forget(keep, self.day - days)
        referenced = {snapshot for log in self.refs.values() for snapshot, _ in log.moves.values()} - {""}
        self.snapshots = {
            snapshot: entry
            for snapshot, entry in self.snapshots.items()
            if snapshot in referenced or entry[1] > self.day - days
        }

    @rule(writer=st.integers(0, 1), days=st.integers(0, 3))
    def gc(self, writer: int, days: int) -> None:
        collect_garbage(self.writers[writer], days * DAY)
        needed = {letter for letters, _ in self.snapshots.values() for letter in letters}
        self.blobs = {letter: day for letter, day in self.blobs.items() if letter in needed or day > self.day - days}

    @rule(ref=st.sampled_from(REFS), keep=st.sampled_from([None, 1, 2]))
    def pull(self, ref: str, keep: int | None) -> None:
        if self.refs[ref].current is not None:
            self.pulled = pull(self.writers[0], ref, self.folder / "dest", keep_snapshots=keep).snapshot
            assert self.pulled == self.refs[ref].current

    @rule(days=st.integers(1, 2))
    def let_time_pass(self, days: int) -> None:
        self.day += days
        age_files(self.writers[0], days * DAY)

    @invariant()
    def refs_have_the_expected_history(self) -> None:
        for name, log in self.refs.items():
            for store in self.writers:
                history = {move.number: move.snapshot for move in store.refs.read_history(name)}
                assert history == {number: snapshot for number, (snapshot, _) in log.moves.items()}

    @invariant()
    def all_snapshots_are_intact(self) -> None:
        store = self.writers[1]
        assert store.snapshots.list_ids() == sorted(self.snapshots)
        assert are_snapshots_intact(store)

    @invariant()
    def store_has_exactly_the_expected_blobs(self) -> None:
        blobs = {self.writers[0].files.read(file.path) for file in self.writers[0].files.iter_tree("blobs")}
        assert blobs == {letter.encode() for letter in self.blobs}

    @invariant()
    def pulled_snapshot_is_readable(self) -> None:
        if self.pulled is not None:
            with Snapshot.from_folder(self.folder / "dest") as snapshot:
                assert snapshot.id == self.pulled
                for name in snapshot.manifest.content.files:
                    assert snapshot.path(name).read_bytes() == name.removeprefix("index/").encode()


StoreMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=25)
TestStoreMachine = StoreMachine.TestCase
