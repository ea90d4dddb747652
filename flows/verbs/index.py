"""`bookwheel index`: the index builder as a separate tool."""

from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from flows.command.reply import Common, Reply, figures
from flows.index import Indexed, Order, index_vectors
from flows.prospect import prospect
from rag_model.errors import UsageError
from rag_model.index.build import rows_path
from rag_model.index.files.engine import Metric
from rag_model.index.files.intake import Invalid, look
from rag_model.index.quality.health import Effort
from rag_model.index.recipe import IndexRecipe
from rag_model.index.registry import kind_for
from rag_model.index.sizing.amounts import parse_bytes
from rag_model.secrets import refuse_url

_MOST_VECTORS, _MOST_DIMENSIONS = 1 << 40, 1 << 16  # that --plan takes

OPEN = "HNSW32"  # the default structure, if it fits in memory
_DEFAULT = IndexRecipe(OPEN)


def index(
    *paths: Annotated[
        str, Parameter(help="VECTORS… OUT: .npy or Parquet files, or folders of them; then the file to write.")
    ],
    factory: Annotated[
        str | None,
        Parameter(
            name="--index",
            show_env_var=False,
            help="A faiss factory string; by default the best that fits in memory.",
        ),
    ] = None,
    shards: Annotated[int | None, Parameter(help="Cells of a graph, built in parallel; by default by size.")] = None,
    metric: Annotated[Metric, Parameter(help="Inner product, or squared distance.")] = "ip",
    memory: Annotated[
        str | None, Parameter(help="Memory to build in and to search in: 16GB, 512MiB; by default the free memory.")
    ] = None,
    recall: Annotated[float | None, Parameter(help="Set the index for this recall@20, such as 0.95.")] = None,
    questions: Annotated[
        Path | None,
        Parameter(show_env_var=False, help="Query vectors to measure with; by default some of the indexed ones."),
    ] = None,
    column: Annotated[str | None, Parameter(help="The column of Parquet files, if several contain vectors.")] = None,
    invalid: Annotated[
        Invalid, Parameter(help="Rows with a NaN or an infinity: refuse them, or drop them and say so in OUT.rows.npy.")
    ] = "refuse",
    ef_construction: Annotated[int, Parameter(help="Candidates for the links of a node.")] = _DEFAULT.ef_construction,
    border: Annotated[
        float, Parameter(help="Mean number of further cells per vector whose graph contains it too.")
    ] = _DEFAULT.border,
    linked: Annotated[
        float, Parameter(help="Mean number of further cells per vector that it is linked into.")
    ] = _DEFAULT.linked,
    seed: Annotated[int, Parameter(help="Seed of all random numbers.")] = 0,
    plan: Annotated[bool, Parameter(negative="", help="Report the planned index and its cost; build nothing.")] = False,
    n: Annotated[
        int | None, Parameter(alias="-n", help="With --plan: the number of vectors, if there are none yet.")
    ] = None,
    d: Annotated[int | None, Parameter(alias="-d", help="With --plan: their dimensions.")] = None,
    work: Annotated[
        Path | None, Parameter(help="Folder for temporary files, which all workers reach; by default that of OUT.")
    ] = None,
    common: Common | None = None,
) -> Reply:
    """Build one index over vectors of any origin: a file that plain faiss reads, and a report of recall and latency.

    An interrupted run is resumed by running the same command again. Beam's options follow after `--`.
    With --plan nothing is built: `bookwheel index --plan -n 21015324 -d 768 --memory 16GB`. For kinds that
    are not built over vectors, n is the number of passages: `bookwheel index --plan --index MaxSim --n 1000 -d 128`;
    of words and weighted terms, `bookwheel index --plan --index Impact --n 1000`, no dimension is needed.
    """
    files = tuple(Path(path) for path in takewhile(lambda path: not path.startswith("-"), paths))
    for path in files:
        refuse_url(path)
    if not plan and len(files) < 2:
        raise UsageError("index needs VECTORS and OUT: bookwheel index vectors.npy index.faiss")
    recipe = IndexRecipe(
        factory or OPEN,
        metric,
        ef_construction=ef_construction,
        cells=shards,
        border=border,
        linked=linked,
        seed=seed,
        recall_target=recall,
    )
    order = Order(
        vectors=files[:-1] or files,
        out=files[-1] if files else Path(),
        recipe=recipe,
        chosen=factory is None,
        memory=parse_bytes(memory) if memory else None,
        column=column,
        invalid=invalid,
        questions=questions,
        work=work,
        beam_options=paths[len(files) :],
    )
    represents = kind_for(recipe.factory).represents
    if plan:
        if d is not None and represents in {"text", "sparse"}:
            raise UsageError(f"--d is {d}, but {factory} has no dimension: leave --d out")
        return prospect(order, *_size(order, n, 1 if represents in {"text", "sparse"} else d))
    if represents != "vectors":
        raise UsageError(f"{factory} is not built over vectors from files: name it in a recipe, as [index.NAME]")
    made = index_vectors(order)
    return Reply(_document(made), _words(made))


def _size(order: Order, n: int | None, d: int | None) -> tuple[int, int]:
    """Return the number and the dimension of the vectors to plan for: as given, otherwise those of the files."""
    for name, value, most in (("--n", n, _MOST_VECTORS), ("--d", d, _MOST_DIMENSIONS)):
        if value is not None and not 1 <= value <= most:
            raise UsageError(f"{name} is {value}: give a number from 1 to {most:,}")
    if n is not None and d is not None:
        return n, d
    if not order.vectors:
        raise UsageError(
            "--plan needs --n and --d, or VECTORS: bookwheel index --plan -n 21015324 -d 768 --memory 16GB"
        )
    found = look(order.vectors, order.column)
    return n or found.n, d or found.d


def _document(made: Indexed) -> dict[str, Any]:
    plan, seen = made.plan, made.appraisal
    return {
        "index": str(made.out),
        "rows": str(rows_path(made.out)) if made.dropped else None,
        "factory": plan.factory,
        "metric": plan.metric,
        "n": plan.n,
        "d": plan.d,
        "cells": plan.cells,
        "bytes": made.size,
        "dropped": made.dropped,
        "search": dict(seen.search),
        "questions": seen.questions,
        "k": seen.k,
        "curve": [_rounded(effort) for effort in seen.efforts],
        "health": dict(seen.health),
        "notes": [*plan.notes, *([seen.note] if seen.note else [])],
        "seconds": dict(made.seconds),
    }


def _rounded(effort: Effort) -> dict[str, Any]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(effort).items()}


def _words(made: Indexed) -> str:
    plan, seen = made.plan, made.appraisal
    cells = f", {plan.cells} cells" if plan.cells > 1 else ""
    dropped = f"; {made.dropped:,} rows dropped, see {rows_path(made.out)}" if made.dropped else ""
    asked = f"{seen.questions:,} of its own vectors" if seen.own else f"{seen.questions:,} questions"
    lines = [
        f"index     {made.out}: {plan.factory} ({plan.metric}){cells}, {made.size:,} bytes",
        f"vectors   {plan.n:,} of {plan.d} dimensions{dropped}",
        f"search    {figures(seen.search) or 'exact'}",
        *(f"note      {note}" for note in [*plan.notes, seen.note] if note),
        f"health    {figures(seen.health) or 'exact'}",
        f"seconds   {figures(made.seconds)}",
        "",
        f"asked with {asked}:",
        f"{'setting':<16}{f'recall@{seen.k}':>10}{'5th pct.':>10}{'ms':>9}{'distances':>11}",
        *map(_row, seen.efforts),
    ]
    return "\n".join(lines)


def _row(effort: Effort) -> str:
    recall = f"{effort.recall_mean:>10.4f}{effort.recall_p5:>10.3f}"
    return f"{effort.setting:<16}{recall}{effort.milliseconds:>9.3f}{effort.distances:>11,.0f}"
