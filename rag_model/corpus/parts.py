"""Divide a dump into parts: ranges of page ids of about equal weight, with the slices to read.

The ranges depend on the dump and the parent snapshot but not on the machine, because they determine
the row order and therefore the snapshot id. A later build keeps the parent's ranges: an article
stays in its part from dump to dump, and a part without changed articles stays the same file. New
pages are added to the last part until it is full, and then to new parts.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from fsspec.core import url_to_fs

from rag_model.corpus.records import Part, Slice, SourceKind
from rag_model.errors import ResourceError

# Minimum and maximum compressed bytes of a part, unless the recipe sets a size.
MIN_PART_BYTES, MAX_PART_BYTES = 256 << 10, 32 << 20
TARGET_PARTS = 16  # number of parts of a dump, within the limits above
_MAX_TEMPLATE_GAP = 1 << 18  # maximum bytes without templates between two slices that are joined
# Stores a local file where workers can read it, and returns its URL.
StageFile = Callable[[Path], str]
# Estimated text bytes per compressed byte. The weights of parts use this estimate, because zlib's
# real ratio differs by machine.
COMPRESSION_RATIO = 4


@dataclass(frozen=True, slots=True)
class PageRun:
    """A run of pages that can be read independently, such as one stream of a dump."""

    slice: Slice
    weight: int  # compressed bytes, or an estimate that is the same on every machine
    ordered: bool  # page ids strictly increase within the run
    has_templates: bool = True  # whether a page may define a template; True if unknown


@dataclass(frozen=True, slots=True)
class PartBoundaries:
    """The boundaries of the parts of a parent snapshot."""

    kind: SourceKind
    dbname: str  # database name of the wiki to which the page ids belong
    starts: tuple[int, ...]  # first page of each part, ascending; the first is 0
    end: int  # id of the first page after the last part


def choose_part_weight(dump_bytes: int) -> int:
    """Return the target weight of a part for a dump of `dump_bytes` compressed bytes."""
    return min(max(dump_bytes // TARGET_PARTS, MIN_PART_BYTES), MAX_PART_BYTES)


def choose_starts(
    runs: Sequence[PageRun], target_weight: int | None = None, parent_boundaries: PartBoundaries | None = None
) -> list[int]:
    """Return the first page id of each part; the first is 0. `runs` are sorted by first page.

    If `parent_boundaries` is given, the parent's parts are kept, and new pages fill the last part
    up to `target_weight`.
    """
    total_weight = sum(run.weight for run in runs)
    part_weight = target_weight or choose_part_weight(total_weight)
    if parent_boundaries is not None:
        return _extend_starts(runs, part_weight, parent_boundaries)
    n_parts = max(1, round(total_weight / part_weight))
    first_pages, done_weight = [0], 0
    for run in runs:
        if done_weight * n_parts >= total_weight * len(first_pages) and run.slice.first_page > first_pages[-1]:
            first_pages.append(run.slice.first_page)
        done_weight += run.weight
    return first_pages


def _extend_starts(runs: Sequence[PageRun], target_weight: int, parent_boundaries: PartBoundaries) -> list[int]:
    first_pages, weight_in_part = list(parent_boundaries.starts), 0
    for run in runs:
        first_page = run.slice.first_page
        if first_page < first_pages[-1]:
            continue
        if first_page >= parent_boundaries.end and first_page > first_pages[-1] and weight_in_part >= target_weight:
            first_pages.append(first_page)
            weight_in_part = 0
        weight_in_part += run.weight
    return first_pages


def select_template_runs(runs: Sequence[PageRun]) -> list[PageRun]:
    """Return the runs with templates, and the runs in short gaps between them.

    Including short gaps keeps the number of slices of a part small.
    """
    selected_runs: list[PageRun] = []
    skipped_runs: list[PageRun] = []
    for run in runs:
        if not run.has_templates:
            skipped_runs.append(run)
            continue
        if selected_runs and sum(skipped_run.slice.length for skipped_run in skipped_runs) <= _MAX_TEMPLATE_GAP:
            selected_runs += skipped_runs
        selected_runs.append(run)
        skipped_runs = []
    return selected_runs


def assemble_parts(
    kind: SourceKind, runs: Sequence[PageRun], starts: Sequence[int], last_page: int, part_format: str = ""
) -> tuple[Part, ...]:
    """Return the parts that start at `starts`, with their slices; the last ends at `last_page`.

    `runs` are sorted by first page; a start beyond `last_page` gives no part. Adjacent streams of a
    file are joined to one slice. `part_format` is the `Part.format` of the parts.
    """
    starts = [first_page for first_page in starts if first_page <= last_page] or [0]
    last_pages = [first_page - 1 for first_page in starts[1:]] + [last_page]
    parts = []
    remaining_runs, overlapping_runs = iter(runs), list[PageRun]()
    next_run = next(remaining_runs, None)
    for i, (first_page, part_last_page) in enumerate(zip(starts, last_pages, strict=True)):
        overlapping_runs = [run for run in overlapping_runs if run.slice.last_page >= first_page]
        while next_run is not None and next_run.slice.first_page <= part_last_page:
            overlapping_runs.append(next_run)
            next_run = next(remaining_runs, None)
        slices = tuple(_join_slices(run.slice for run in overlapping_runs))
        name, are_ordered = f"part-{i:05d}", is_ordered(overlapping_runs)
        parts.append(Part(name, kind, first_page, part_last_page, slices, are_ordered, part_format))
    return tuple(parts)


def is_ordered(runs: Sequence[PageRun]) -> bool:
    """Return whether page ids strictly increase through all runs, so that no id is repeated."""
    are_ascending = (run.slice.last_page < next_run.slice.first_page for run, next_run in pairwise(runs))
    return all(run.ordered for run in runs) and all(are_ascending)


def _join_slices(slices: Iterator[Slice]) -> Iterator[Slice]:
    joined_slice: Slice | None = None
    for byte_slice in slices:
        if joined_slice is not None and _is_adjacent(joined_slice, byte_slice):
            length = joined_slice.length + byte_slice.length
            joined_slice = replace(joined_slice, length=length, last_page=byte_slice.last_page)
            continue
        if joined_slice is not None:
            yield joined_slice
        joined_slice = byte_slice
    if joined_slice is not None:
        yield joined_slice


def _is_adjacent(joined_slice: Slice, byte_slice: Slice) -> bool:
    is_adjacent = joined_slice.url == byte_slice.url and joined_slice.offset + joined_slice.length == byte_slice.offset
    return is_adjacent and joined_slice.last_page < byte_slice.first_page


def stage_file(stage: StageFile, path: Path) -> str:
    """Stage a file and return its URL; delete the local file unless it was staged in place."""
    staged_url = stage(path)
    filesystem, file_path = url_to_fs(staged_url)
    is_in_place = "file" in filesystem.protocol and Path(file_path) == path.absolute()
    if not is_in_place:
        path.unlink(missing_ok=True)
    return staged_url


@contextmanager
def translate_write_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError in the block into a ResourceError that names `folder`."""
    try:
        yield
    except OSError as error:
        raise ResourceError(
            f"cannot write to {folder} ({error.strerror or error}): free space there or choose another folder"
        ) from error
