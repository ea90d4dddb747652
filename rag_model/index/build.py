"""Build an index in this process: `build_index` from vectors, `run_stages` from a plan of any kind.

>>> recipe = IndexRecipe("HNSW32", metric="l2")
>>> build_index(["vectors.npy"], Path("index.faiss"), recipe)  # doctest: +SKIP

`bookwheel index` does the same with many processes or machines, resumes after it was killed, and
measures the index.
"""

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from rag_model.atomic_write import atomic_write, fsync
from rag_model.errors import InputError, ResourceError, UsageError
from rag_model.index.factory import with_refinement
from rag_model.index.files.engine import Rows, Vectors
from rag_model.index.files.intake import Block, InvalidRowPolicy, inspect_vectors, split_into_parts
from rag_model.index.files.pieces import Opener, SliceLocation, path_opener, read_slice_table
from rag_model.index.kind import IndexBuilder, get_kind
from rag_model.index.plan import IndexPlan, IndexStats
from rag_model.index.recipe import IndexRecipe, VectorPlan, resolve
from rag_model.index.search import write_default_search


def run_stages(plan: IndexPlan, files: Sequence[Path], out: Path, workdir: Path) -> dict[str, list[IndexStats]]:
    """Build an index file from the parts' row files; return the statistics of each stage.

    The stages' files stay in `workdir`, which must exist.

    Raises:
        InputError: a row file is missing, damaged, or does not match the plan.
        ResourceError: a file cannot be written, or memory ran out.
    """
    builder: IndexBuilder = get_kind(plan.kind)
    trained = workdir / "trained"
    stats: dict[str, list[IndexStats]] = {"train": [builder.train(plan, files, trained)], "scatter": [], "shard": []}
    pieces = [workdir / f"scattered-{i:05d}" for i in range(len(files))]
    for i, (path, piece_path) in enumerate(zip(files, pieces, strict=True)):
        stats["scatter"].append(builder.scatter(plan, trained, path, i, piece_path))
    shards: list[Opener] = []
    for i in range(plan.shards):
        shard_path = workdir / f"shard-{i:05d}"
        stats["shard"].append(builder.shard(plan, trained, iter_slices(pieces, plan.shards, i), i, shard_path))
        shards.append(path_opener(shard_path))
    return stats | {"merge": [builder.merge(plan, trained, files, [*map(path_opener, pieces)], shards, out)]}


def iter_slices(pieces: Sequence[Path], n_shards: int, shard_number: int) -> Iterator[bytes]:
    """Yield the non-empty slices that shard `shard_number` of `n_shards` reads, piece by piece.

    Raises:
        InputError: a piece is missing, truncated or damaged.
    """
    for path in pieces:
        try:
            read_range, file_bytes = partial(_read_byte_range, path), path.stat().st_size
            table = read_slice_table(read_range, file_bytes, n_shards, str(path))
            (location,) = SliceLocation.from_table(table[shard_number : shard_number + 1])
            slice_bytes = read_range(location.start, location.end)
        except OSError as error:
            raise InputError(f"cannot read {path} ({error.strerror or error}): build it again") from error
        if not location.matches(slice_bytes):
            raise InputError(f"{path} is damaged: delete that file and build it again")
        if slice_bytes:
            yield slice_bytes


def _read_byte_range(path: Path, start_byte: int, end_byte: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start_byte)
        return file.read(end_byte - start_byte)


def build_index(
    vectors: Sequence[Path | str] | Vectors,
    out: Path,
    recipe: IndexRecipe,
    *,
    column: str | None = None,
    invalid: InvalidRowPolicy = "refuse",
) -> VectorPlan:
    """Build an index file from vectors; return the plan that the recipe was resolved to.

    A temporary folder next to `out` holds the work files. faiss uses its current number of threads;
    with one thread (`faiss.omp_set_num_threads(1)`) equal vectors give equal bytes.

    Args:
        vectors: (n, d) float16 or float32; or `.npy` and Parquet files, and folders of them, in row
            order.
        out: the file to write; it is replaced atomically.
        recipe: the index to build.
        column: the vector column of Parquet files; None uses the only column of float lists.
        invalid: `refuse` vectors that hold a NaN or an infinity, or `drop` these rows. With `drop`,
            `out` + `.rows.npy` maps each id of the index to its row in `vectors`.

    Raises:
        InputError: the vectors cannot be indexed; the message names file and row.
        UsageError: the recipe does not fit the vectors.
        ResourceError: memory or disk ran out.
    """
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as folder:
        work_folder, part_files = Path(folder), list[Path]()
        input_vectors = inspect_vectors(
            [_save_vectors(vectors, work_folder)]
            if isinstance(vectors, np.ndarray)
            else [Path(path) for path in vectors],
            column,
        )

        def write_part(block: Block) -> None:
            part_files.append(work_folder / f"part-{len(part_files):05d}.npy")
            np.save(part_files[-1], block, allow_pickle=False)

        valid_rows = split_into_parts(input_vectors, write_part, invalid)
        plan = resolve(recipe, input_vectors.n if valid_rows is None else len(valid_rows), input_vectors.d)
        check_self_contained(plan)
        run_stages(plan, part_files, work_folder / "index", work_folder)
        install_index(work_folder / "index", out, plan.search, valid_rows)
    return plan


def check_self_contained(plan: VectorPlan) -> None:
    """Check that an index file can be searched without the snapshot's vectors.

    Raises:
        UsageError: the plan reranks with vectors outside the file.
    """
    if plan.refine is not None:
        refined_factory = with_refinement(plan.factory, plan.refine)
        advice = "leave Refine(vectors) out" if plan.factory.startswith("HNSW") else "use Refine(SQfp16) instead"
        raise UsageError(f"{refined_factory} reranks with vectors outside the index file: {advice}")


def install_index(index: Path, out: Path, search: Mapping[str, int], kept_rows: Rows | None) -> None:
    """Move a finished index to `out` atomically, and write its default search parameters.

    Args:
        index: the file to move; it is copied if `out` is on another disk.
        out: the destination.
        search: default search parameters: efSearch, or nprobe and refine.
        kept_rows: the input row of each id; None if ids are the input rows, so that no `.rows.npy`
            file is needed.

    Raises:
        ResourceError: the file cannot be written.
    """
    try:
        with atomic_write(out) as temporary:
            try:
                index.rename(temporary)
            except OSError:  # `out` is on another disk
                shutil.copyfile(index, temporary)
            write_default_search(temporary, search)
            fsync(temporary)
            # Write the row numbers last: the previous index needs its own until it is replaced.
            if kept_rows is None:
                get_kept_rows_path(out).unlink(missing_ok=True)
            else:
                with atomic_write(get_kept_rows_path(out)) as temporary_rows, temporary_rows.open("wb") as file:
                    np.save(file, kept_rows, allow_pickle=False)
    except OSError as error:
        raise ResourceError(f"cannot write {out}: {error.strerror}") from error


def get_kept_rows_path(out: Path) -> Path:
    """Return the path of the file that maps ids to input rows.

    Only a build that drops rows writes this file.
    """
    return out.with_name(f"{out.name}.rows.npy")


def _save_vectors(vectors: Vectors, work_folder: Path) -> Path:
    np.save(work_folder / "given.npy", vectors, allow_pickle=False)
    return work_folder / "given.npy"
