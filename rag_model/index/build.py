"""Build an index in one call, in this process: vectors in, a plain faiss file out.

>>> build_index(["vectors.npy"], Path("index.faiss"), IndexRecipe("HNSW32", metric="l2"))  # doctest: +SKIP

`bookwheel index` does the same on many processes or machines, resumes after it was killed, and measures the index.
"""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rag_model.errors import ResourceError, UsageError
from rag_model.index.factory import with_refinement
from rag_model.index.files.arrays import Block
from rag_model.index.files.engine import Rows, Vectors
from rag_model.index.files.intake import Invalid, cut, look
from rag_model.index.recipe import IndexRecipe, VectorPlan, resolve
from rag_model.index.search import set_default
from rag_model.index.stages import build
from rag_model.landing import landing


def build_index(
    vectors: Sequence[Path | str] | Vectors,
    out: Path,
    recipe: IndexRecipe,
    *,
    column: str | None = None,
    invalid: Invalid = "refuse",
) -> VectorPlan:
    """Build an index file; return the plan that the recipe was resolved to.

    Works in a folder beside `out`, which is deleted at the end. faiss uses as many threads as it is set to; with one
    (`faiss.omp_set_num_threads(1)`) equal vectors give equal bytes.

    Args:
        vectors: (n, d) float16 or float32, or `.npy` and Parquet files and folders of them, in row order.
        out: the file to write; it is replaced in one step.
        recipe: what to build.
        column: of Parquet files; None: the only one that holds lists of floats.
        invalid: what to do with rows that hold a NaN or an infinity: `refuse`, or `drop`. Then `out` + `.rows.npy` says
            the row of the vectors for each id of the index.

    Raises:
        InputError: the vectors cannot be indexed; the message names file and row.
        UsageError: the recipe does not fit them.
        ResourceError: memory or disk ran out.
    """
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as folder:
        work, parts = Path(folder), list[Path]()
        intake = look(
            [_saved(vectors, work)] if isinstance(vectors, np.ndarray) else [Path(path) for path in vectors], column
        )

        def put(block: Block) -> None:
            parts.append(work / f"part-{len(parts):05d}.npy")
            np.save(parts[-1], block, allow_pickle=False)

        kept = cut(intake, put, invalid)
        plan = resolve(recipe, intake.n if kept is None else len(kept), intake.d)
        check_alone(plan)
        build(plan, parts, work / "index", work)
        place(work / "index", out, plan.search, kept)
    return plan


def check_alone(plan: VectorPlan) -> None:
    """Check that an index file answers without the snapshot that a plan may count on.

    Raises:
        UsageError: it ranks again by vectors outside the file.
    """
    if plan.refine is not None:
        wanted = with_refinement(plan.factory, plan.refine)
        raise UsageError(f"{wanted} ranks by vectors outside the index file: use Refine(SQfp16) instead")


def place(index: Path, out: Path, search: Mapping[str, int], kept: Rows | None) -> None:
    """Move a finished index to `out` in one step, its search parameters set.

    Args:
        index: the file; it is moved, or copied if `out` is on another disk.
        out: the destination.
        search: efSearch, or nprobe and refine.
        kept: the row of the vectors for each id; None: ids are rows, and no `.rows.npy` file is written.

    Raises:
        ResourceError: the file cannot be written.
    """
    try:
        if kept is None:
            rows_path(out).unlink(missing_ok=True)  # of an earlier index
        else:
            with landing(rows_path(out)) as temporary, temporary.open("wb") as file:
                np.save(file, kept, allow_pickle=False)
        with landing(out) as temporary:
            try:
                index.rename(temporary)
            except OSError:  # on another disk
                shutil.copyfile(index, temporary)
            set_default(temporary, search)
    except OSError as failed:
        raise ResourceError(f"cannot write {out}: {failed.strerror}") from failed


def rows_path(out: Path) -> Path:
    """Return the path of the file with the row of each id, which exists if rows were dropped."""
    return out.with_name(f"{out.name}.rows.npy")


def _saved(vectors: Vectors, work: Path) -> Path:
    np.save(work / "given.npy", vectors, allow_pickle=False)
    return work / "given.npy"
