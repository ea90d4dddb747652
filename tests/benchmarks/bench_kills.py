"""`kill -9` in the middle of builds, sweeps and pulls on one store, and whether anything is ever lost.

Every round three processes work on one store, one that builds and publishes, one that expires and collects, one that
pulls, until all are killed at a random moment. Then every snapshot in the store is verified byte by byte, every move
that was reported done must be in the ref's log, and what was pulled is read. Hours are scaled to seconds, so that dead
writers lapse and young files grow old within a run. One JSON line: kills, rounds, moves, snapshots, what was deleted.
`python tests/benchmarks/bench_kills.py [--kills 30] [--seed 0]`; 200 kills take about two minutes.
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rag_model.errors import StoreError
from rag_model.evaluation.gate import GateVerdict
from rag_model.snapshots.publish import publish
from rag_model.store import Content, Manifest, Snapshot, StageResult, Store
from rag_model.store.objects import blobs, intents
from rag_model.store.pulling.pull import pull
from rag_model.store.upkeep import gc, roots
from rag_model.store.upkeep.expire import ExpirePolicy, expire_store
from rag_model.store.upkeep.verify import verify_version

SHARED, PIECES, BYTES = 200, 6, 200_000  # files to draw from, files of a snapshot, bytes of one
KEPT = ExpirePolicy(keep=5, older_than=0.5)
processes = multiprocessing.get_context("fork")


def scale_time() -> None:
    """Let an intent count for two seconds instead of an hour, and so on."""
    intents.INTENT_VALID_SECONDS = gc.INTENT_VALID_SECONDS = 2.0  # type: ignore[attr-defined]
    intents.SWEEP_VALID_SECONDS = roots.SWEEP_VALID_SECONDS = 1.0  # type: ignore[attr-defined]
    intents._RENEW_SECONDS, intents._PAUSE = 0.3, 0.01
    gc.SAFETY_MARGIN, blobs._TRUST_SECONDS = 0.4, 0.2


@dataclass
class Place:
    """Where a run takes place."""

    folder: Path
    seed: int
    rounds: int = 0
    acknowledged: dict[int, str] = field(default_factory=dict)  # moves that a publisher was told of

    @property
    def store(self) -> Store:
        return Store.open(str(self.folder / "store"), create=True)

    @property
    def told(self) -> Path:
        return self.folder / "told"


def build_for_ever(place: Place) -> None:
    """Publish snapshots of files that others have as well, by the memo."""
    store, rng = place.store, random.Random(f"{place.seed} {place.rounds}")

    def made(number: int) -> Callable[[Path], StageResult]:
        def produce(workdir: Path) -> StageResult:
            (workdir / "out").write_bytes(random.Random(number).randbytes(BYTES))
            return StageResult({"out": workdir / "out"})

        return produce

    for count in range(1_000_000):
        with store.intents.hold(f"build-{place.rounds}-{count}"):
            pieces = rng.sample(range(SHARED), PIECES)
            files = {f"index/{i}": store.memo.get_or_create("make", i, made(i))[0].outputs["out"] for i in pieces}
            manifest = Manifest(Content({"build": count, "round": place.rounds}, (), files))
            move = publish(store, manifest, "latest", lambda parent: GateVerdict(True, ())).move
        with place.told.open("a") as told:
            told.write(f"{move.number if move else 0} {manifest.id}\n")


def sweep_for_ever(place: Place) -> None:
    """Forget all but the last moves, and delete what nothing needs."""
    while True:
        expire_store(place.store, KEPT)
        gone = sum(tally.files for tally in gc.collect_garbage(place.store, 0.5).values())
        with (place.folder / "deleted").open("a") as deleted:
            deleted.write(f"{gone}\n")


def pull_for_ever(place: Place) -> None:
    """Pull whatever is newest."""
    while True:
        with suppress(StoreError):  # nothing was published yet, or what was asked for expired a moment ago
            pull(place.store, "latest", place.folder / "dest")


def kill_one_round(place: Place, rng: random.Random) -> int:
    """Let all work for a moment and kill them; return how many were alive until then."""
    running = [processes.Process(target=act, args=(place,)) for act in (build_for_ever, sweep_for_ever, pull_for_ever)]
    for process in running:
        process.start()
    time.sleep(rng.uniform(0.1, 1.5))
    killed = 0
    for process in rng.sample(running, len(running)):
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        killed += process.exitcode == -signal.SIGKILL
    return killed


def losses(place: Place) -> list[str]:
    """Return all that is not as it must be."""
    store = place.store
    found = [f"{problem}" for snapshot in store.snapshots.list_ids() for problem in verify_version(store, snapshot)]
    for line in place.told.read_text().splitlines() if place.told.exists() else ():
        number, snapshot = line.split()
        place.acknowledged[int(number)] = snapshot
    history = {move.number: move.snapshot for move in store.refs.read_history("latest")}
    oldest = min(history, default=1)
    found += [
        f"move {number} is lost"
        for number, snapshot in place.acknowledged.items()
        if number >= oldest and history.get(number) != snapshot
    ]
    if (place.folder / "dest" / "current").exists():
        with Snapshot.from_folder(place.folder / "dest") as pulled:
            for path, ref in pulled.manifest.content.files.items():
                if pulled.path(path).stat().st_size != ref.size:
                    found.append(f"pulled {path} is damaged")
    return found


def main() -> None:
    """Kill until there were enough kills, or something was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    scale_time()
    rng, killed, lost, died, began = random.Random(given.seed), 0, [], 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bookwheel-kills-") as folder:
        os.environ["BOOKWHEEL_CACHE"] = f"{folder}/cache"
        place = Place(Path(folder), given.seed)
        while killed < given.kills and not lost:
            place.rounds += 1
            alive = kill_one_round(place, rng)
            killed, died = killed + alive, died + 3 - alive
            lost = losses(place)
        numbers = place.store.refs.list_numbers("latest")
        report = {
            "kills": killed,
            "rounds": place.rounds,
            "died_by_themselves": died,
            "deleted": sum(map(int, (place.folder / "deleted").read_text().split())),
            "moves": numbers[-1] if numbers else 0,
            "moves_kept": len(numbers),
            "snapshots": len(place.store.snapshots.list_ids()),
            "blobs": sum(1 for _ in place.store.files.iter_tree("blobs")),
            "lost": lost,
            "seconds": round(time.monotonic() - began, 1),
        }
    print(json.dumps(report))
    if lost:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
