"""Run all stages of an index build in this process, one after another."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from rag_model.errors import InputError
from rag_model.index.files.pieces import Opener, opener
from rag_model.index.files.slices import Place, read_table
from rag_model.index.plan import Facts, IndexPlan
from rag_model.index.registry import kind_named


def build(plan: IndexPlan, rows: Sequence[Path], out: Path, workdir: Path) -> dict[str, list[Facts]]:
    """Build an index file of the parts' row files; return the stages' facts by stage.

    Leaves the stages' files in `workdir`, which must exist.

    Raises:
        InputError: a row file is missing, damaged, or does not match the plan.
        ResourceError: a file cannot be written, or memory ran out.
    """
    kind, trained = kind_named(plan.kind), workdir / "trained"
    facts: dict[str, list[Facts]] = {"train": [kind.train(plan, rows, trained)], "scatter": [], "shard": []}
    pieces = [workdir / f"scattered-{number:05d}" for number in range(len(rows))]
    for number, (path, piece) in enumerate(zip(rows, pieces, strict=True)):
        facts["scatter"].append(kind.scatter(plan, trained, path, number, piece))
    shards: list[Opener] = []
    for number in range(plan.shards):
        piece = workdir / f"shard-{number:05d}"
        facts["shard"].append(kind.shard(plan, trained, slices_of(pieces, plan.shards, number), number, piece))
        shards.append(opener(piece))
    return facts | {"merge": [kind.merge(plan, trained, rows, [*map(opener, pieces)], shards, out)]}


def slices_of(pieces: Sequence[Path], shards: int, number: int) -> Iterator[bytes]:
    """Yield what shard `number` of `shards` reads of each piece, in order, without pieces of which it reads nothing.

    Raises:
        InputError: a piece is missing, truncated or damaged.
    """
    for path in pieces:
        try:
            read, size = partial(_read, path), path.stat().st_size
            (place,) = Place.all_of(read_table(read, size, shards, str(path))[number : number + 1])
            data = read(place.start, place.end)
        except OSError as failed:
            raise InputError(f"cannot read {path} ({failed.strerror or failed}): build it again") from failed
        if not place.holds(data):
            raise InputError(f"{path} is damaged: delete that file and build it again")
        if data:
            yield data


def _read(path: Path, start: int, end: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(end - start)
