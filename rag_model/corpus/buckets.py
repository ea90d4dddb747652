"""Distribute records to parts by the hash of their id: one pass over the source, one file per part."""

import gzip
import json
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain, pairwise
from pathlib import Path

from rag_model.corpus.documents import PLACES, place_of
from rag_model.corpus.parts import Fences, part_weight
from rag_model.corpus.records import Part, Slice, SourceKind
from rag_model.corpus.rows import Record
from rag_model.corpus.staging import RATIO, Stage, put, writing

HELD = 16 << 20  # bytes of records in memory before they are written to the disk


def bucket_parts(
    kind: SourceKind,
    records: Iterable[Record],
    *,
    size: int,
    target: int | None,
    fences: Fences | None = None,
    workdir: Path,
    stage: Stage,
) -> tuple[Part, ...]:
    """Return parts that divide the places, each with the records of its places in the order given.

    The parts are of equal range. Their number is set by the weight of all records if those fit in memory, otherwise
    by `size`, the bytes of the source; `target`, if given, is the weight of one part. With `fences` the earlier parts
    are kept, until they have reached twice that weight. Without records there are no parts.
    """
    lines = map(_encoded, records)
    batch = _batch(lines)
    if not batch:
        return ()
    held = sum(len(line) for _, line in batch)
    weight = size if held >= HELD else held // RATIO
    starts = _starts(weight, target or part_weight(weight), fences)
    folder = Path(tempfile.mkdtemp(dir=workdir, prefix="buckets-"))
    with writing(workdir):
        for more in chain([batch], iter(lambda: _batch(lines), [])):
            _append(more, starts, folder)
    ranges = pairwise([*starts, PLACES])
    parts = tuple(_part(kind, i, first, end - 1, folder, stage) for i, (first, end) in enumerate(ranges))
    with suppress(OSError):  # not empty if `stage` leaves the files in place
        folder.rmdir()
    return parts


def _starts(weight: int, target: int, fences: Fences | None) -> list[int]:
    if fences is not None and weight <= 2 * target * len(fences.starts):
        return list(fences.starts)
    count = max(1, round(weight / target))
    return [-(-i * PLACES // count) for i in range(count)]


def _encoded(record: Record) -> tuple[int, bytes]:
    return place_of(record[0]), json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _batch(lines: Iterator[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    batch, held = [], 0
    for place, line in lines:
        batch.append((place, line))
        held += len(line)
        if held >= HELD:
            break
    return batch


def _append(batch: list[tuple[int, bytes]], starts: list[int], folder: Path) -> None:
    buckets = defaultdict[int, bytearray](bytearray)
    for place, line in batch:
        buckets[bisect_right(starts, place) - 1] += line
    for i, lines in buckets.items():
        with _file(folder, i).open("ab") as file:
            file.write(gzip.compress(lines, 1, mtime=0))


def _part(kind: SourceKind, i: int, first: int, last: int, folder: Path, stage: Stage) -> Part:
    path, slices = _file(folder, i), tuple[Slice, ...]()
    if path.exists():
        size = path.stat().st_size
        slices = (Slice(put(stage, path), 0, size, "gzip", first, last),)
    return Part(f"part-{i:05d}", kind, first, last, slices)


def _file(folder: Path, i: int) -> Path:
    return folder / f"bucket-{i:05d}.jsonl.gz"
