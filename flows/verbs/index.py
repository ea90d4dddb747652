"""`bookwheel index`: build one index over vectors from files, or plan it without any vectors."""

from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from flows.command.reply import Common, Reply, format_numbers
from flows.index import IndexOutcome, IndexRequest, index_vectors, plan_index
from rag_model.errors import ResourceError, UsageError, format_count
from rag_model.index.build import get_kept_rows_path
from rag_model.index.estimate import estimate_max_recall, estimate_recall
from rag_model.index.factory import with_refinement
from rag_model.index.files.engine import Metric
from rag_model.index.files.intake import InvalidRowPolicy, inspect_vectors
from rag_model.index.kind import get_kind_for_factory
from rag_model.index.quality.results import OperatingPoint
from rag_model.index.recipe import IndexRecipe
from rag_model.process import format_bytes, parse_bytes
from rag_model.resources.estimates import SECONDS_ERROR, estimate_row_bytes, estimate_stage_seconds
from rag_model.secrets import refuse_url_as_path

# Fields of a plan that are reported: for a plan with shards, and for a plan without.
_REPORTED_FIELDS = ("ef_construction", "cells", "border", "linked"), ("train_sample",)
_MAX_VECTORS, _MAX_DIMENSIONS = 1 << 40, 1 << 16  # upper bounds of --n and --d
DEFAULT_FACTORY = "HNSW32"  # the default structure, if it fits in memory
_DEFAULT_RECIPE = IndexRecipe(DEFAULT_FACTORY)


def describe_plan(request: IndexRequest, n: int, d: int) -> Reply:
    """Plan a request for n vectors, or n passages with token vectors, of d dimensions.

    Raises:
        UsageError: the recipe does not fit `d`.
        ResourceError: the index does not fit in memory; the message says what to change.
    """
    kind = get_kind_for_factory(request.recipe.factory)
    is_over_vectors = kind.represents == "vectors"
    plan: Any = plan_index(request, n, d) if is_over_vectors else kind.plan(request.recipe, n, d)
    cost, row_bytes = kind.estimate(plan), estimate_row_bytes(kind.represents, d)
    seconds_by_stage = estimate_stage_seconds(plan, d)
    build_bytes, plan_factory = cost.peak_bytes(), with_refinement(plan.factory, getattr(plan, "refine", None))
    if request.memory is not None and build_bytes > request.memory:
        description = (
            f"{plan.factory} over {format_count(n, 'passage')} takes {format_bytes(build_bytes)} of memory to build"
        )
        raise ResourceError(f"{description}: raise --memory from {format_bytes(request.memory)}")
    plan_numbers = {
        name: getattr(plan, name) for name in _REPORTED_FIELDS[not plan.shards] if getattr(plan, name, None) is not None
    }
    plan_record = plan.entry() | plan_numbers | {"notes": list(plan.notes), "stage_bytes": dict(cost.stages)}
    plan_record |= {"build_bytes": build_bytes, "search_bytes": cost.search_bytes, "disk_bytes": cost.disk_bytes}
    plan_record |= {"work_bytes": cost.work_bytes, "beside_bytes": n * row_bytes}
    seconds_error = SECONDS_ERROR.get(plan.kind)
    error_note = (
        ""
        if seconds_error is None
        else f": measured builds of up to 200,000 vectors differ by at most {seconds_error:.0%}"
    )
    recall = estimate_recall(plan) if is_over_vectors else None
    max_recall = estimate_max_recall(plan_factory, d, n) if is_over_vectors else None
    recall_note = "" if recall is None else f"about {recall:.2f} with this search, "
    plan_record |= {"cpu_seconds_error": seconds_error, "recall": recall, "max_recall": max_recall}
    plan_record["cpu_seconds"] = {stage: round(stage_seconds, 1) for stage, stage_seconds in seconds_by_stage.items()}
    lines = [
        f"index     {plan_factory} over {n:,} {f'vectors of {d} dimensions' if is_over_vectors else 'passages'}",
        f"numbers   {format_numbers(plan_numbers) or 'none'}",
        f"search    {format_numbers(plan.search) or 'exact'}",
        *([f"recall    {recall_note}at most about {max_recall:.2f}"] if max_recall else []),
        *(f"note      {note}" for note in plan.notes),
        *(
            f"{stage:<9} {format_bytes(cost.stages.get(stage, 0))} of memory a task, "
            f"{core_seconds / 60:,.1f} minutes of one core"
            for stage, core_seconds in seconds_by_stage.items()
        ),
        f"memory    {format_bytes(build_bytes)} to build, {format_bytes(cost.search_bytes)} to search",
        f"disk      {format_bytes(cost.disk_bytes)} for the index, {cost.disk_bytes / n:,.0f} "
        f"bytes a passage; {format_bytes(cost.work_bytes)} while it is built",
        f"{kind.represents:<9} {format_bytes(n * row_bytes)} on disk in addition to the index, "
        f"{row_bytes:,} bytes a passage",
        f"time      {sum(seconds_by_stage.values()) / 60:,.1f} minutes of one core, about{error_note}",
    ]
    return Reply(plan_record, "\n".join(lines))


def index(
    *paths: str,
    factory: Annotated[str | None, Parameter(name="--index")] = None,
    shards: int | None = None,
    metric: Metric = "ip",
    memory: str | None = None,
    recall: float | None = None,
    questions: Path | None = None,
    column: str | None = None,
    invalid: InvalidRowPolicy = "refuse",
    ef_construction: int = _DEFAULT_RECIPE.ef_construction,
    border: float = _DEFAULT_RECIPE.border,
    linked: float = _DEFAULT_RECIPE.linked,
    seed: int = 0,
    plan: bool = False,
    n: Annotated[int | None, Parameter(alias="-n")] = None,
    d: Annotated[int | None, Parameter(alias="-d")] = None,
    work: Path | None = None,
    disk: str | None = None,
    common: Common | None = None,
) -> Reply:
    """Build one index file over vectors, which plain faiss reads, and report recall and latency.

    An interrupted run is resumed by running the same command again. Beam's options follow after
    `--`. With --plan nothing is built: `bookwheel index --plan -n 21015324 -d 768 --memory 16GB`.
    For kinds that are not built over vectors, n is the number of passages: `bookwheel index --plan
    --index MaxSim --n 1000 -d 128`. Indexes of words and of weighted terms need no dimension:
    `bookwheel index --plan --index Impact --n 1000`.

    Args:
        paths: VECTORS… OUT: .npy or Parquet files, or folders of them; then the index file to
            write.
        factory: A faiss factory string; by default the best index that fits into memory.
        shards: Number of cells of a graph, which are built in parallel; the default depends on the
            size.
        metric: Inner product, or squared distance.
        memory: Memory for building and for searching: 16GB, 512MiB; by default the free memory.
        recall: Choose the index and its search parameters for this recall@20, such as 0.95. Without
            --index only structures that reach this recall are considered; with --plan they may
            rerank by the vectors of a snapshot.
        questions: Query vectors for the measurement; by default some of the indexed vectors.
        column: The column of Parquet files, if several contain vectors.
        invalid: Rows with a NaN or an infinity: refuse them, or drop them and write the numbers of
            the other rows to OUT.rows.npy.
        ef_construction: Number of candidates for the links of a graph node.
        border: Mean number of further cells whose graphs contain a vector.
        linked: Mean number of further cells that a vector is linked into.
        seed: Seed of all random numbers.
        plan: Report the planned index and its cost; build nothing.
        n: With --plan: the number of vectors, if there are none yet.
        d: With --plan: the dimension of the vectors.
        work: Folder for temporary files, which all workers can access; by default that of OUT.
        disk: Disk limit for the index with the vectors that rerank its candidates, such as 50GB.
    """
    files = tuple(Path(path) for path in takewhile(lambda path: not path.startswith("-"), paths))
    for path in files:
        refuse_url_as_path(path)
    if not plan and len(files) < 2:
        raise UsageError("index needs VECTORS and OUT: bookwheel index vectors.npy index.faiss")
    recipe = IndexRecipe(
        factory or DEFAULT_FACTORY,
        metric,
        ef_construction=ef_construction,
        cells=shards,
        border=border,
        linked=linked,
        seed=seed,
        recall_target=recall,
    )
    request = IndexRequest(
        vectors=files[:-1] or files,
        out=files[-1] if files else Path(),
        recipe=recipe,
        fit_structure=factory is None,
        memory=parse_bytes(memory) if memory else None,
        column=column,
        invalid=invalid,
        questions=questions,
        work=work,
        disk=parse_bytes(disk) if disk else None,
        can_rerank=plan and recall is not None,
        beam_options=paths[len(files) :],
    )
    row_kind = get_kind_for_factory(recipe.factory).represents
    if plan:
        if d is not None and row_kind in {"text", "sparse"}:
            raise UsageError(f"--d is {d}, but {factory} has no dimension: leave --d out")
        return describe_plan(request, *_determine_size(request, n, 1 if row_kind in {"text", "sparse"} else d))
    if row_kind != "vectors":
        raise UsageError(f"{factory} is not built over vectors from files: name it in a recipe, as [index.NAME]")
    outcome = index_vectors(request)
    return Reply(_convert_outcome_to_json(outcome), _format_outcome(outcome))


def _determine_size(request: IndexRequest, n: int | None, d: int | None) -> tuple[int, int]:
    """Return the number and dimension of vectors to plan for; by default those of the files."""
    for name, given_size, maximum in (("--n", n, _MAX_VECTORS), ("--d", d, _MAX_DIMENSIONS)):
        if given_size is not None and not 1 <= given_size <= maximum:
            raise UsageError(f"{name} is {given_size}: give a number from 1 to {maximum:,}")
    if n is not None and d is not None:
        return n, d
    if not request.vectors:
        raise UsageError(
            "--plan needs --n and --d, or VECTORS: bookwheel index --plan -n 21015324 -d 768 --memory 16GB"
        )
    vector_input = inspect_vectors(request.vectors, request.column)
    return n or vector_input.n, d or vector_input.d


def _convert_outcome_to_json(outcome: IndexOutcome) -> dict[str, Any]:
    plan, evaluation = outcome.plan, outcome.evaluation
    return {
        "index": str(outcome.out),
        "rows": str(get_kept_rows_path(outcome.out)) if outcome.dropped else None,
        "factory": plan.factory,
        "metric": plan.metric,
        "n": plan.n,
        "d": plan.d,
        "cells": plan.cells,
        "bytes": outcome.size,
        "dropped": outcome.dropped,
        "search": dict(evaluation.search),
        "questions": evaluation.query_count,
        "k": evaluation.k,
        "curve": [_round_numbers(point) for point in evaluation.points],
        "health": dict(evaluation.health),
        "notes": [*plan.notes, *([evaluation.note] if evaluation.note else [])],
        "seconds": dict(outcome.seconds),
    }


def _round_numbers(point: OperatingPoint) -> dict[str, Any]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(point).items()}


def _format_outcome(outcome: IndexOutcome) -> str:
    plan, evaluation = outcome.plan, outcome.evaluation
    cells_text = f", {plan.cells} cells" if plan.cells > 1 else ""
    dropped_text = (
        f"; {format_count(outcome.dropped, 'row')} dropped, see {get_kept_rows_path(outcome.out)}"
        if outcome.dropped
        else ""
    )
    query_source = (
        f"{evaluation.query_count:,} of its own vectors"
        if evaluation.uses_own_vectors
        else format_count(evaluation.query_count, "question")
    )
    lines = [
        f"index     {outcome.out}: {plan.factory} ({plan.metric}){cells_text}, {outcome.size:,} bytes",
        f"vectors   {plan.n:,} of {plan.d} dimensions{dropped_text}",
        f"search    {format_numbers(evaluation.search) or 'exact'}",
        *(f"note      {note}" for note in [*plan.notes, evaluation.note] if note),
        f"health    {format_numbers(evaluation.health) or 'exact'}",
        f"seconds   {format_numbers(outcome.seconds)}",
        "",
        f"measured with {query_source}:",
        f"{'setting':<16}{f'recall@{evaluation.k}':>10}{'5th pct.':>10}{'ms':>9}{'distances':>11}",
        *map(_format_point, evaluation.points),
    ]
    return "\n".join(lines)


def _format_point(point: OperatingPoint) -> str:
    recall_text = f"{point.recall_mean:>10.4f}{point.recall_p5:>10.3f}"
    return f"{point.setting:<16}{recall_text}{point.milliseconds:>9.3f}{point.distances:>11,.0f}"
