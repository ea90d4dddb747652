"""What a worker does for a task of the index jobs: each piece once, under a memo key of all that decides its bytes.

A task uses one thread: work is distributed by parts, shards and indexes, and with one thread equal vectors give equal
bytes. Only a shard of a kind that is `threaded`, as a graph is, is given the cores that no other shard wants.
The jobs pass on blobs of the store, which are read by range: only the merging worker reads whole files.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from beam_jobs.index_tasks import IndexBuild, ScatterTask, ShardTask, StageOutput, blobs_in, deciding, required, sharing
from beam_jobs.launch import Report
from beam_jobs.threads import limit_threads
from rag_model.cores import cores
from rag_model.digest import digest_bytes
from rag_model.errors import InputError, StoreError
from rag_model.index.carrying import CarryingKind, EarlierPiece
from rag_model.index.files import engine
from rag_model.index.files.pieces import Opener, opener
from rag_model.index.files.slices import PLACES, Place
from rag_model.index.plan import Facts
from rag_model.index.quality import fit
from rag_model.index.quality.fit import Fit
from rag_model.index.registry import kind_named
from rag_model.index.sizing.amounts import check_disk
from rag_model.snapshots.earlier_index import EarlierIndex
from rag_model.snapshots.heritage import Heirloom
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.memo import Produced
from rag_model.store.store import Store


def derive_one(build: IndexBuild, store: Store) -> Report:
    """Make one index of the parent's, once; report nothing if it is to be built as a whole."""

    def make(out: Path) -> Facts:
        earlier = EarlierIndex.from_json(json.loads(store.blobs.read(required(build.earlier))))
        with suppress(InputError, StoreError):  # what is damaged is not used; a whole build tells what it needs itself
            if (facts := earlier.derive(store, build.plan, out)) is not None:
                return facts
        raise _WholeError

    try:
        return _once(store, "derive", deciding(build.plan), make, vectors=build.rows.id).to_json()
    except _WholeError:
        return StageOutput(None, {}).to_json()


class _WholeError(Exception):
    """An index is to be built as a whole."""


def train_one(build: IndexBuild, store: Store) -> Report:
    """Train one index, once; if an inherited file fits, only report that."""
    plan, heirloom = build.plan, build.inherited
    why = heirloom and heirloom.trained.reason(plan.drift)
    if heirloom and not why:
        found = _fit_of(build, heirloom, store)
        why, missed = found.reason(plan.drift), found.missed()
        if not why:
            return (_moved(build, heirloom, missed, store) if missed else StageOutput(None, {})).to_json()

    def make(out: Path) -> Facts:
        return kind_named(plan.kind).train(plan, _local(store, build.rows), out)

    made = _once(store, "train", deciding(plan), make, vectors=build.rows.id)
    return replace(made, note=f"trained again: {why}" if why else "").to_json()


def _moved(build: IndexBuild, heirloom: Heirloom, missed: str, store: Store) -> StageOutput:
    """Move the lists of an inherited trained file to the present vectors, once."""
    plan = build.plan

    def make(out: Path) -> Facts:
        return kind_named(plan.kind).follow(plan, store.blobs.local(heirloom.blob), _local(store, build.rows), out)

    made = _once(store, "follow", deciding(plan), make, vectors=build.rows.id, trained=heirloom.blob.id)
    return replace(made, note=f"trained as in snapshot {heirloom.snapshot[:12]}, lists moved: {missed}")


def _fit_of(build: IndexBuild, heirloom: Heirloom, store: Store) -> Fit:
    """Measure how an inherited trained file fits the new vectors, once."""
    plan = build.plan

    def measured(_: Path) -> Produced:
        changed = [(store.blobs.local(new), [*map(store.blobs.local, old)]) for new, old in heirloom.changed]
        same, trained = [*map(store.blobs.local, heirloom.same)], store.blobs.local(heirloom.blob)
        found = kind_named(plan.kind).fit(plan, trained, heirloom.trained.losses, changed, same)
        return Produced({}, found.to_json())

    looked_at = [[new.id, [ref.id for ref in old]] for new, old in heirloom.changed]
    same = [ref.id for ref in heirloom.same]
    inputs = sharing(plan) | {"fit": fit.VERSION, "trained": heirloom.blob.id, "changed": looked_at, "same": same}
    return Fit.of(store.memo.once("fit", inputs, measured)[0].facts)


def scatter_one(part: ScatterTask, store: Store) -> Report:
    """Sort one part's vectors, once."""
    plan, trained = part.build.plan, required(part.build.trained)

    def make(out: Path) -> Facts:
        files, kind = (store.blobs.local(trained), store.blobs.local(part.rows), part.number), kind_named(plan.kind)
        with suppress(InputError, StoreError):  # what is damaged is not used
            if isinstance(kind, CarryingKind) and kind.carries(plan) and (earlier := _earlier_pieces(part, store)):
                return kind.carry(plan, *files, earlier, out)
        return kind.scatter(plan, *files, out)

    return _once(store, "scatter", sharing(plan), make, **_scattered_of(part.rows, trained, part.number)).to_json()


def _scattered_of(rows: BlobRef, trained: BlobRef, number: int) -> dict[str, Any]:
    """Return the inputs of a part's piece, beside the plan."""
    return {"vectors": rows.id, "trained": trained.id, "number": number}


def _earlier_pieces(part: ScatterTask, store: Store) -> list[EarlierPiece]:
    """Return the parent's pieces of a part's pages that are recorded, made with the same trained file."""
    trained, found = required(part.build.trained), list[EarlierPiece]()
    for known in part.earlier:
        inputs = {**sharing(part.build.plan), **_scattered_of(known.rows, trained, known.number)}
        record = store.memo.get("scatter", store.memo.key(inputs))
        if record is not None and store.blobs.exists(known.rows):
            piece = opener(store.blobs.local(record.outputs["out"]))  # verified, since what is in it is published again
            found.append(EarlierPiece(store.blobs.local(known.rows), piece, known.number))
    return found


def build_shard(shard: ShardTask, store: Store) -> Report:
    """Build one shard from its slices of all parts, once."""
    plan, trained, kind = shard.build.plan, required(shard.build.trained), kind_named(shard.build.plan.kind)

    def make(out: Path) -> Facts:
        with engine.threads(max(1, cores() // shard.beside) if kind.threaded else 1):
            return kind.shard(plan, store.blobs.local(trained), _slices(shard, store), shard.number, out)

    return _once(
        store, "shard", sharing(plan), make, slices=shard.slices, trained=trained.id, number=shard.number
    ).to_json()


def _slices(shard: ShardTask, store: Store) -> Iterator[bytes]:
    """Return what a shard reads of each piece, in order, verified: one request a piece, many of them at once."""
    pieces = blobs_in(store, required(shard.build.scattered))
    every, size = required(shard.build.places), len(pieces) * PLACES.itemsize
    places = store.blobs.read_range(every, shard.number * size, (shard.number + 1) * size)
    if digest_bytes(places) != shard.places:
        raise store.blobs.damaged(every)

    def read(numbered: tuple[int, Place]) -> bytes:
        number, place = numbered
        data = store.blobs.read_range(pieces[number], place.start, place.end)
        if not place.holds(data):
            raise store.blobs.damaged(pieces[number])
        return data

    numbered = enumerate(Place.all_of(np.frombuffer(places, PLACES)))
    return store.files.ask(read, [(number, place) for number, place in numbered if place.size])


def merge_one(build: IndexBuild, store: Store) -> Report:
    """Merge the pieces and shards of one index, once."""
    plan, trained = build.plan, required(build.trained)
    scattered, shards = required(build.scattered), required(build.shards)

    def make(out: Path) -> Facts:
        needed, other = kind_named(plan.kind).estimate(plan).disk_bytes, "set TMPDIR to a folder on a disk with room"
        check_disk(out.parent, needed, f"merging {plan.factory}", other)
        whole = [opener(path) for path in _local(store, shards)]  # read sequentially, a little of each at a time
        pieces = _openers(store, scattered) if whole else [opener(path) for path in _local(store, scattered)]
        rows = _local(store, build.rows)
        return kind_named(plan.kind).merge(plan, store.blobs.local(trained), rows, pieces, whole, out)

    made_of = {"vectors": build.rows.id, "scattered": scattered.id, "shards": shards.id}
    return _once(store, "merge", deciding(plan), make, trained=trained.id, **made_of).to_json()


def _once(
    store: Store, stage: str, decides: Mapping[str, Any], make: Callable[[Path], Facts], **inputs: Any
) -> StageOutput:
    def produce(workdir: Path) -> Produced:
        limit_threads(1)
        out = workdir / stage
        facts = make(out)
        return Produced({"out": out}, facts)

    record, made = store.memo.once(stage, {**decides, **inputs}, produce)
    return StageOutput(record.outputs["out"], dict(record.facts), made)


def _local(store: Store, listed: BlobRef) -> list[Path]:
    return [store.blobs.local(ref) for ref in blobs_in(store, listed)]


def _openers(store: Store, listed: BlobRef) -> list[Opener]:
    return [partial(store.blobs.open, ref) for ref in blobs_in(store, listed)]
