"""Reproduce a published table: fetch its data, build its libraries, and evaluate its rows.

Purpose: `bookwheel reproduce`, which compares each value with the published one.
Caching: libraries that were built from the same inputs are found in the store's memo, and recorded
evaluations are not repeated. An interrupted run continues when it is run again.
Requires: a store that this machine and the workers both reach; for answers the extras `model`
and `train`; a network for data that is not in the data folder.
"""

import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import partial
from math import ceil
from pathlib import Path
from shlex import join
from typing import Annotated, Any, TypeVar

import torch

from beam_jobs.job_settings import OnProgress
from flows import artifacts
from flows.add_index import add_index
from flows.evaluation_records import REPORT, NewEvaluation, store_evaluation
from flows.import_library import import_library
from flows.outcome import ReproduceOutcome, ReproductionIncompleteError, ReproductionRefusedError
from flows.parameters import Url, create_file_option
from flows.reindex import reindex
from flows.release_evaluator import ReleaseEvaluation, ReleaseEvaluator
from flows.reproduction import DataFile, Library, Reproduction, TableRow, read_reproduction
from flows.stage import StageClock, deployment_flow, stage
from rag_model.corpus.dump_catalog import fetch_file, hash_file
from rag_model.corpus.source import expand_pattern, get_version_tag, read_lines
from rag_model.digest import digest_json
from rag_model.encoders.architecture import Architecture, read_architecture
from rag_model.encoders.files import read_dim, resolve_folder
from rag_model.encoders.spec import DIM
from rag_model.errors import BookwheelError, InputError, StoreError, UsageError, format_count
from rag_model.evaluation.answers.settings import EvaluationSettings
from rag_model.evaluation.gate import ReleaseCriteria
from rag_model.evaluation.records import MeasureValues
from rag_model.evaluation.reports.reproduction import (
    ReproductionReport,
    ReproductionRow,
    render_reproduction_markdown,
    render_reproduction_page,
    summarize_verdicts,
)
from rag_model.evaluation.reports.run_files import write_report
from rag_model.extras import require
from rag_model.generate.decoding import DecodingSettings
from rag_model.index.kind import get_kind_for_factory
from rag_model.process import count_cores, format_bytes, temporary_folder
from rag_model.reading.model import resolve_model_id
from rag_model.resources import PASSAGE_TOKENS, PROMPT_TOKENS, QUESTION_TOKENS, WorkEstimate
from rag_model.resources.estimates import (
    estimate_build_for_architecture,
    estimate_passages,
    estimate_query_seconds,
    estimate_row_bytes,
)
from rag_model.retrieve.expression import parse
from rag_model.retrieve.factory import plan_retriever
from rag_model.retrieve.models import resolve_encoders
from rag_model.snapshots.planning import Inputs, collect_inputs, find_or_build_snapshot
from rag_model.snapshots.recipe import Recipe, draft_snapshot
from rag_model.store.pulling.export import open_destination
from rag_model.store.store import MODEL_PREFIX, Store
from rag_model.store.versions.evaluation_manifest import EvaluationSubject
from rag_model.store.versions.manifest import EXACT
from rag_model.store.versions.snapshot import Snapshot

VERSION = 1  # increase it when equal values would give another table; tables then get new ids
FailureKey = TypeVar("FailureKey", str, tuple[str, str])
DEFAULT_FOLDER = "reproduction-data"
MARKDOWN = "report.md"
_MIN_RECORDS, _MIN_QUESTIONS = 1_000, 20  # minimum numbers of records and questions in a sample
_TIMING_SECONDS = 1.0  # seconds of timing per row; short, because the table shows no times
SAMPLE_NOTE = "Measured on a sample of passages and questions: do not compare these values with the published ones."


@dataclass(frozen=True, slots=True)
class ReproductionPlan:
    """The selected rows of a table, and the data that the rows and their libraries need."""

    reproduction: Reproduction
    rows: tuple[TableRow, ...]
    data: Mapping[str, DataFile]  # data sets of the rows and of their libraries, by name
    folder: Path  # folder for local copies of data sets and models
    fraction: float | None  # share of the corpus and of the questions to use; None: all

    @property
    def libraries(self) -> dict[str, Library]:
        """The libraries of the rows, by name."""
        return {row.library: self.reproduction.library[row.library] for row in self.rows}

    def list_missing_data(self) -> dict[str, DataFile]:
        """Return the data sets that have to be downloaded."""
        return {
            name: file
            for name, file in self.data.items()
            if not (file.path or self.local_path(file).exists() or self.complete_path(file).exists())
        }

    def complete_path(self, file: DataFile) -> Path:
        """Return the path of the complete local copy of a data set."""
        return Path(file.path) if file.path else self.folder / file.local_name

    def local_path(self, file: DataFile) -> Path:
        """Return the path of the local copy; a sample from the Hub has a separate folder, with the
        first files.
        """
        path = self.complete_path(file)
        is_part = self.fraction is not None and file.url.startswith("hf://")
        return path.with_name(f"{path.name}-first-{self.fraction:g}") if is_part else path

    def get_path_or_glob(self, name: str) -> str:
        """Return the path of a file or a folder of questions, or a glob for files from the Hub."""
        file = self.data[name]
        path = self.local_path(file)
        return str(path / file.url.rpartition("/")[2]) if file.url.startswith("hf://") else str(path)

    def estimate_rows(self) -> Iterator[list[WorkEstimate]]:
        """Yield the estimated work of each row as a list with one estimate for each data set.

        A system that an earlier row measures on the same data set is not counted again.
        """
        measured_systems = set[object]()
        for row in self.rows:
            row_estimates = list[WorkEstimate]()
            for data_name in row.list_data():
                system = (row.library, row.retriever, row.depth, row.model, row.k, row.readers, row.beams, data_name)
                if system not in measured_systems:
                    row_estimates.append(estimate_row(self, row, data_name))
                measured_systems.add(system)
            yield row_estimates

    def describe(self) -> dict[str, Any]:
        """Return download bytes, disk space, hours on this machine, and licences as JSON values."""
        cores, gpus = count_cores(), torch.cuda.device_count()
        # A sample downloads only the first files of a data set on the Hub.
        download_bytes_by_file = {
            name: ceil(file.bytes * (self.fraction or 1)) if file.url.startswith("hf://") else file.bytes
            for name, file in self.list_missing_data().items()
        }
        estimates_by_library = {name: estimate_library(self, name) for name in self.libraries}
        hours_by_library = {
            name: estimate.estimate_resources(cores, gpus).hours for name, estimate in estimates_by_library.items()
        }
        hours_by_row = {
            row.name: sum(estimate.estimate_resources(cores, min(gpus, 1)).hours for estimate in row_estimates)
            for row, row_estimates in zip(self.rows, self.estimate_rows(), strict=True)
        }
        names_by_licence: dict[str, list[str]] = {}
        names_and_licences = [(name, file.licence) for name, file in self.data.items()]
        names_and_licences += [(f"library {name}", library.licence) for name, library in self.libraries.items()]
        names_and_licences += [(row.model, row.licence) for row in self.rows]
        for name, licence in dict.fromkeys(names_and_licences):
            names_by_licence.setdefault(licence, []).append(name)
        return {
            "rows": sum(len(row.list_data()) for row in self.rows),
            "download": download_bytes_by_file,
            "download_bytes": sum(download_bytes_by_file.values()),
            "disk_bytes": sum(estimate.disk for estimate in estimates_by_library.values()),
            "passages": {name: _count_passages(self, name) for name in estimates_by_library},
            "hours": round(sum([*hours_by_library.values(), *hours_by_row.values()]), 2),
            "library_hours": {name: round(hours, 2) for name, hours in hours_by_library.items()},
            "row_hours": {name: round(hours, 2) for name, hours in hours_by_row.items()},
            "cores": cores,
            "gpus": gpus,
            "licences": {licence: names for licence, names in names_by_licence.items() if licence},
            "notes": [*self.reproduction.notes, *([SAMPLE_NOTE] if self.fraction else [])],
        }


def plan_reproduction(name: str, folder: str, rows: Sequence[str], fraction: float | None) -> ReproductionPlan:
    """Read a reproduction and select its rows; opens no connection.

    Raises:
        UsageError: the file, a row or the fraction is invalid.
    """
    if fraction is not None and not 0 < fraction < 1:
        raise UsageError(f"the fraction is {fraction}: give one above 0 and below 1, such as 0.01")
    if Path(folder).exists() and not Path(folder).is_dir():
        raise UsageError(f"--data {folder} is not a folder: give one for local copies of data")
    reproduction = read_reproduction(name)
    selected_rows = reproduction.select_rows(rows)
    data_names = [data_name for row in selected_rows for data_name in row.list_data()]
    for row in selected_rows:
        library = reproduction.library[row.library]
        try:
            plan_retriever(draft_snapshot(library.recipe), row.retriever)
        except UsageError as error:
            raise UsageError(f"row {row.name!r} of {name}: {error}") from error
        data_names += [library.dump, *([library.vectors] if library.vectors else [])]
    data_sets = {data_name: reproduction.data[data_name] for data_name in dict.fromkeys(data_names)}
    return ReproductionPlan(reproduction, selected_rows, data_sets, Path(folder), fraction)


def estimate_library(plan: ReproductionPlan, library_name: str) -> WorkEstimate:
    """Estimate the work of building a library; the disk space includes the text and the vectors.

    Raises:
        InputError: the local folder of the encoder has no readable configuration.
    """
    library = plan.reproduction.library[library_name]
    n_passages = _count_passages(plan, library_name)
    architecture, d = _read_encoder_sizes(plan, library)
    indexes = plan.reproduction.select_indexes(library_name, plan.rows)
    estimate = (
        estimate_build_for_architecture(n_passages, architecture, d, indexes, None)
        if d
        else WorkEstimate({}, {"chunk": 0})
    )
    operations, row_bytes = estimate.operations, estimate_row_bytes("text", 0) + estimate_row_bytes("vectors", d)
    representation_names = library.recipe.list_representations()
    for representation, extra_representation in library.recipe.represent.items():
        row_bytes += estimate_row_bytes(representation_names[representation], DIM)
        extra_folder = Path(_find_model(plan.folder, extra_representation.encoder))
        if extra_folder.is_dir():
            operations += n_passages * PASSAGE_TOKENS * read_architecture(extra_folder).operations_per_token
        # If the library's encoder is static, which takes no time, `parameters` is the number of
        # weights of the extra representation's encoder.
        elif not architecture.operations_per_token:
            operations += n_passages * PASSAGE_TOKENS * 2.0 * library.parameters
    return replace(
        estimate, operations=0.0 if library.vectors else operations, disk=estimate.disk + n_passages * row_bytes
    )


def _read_encoder_sizes(plan: ReproductionPlan, library: Library) -> tuple[Architecture, int]:
    """Return the architecture of the library's encoder and the dimensions of its vectors, read from
    its local folder if there is one, else from the reproduction file.
    """
    folder = Path(_find_model(plan.folder, library.encoder))
    if not folder.is_dir():
        return Architecture(library.parameters, 1, library.dimensions, 1, 0), library.dimensions
    architecture = read_architecture(folder)
    return architecture, read_dim(folder) if architecture.layers else architecture.hidden


def _count_passages(plan: ReproductionPlan, library_name: str) -> int:
    library = plan.reproduction.library[library_name]
    file = plan.data[library.dump]
    n, path = library.passages or file.records, plan.local_path(file)
    if path.is_file() and (not n or plan.fraction is not None):
        # A local copy may be a small part of the published data; a sample is a share of the copy.
        n_passages = estimate_passages(str(path), 100)
        n = min(n or n_passages, n_passages)
    return n if plan.fraction is None else min(n, _compute_sample_size(n, plan.fraction, _MIN_RECORDS))


def _compute_sample_size(n_records: int, fraction: float, minimum: int) -> int:
    return max(minimum, ceil(fraction * n_records))


def estimate_row(plan: ReproductionPlan, row: TableRow, data_name: str) -> WorkEstimate:
    """Estimate the work of a row on one data set: encode, search, and read the passages of each
    question.
    """
    library = plan.reproduction.library[row.library]
    architecture, d = _read_encoder_sizes(plan, library)
    n_questions = plan.data[data_name].records
    if plan.fraction is not None:
        n_questions = min(n_questions, _compute_sample_size(n_questions, plan.fraction, _MIN_QUESTIONS))
    operations = 2.0 * row.parameters * PROMPT_TOKENS * (row.k or 5)
    indexes = plan.reproduction.select_indexes(row.library, [row])
    row_kind_by_index = {name: get_kind_for_factory(index.factory).represents for name, index in indexes.items()}
    # Exact search, and all indexes except inverted indexes of text, need an encoded question.
    if EXACT in row.retriever or set(row_kind_by_index.values()) != {"text"}:
        operations += (architecture.operations_per_token or 2.0 * library.parameters) * QUESTION_TOKENS
    token_indexes = [name for name, kind in row_kind_by_index.items() if kind == "tokens"]
    n_passages = _count_passages(plan, row.library)
    seconds = estimate_query_seconds(parse(row.retriever), n_passages, d, token_indexes)
    return WorkEstimate({}, {"evaluate": 0}, n_questions * operations, n_questions * seconds)


@deployment_flow("reproduce", takes_turns=True)
def reproduce(
    reproduction: str,
    store: Url,
    folder: Annotated[str, create_file_option(str, name="--data")] = DEFAULT_FOLDER,
    rows: Sequence[str] = (),
    fraction: float | None = None,
    beam_options: Sequence[str] = (),
) -> ReproduceOutcome:
    """Fetch the data, build the libraries, evaluate the rows, and write the table.

    A row whose index cannot be built, or whose evaluation fails, is in the table with the reason.

    Args:
        reproduction: `dpr`, `rag`, or a TOML file of data sets, libraries and rows.
        store: URL or folder of the store; created if it does not exist.
        folder: Folder of local copies of data sets and models; missing data is downloaded to it.
        rows: Only rows with this name; `*` stands for any text. Repeat the option for further rows.
            By default all rows.
        fraction: Only try all steps, on this share of passages and questions, such as .01, without
            comparing the values. By default all passages and questions are used.
        beam_options: Options of Beam and its runner, on the command line after `--`.

    Raises:
        ReproductionRefusedError: the table is written, and a value differs from the published one.
        ReproductionIncompleteError: the table is written without the values of rows that failed.
        BookwheelError: data is missing, the store cannot be written, or no library could be built;
            finished work is recorded.
    """
    clock, plan = StageClock("reproduce"), plan_reproduction(reproduction, folder, rows, fraction)
    opened_store = Store.open(store, create=True)
    # keeps `gc` from deleting the files of this run
    with opened_store.intents.hold(f"reproduce-{secrets.token_hex(8)}"), temporary_folder("reproduce") as work_folder:
        with clock("fetch") as on_progress:
            paths = fetch_data(plan, on_progress)
            check_models(opened_store, plan)
        run = ReproductionRun(opened_store, plan, sample_data(plan, paths, work_folder), beam_options)
        tasks = [(row, data, run.open_evaluator(row, data)) for row in plan.rows for data in row.list_data()]
        for name in plan.libraries:
            with clock(f"build {name}"):
                build_library(run, name)
        if not run.snapshots:
            raise next(iter(run.library_failures.values()))
        with clock("evaluate") as on_progress:
            for i, (row, data, evaluator) in enumerate(tasks, start=1):
                evaluate_row(run, row, data, evaluator)
                on_progress(i, len(tasks))
        with clock("table"):
            lines = run.list_lines()
            outcome = ReproduceOutcome(
                reproduction=plan.reproduction.name,
                snapshots=run.snapshots,
                lines=[{**asdict(line), "difference": line.difference, "verdict": line.verdict} for line in lines],
                summary=summarize_verdicts(lines),
                notes=tuple(run.list_notes()),
                new=sum(evaluation.is_new for evaluation in run.evaluations.values()),
                seconds=clock.seconds,
            )
            outcome = record_table(run, lines, outcome)
    artifacts.show_reproduction(outcome)
    if run.failures:
        (row_name, data), error = next(iter(run.failures.items()))
        raise ReproductionIncompleteError(
            f"{format_count(len(run.failures), 'row')} of {len(tasks):,} failed, such as {row_name} on {data}: {error}",
            outcome,
        )
    deviating_lines = [line for line in lines if line.verdict in {"higher", "lower"}]
    if deviating_lines:
        example_line = deviating_lines[0]
        raise ReproductionRefusedError(
            f"{format_count(len(deviating_lines), 'value')} of {len(lines):,} differ from the "
            "published ones by more than the tolerance and the interval, such as "
            f"{example_line.measure} of {example_line.row} on {example_line.data}: "
            f"{example_line.value:.2f}, published {example_line.published:.2f}; see "
            f"{outcome.report}",
            outcome,
        )
    return outcome


@dataclass(frozen=True, slots=True)
class ReproductionRun:
    """The data and the results of a run."""

    store: Store
    plan: ReproductionPlan
    paths: Mapping[str, str]  # by data set, its path or a glob
    beam_options: Sequence[str]
    snapshots: dict[str, str] = field(default_factory=dict)  # by library, the id of its snapshot
    # keys: (name of the row, name of the data set)
    evaluations: dict[tuple[str, str], ReleaseEvaluation] = field(default_factory=dict)
    # keys: (name of the row, name of the data set)
    failures: dict[tuple[str, str], BookwheelError] = field(default_factory=dict)
    library_failures: dict[str, BookwheelError] = field(default_factory=dict)
    # keys: (name of the library, name of the index)
    index_failures: dict[tuple[str, str], BookwheelError] = field(default_factory=dict)

    def open_evaluator(self, row: TableRow, data_name: str) -> ReleaseEvaluator:
        """Read the questions of a data set; check that the measures of the table row apply."""
        file = self.plan.data[data_name]
        encoder = _find_model(self.plan.folder, row.passage_encoder) if row.passage_encoder else None
        measures = dict.fromkeys(row.list_measures(data_name), 0.0)
        try:
            settings = EvaluationSettings(
                kind=file.answers,
                k=row.k,
                depth=row.depth,
                judged_by=file.judged_by,
                retriever=row.retriever,
                readers=row.readers,
                decoding=DecodingSettings(beams=row.beams),
                labels=row.labels,
            )
            evaluator = ReleaseEvaluator(self.store, self.paths[data_name], settings, encoder, _TIMING_SECONDS)
            evaluator.check(ReleaseCriteria(measures, None), has_model=row.command == "answer")
        except (InputError, UsageError) as error:
            raise type(error)(f"row {row.name!r} on {data_name}: {error}") from error
        return evaluator

    def raise_build_failure(self, row: TableRow) -> None:
        """Raise the error of the row's library, or of an index of its retriever, if one failed."""
        if row.library in self.library_failures:
            raise self.library_failures[row.library]
        for index_name in self.plan.reproduction.select_indexes(row.library, [row]):
            if (row.library, index_name) in self.index_failures:
                raise self.index_failures[row.library, index_name]

    def get_ref(self, library: str) -> str:
        """Return the ref of a library; a sample has a separate ref."""
        suffix = f"-sample-{self.plan.fraction:g}" if self.plan.fraction else ""
        return f"{self.plan.reproduction.name}-{library}{suffix}"

    def list_lines(self) -> list[ReproductionRow]:
        """Return the lines of the table, in the order of the rows."""
        return [
            self._build_line(row, data, measure)
            for row in self.plan.rows
            for data in row.list_data()
            for measure in row.list_measures(data)
        ]

    def _build_line(self, row: TableRow, data_name: str, measure: str) -> ReproductionRow:
        evaluation = self.evaluations.get((row.name, data_name))
        metric = None if evaluation is None else evaluation.metrics[measure]
        return ReproductionRow(
            row.name,
            data_name,
            measure,
            row.published.get(data_name, {}).get(measure),
            row.tolerance,
            None if metric is None else 100 * metric.value,
            None if metric is None or metric.low is None else 100 * metric.low,
            None if metric is None or metric.high is None else 100 * metric.high,
            row.source,
            self._format_command(row, data_name),
            "" if evaluation is None else evaluation.manifest.id,
            0 if evaluation is None else int(evaluation.manifest.provenance.get("n") or 0),
            self.plan.fraction is not None,
            str(self.failures.get((row.name, data_name), "")),
        )

    def _format_command(self, row: TableRow, data_name: str) -> str:
        """Return the `evaluate` command that measures a row alone.

        It names the files of all questions, even if only a sample was measured.
        """
        command_words = ["bookwheel", "evaluate", "--store", self.store.url, "--ref", self.get_ref(row.library)]
        command_words += ["--questions", self.plan.get_path_or_glob(data_name), "--retriever", row.retriever]
        if row.model:
            command_words += ["--model", _find_model(self.plan.folder, row.model), "--beams", str(row.beams)]
            command_words += ["-k", str(row.k)] if row.k else []
            command_words += [word for reader in row.readers for word in ("--reader", reader)]
        else:
            command_words += ["-k", str(row.depth)]
        file = self.plan.data[data_name]
        command_words += ["--answers", file.answers] if file.answers != "spans" else []
        return join([*command_words, *(["--judge", file.judged_by] if file.judged_by else [])])

    def list_notes(self) -> list[str]:
        """Return sentences about the sample, the rows that failed, the libraries and the data."""
        notes = [SAMPLE_NOTE] if self.plan.fraction else []
        notes += [f"{row} on {data} failed: {error}." for (row, data), error in self.failures.items()]
        for name, snapshot in self.snapshots.items():
            with Snapshot.from_store(self.store, snapshot) as opened_snapshot:
                notes.append(
                    f"Library {name} has {format_count(opened_snapshot.n, 'passage')}, snapshot {snapshot[:12]}."
                )
        return [*notes, *self.plan.reproduction.notes]


@stage
def fetch_data(plan: ReproductionPlan, on_progress: OnProgress) -> dict[str, str]:
    """Return the path of each data set; download missing ones, and verify checksums.

    Raises:
        InputError: a data set cannot be downloaded, or does not match its checksum.
    """
    for name, file in plan.list_missing_data().items():
        path = plan.local_path(file)
        try:
            if file.url.startswith("hf://"):
                _fetch_from_hub(file.url, path, plan.fraction)
            else:
                fetch_file(file.url, path, _split_checksum(file), on_progress)
        except InputError as error:
            other_sources = [f"{other} ({plan.data[other].url})" for other in plan.list_missing_data() if other != name]
            also_missing = f"; also missing: {', '.join(other_sources)}" if other_sources else ""
            raise InputError(
                f"data set {name} could not be downloaded ({error}): get {file.url} elsewhere, "
                f"put it into {plan.folder} as {file.local_name}, and run this again{also_missing}"
            ) from error
    for file in plan.data.values():
        has_no_sample = plan.complete_path(file).is_dir() and not plan.local_path(file).exists()
        if plan.fraction is not None and has_no_sample:
            _link_first_files(plan.complete_path(file), plan.local_path(file), plan.fraction)
    for name, file in plan.data.items():
        _verify_data(name, file, plan.local_path(file))
    return {name: plan.get_path_or_glob(name) for name in plan.data}


def _link_first_files(folder: Path, sample: Path, fraction: float) -> None:
    """Create the folder `sample` with links to the first files of `folder`; it becomes visible only
    when it is complete.
    """
    files = sorted(path for path in folder.iterdir() if path.is_file())
    with open_destination(sample) as sample_folder:
        for path in files[: ceil(fraction * len(files))]:
            (sample_folder / path.name).symlink_to(path.absolute())


def _split_checksum(file: DataFile) -> tuple[str, str] | None:
    algorithm, _, digits = file.checksum.partition(":")
    return (algorithm, digits) if digits else None


def _verify_data(name: str, file: DataFile, path: Path) -> None:
    checksum = _split_checksum(file)
    if not path.exists() and not any(map(Path, expand_pattern(str(path)))):
        raise InputError(f"data set {name} is missing: put {file.local_name or file.path} into {path.parent}")
    if checksum is not None and (digits := hash_file(path, checksum[0])) != checksum[1]:
        advice = "give the right file" if file.path else "delete it to download it again"
        raise InputError(
            f"{path} is not the published {name}: its {checksum[0]} is {digits}, not "
            f"{checksum[1]}; {advice}, or correct `checksum`"
        )


def _fetch_from_hub(url: str, folder: Path, fraction: float | None) -> None:
    """Download the files of a data set from the Hub; for a sample, only the first files.

    The folder gets its final name when all files are complete.

    Raises:
        InputError: the Hub cannot be reached, or has no such file.
    """
    require("huggingface_hub", "hub")
    from rag_model.store.objects.hub import HubApi  # noqa: PLC0415 - imports the client of the Hub

    owner, repository, *path_parts = url.removeprefix("hf://datasets/").split("/")
    repository, _, revision = repository.partition("@")
    partial_folder = folder.with_name(f"{folder.name}.part")
    try:
        settings = {"repo_type": "dataset", "revision": revision or None}
        api: Any = HubApi()
        names = api.list_repo_files(f"{owner}/{repository}", **settings)
        matching_names = sorted(name for name in names if fnmatchcase(name, "/".join(path_parts)))
        for name in matching_names if fraction is None else matching_names[: ceil(fraction * len(matching_names))]:
            if not (partial_folder / Path(name).name).exists():
                path = Path(api.hf_hub_download(f"{owner}/{repository}", name, **settings, local_dir=partial_folder))
                path.replace(partial_folder / path.name)
    except Exception as error:  # any exception of the Hub's HTTP library may be raised
        hub_problem = {
            "RevisionNotFoundError": f"{owner}/{repository} has no revision {revision}",
            "RepositoryNotFoundError": f"the hub has no data set {owner}/{repository}, or you may not read it",
        }.get(type(error).__name__, f"the hub cannot be read ({type(error).__name__})")
        raise InputError(hub_problem) from error
    if not matching_names:
        raise InputError(f"{url} names no file")
    partial_folder.rename(folder)


def _find_model(folder: Path, name: str) -> str:
    """Return the path of a model in the data folder, or its name if it is not there."""
    local_folder = folder / name.partition("@")[0]
    return str(local_folder.absolute()) if name and not Path(name).is_absolute() and local_folder.is_dir() else name


def use_local_models(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe; models that have a copy in the data folder are replaced by its path."""
    question_encoder = _find_model(folder, recipe.encode.question_encoder)
    representations = {
        name: replace(extra, encoder=_find_model(folder, extra.encoder)) for name, extra in recipe.represent.items()
    }
    return replace(recipe, encode=replace(recipe.encode, question_encoder=question_encoder), represent=representations)


@stage
def check_models(store: Store, plan: ReproductionPlan) -> None:
    """Find all models before the first build; download the models that are on the Hub.

    Raises:
        InputError: a model is missing; the message says where to put it.
    """
    names = [name for library in plan.libraries.values() for name in _list_encoders(store, plan, library)]
    names += [row.model for row in plan.rows if row.model] + [row.passage_encoder for row in plan.rows]
    for name in dict.fromkeys(filter(None, names)):
        if not name.startswith(MODEL_PREFIX) and "/" in name:
            try:
                resolve_folder(_find_model(plan.folder, name))
            except InputError as error:
                raise InputError(f"{error}; its folder may also be put into {plan.folder / name}") from error


def _list_encoders(store: Store, plan: ReproductionPlan, library: Library) -> list[str]:
    encoder = _find_model(plan.folder, library.encoder)
    if encoder.startswith(MODEL_PREFIX):
        return []
    encoder_names = resolve_encoders(store, encoder)
    encoders = [encoder, library.recipe.encode.question_encoder or encoder_names.question]
    return encoders + [extra.encoder for extra in library.recipe.represent.values()]


def sample_data(plan: ReproductionPlan, paths: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the paths of the data sets; for a sample, write some lines of each question file."""
    sampled_paths = dict(paths)
    if plan.fraction is None:
        return sampled_paths
    for name in {data for row in plan.rows for data in row.list_data()}:
        path = Path(paths[name])
        if path.is_file():
            lines = [line for line in read_lines(str(path)) if line.strip()]
            n_lines = min(len(lines), _compute_sample_size(len(lines), plan.fraction, _MIN_QUESTIONS))
            sample_lines = [lines[i * len(lines) // n_lines] for i in range(n_lines)]
            # a folder for each data set, because their files may have the same name
            sample_path = folder / name / _strip_compression_suffix(path.name)
            sample_path.parent.mkdir()
            sample_path.write_bytes(b"\n".join(sample_lines) + b"\n")
            sampled_paths[name] = str(sample_path)
    return sampled_paths


def _strip_compression_suffix(name: str) -> str:
    return name.removesuffix(".gz").removesuffix(".xz").removesuffix(".bz2").removesuffix(".zst")


def build_library(run: ReproductionRun, name: str) -> None:
    """Find the snapshot of a library with the indexes of its rows; build it if there is none.

    First build a snapshot of passages and vectors without indexes, so that further rows of the same
    library need no encoding. An index that cannot be built is left out, and the table's rows that
    need it fail.

    Raises:
        StoreError: the store is full or cannot be written.
    """
    plan, ref = run.plan, run.get_ref(name)
    indexes = plan.reproduction.select_indexes(name, plan.rows)
    library_recipe = use_local_models(plan.reproduction.library[name].recipe, plan.folder)
    base_recipe = replace(library_recipe, index={}, retriever="")
    with _record_failure(run.library_failures, name):
        build, inputs = _choose_build(run, name, base_recipe, ref)
        base_snapshot, _ = find_or_build_snapshot(run.store, inputs, None, build)
    if name in run.library_failures:
        return

    def build_with_indexes(index_names: Collection[str]) -> str:
        if not index_names:
            return base_snapshot
        new_recipe = replace(library_recipe, index={index: indexes[index] for index in indexes if index in index_names})
        build_indexes = partial(add_index.fn, base_snapshot, run.store.url, new_recipe, (), ref, run.beam_options)
        new_inputs = None if inputs is None else {**inputs, "of": base_snapshot, "recipe": new_recipe.content()}
        return find_or_build_snapshot(run.store, new_inputs, None, lambda: build_indexes().snapshot)[0]

    failures: dict[str, BookwheelError] = {}
    with _record_failure(failures, name):
        run.snapshots[name] = build_with_indexes(indexes)
    if name in run.snapshots:
        return
    if len(indexes) == 1:
        run.index_failures.update({(name, index_name): failures[name] for index_name in indexes})
    else:
        # Build one index at a time to learn which indexes fail. Files of finished indexes are
        # reused.
        for index_name in indexes:
            with _record_failure(run.index_failures, (name, index_name)):
                build_with_indexes([index_name])
    with _record_failure(run.library_failures, name):
        good_indexes = [index for index in indexes if (name, index) not in run.index_failures]
        run.snapshots[name] = build_with_indexes(good_indexes)


@contextmanager
def _record_failure(failures: dict[FailureKey, BookwheelError], key: FailureKey) -> Iterator[None]:
    """Record an error that the block raises; let a `StoreError` pass, which ends the command."""
    try:
        yield
    except StoreError:
        raise
    except BookwheelError as error:
        failures[key] = error


def _choose_build(
    run: ReproductionRun, name: str, recipe: Recipe, ref: str
) -> tuple[Callable[[], str | None], Inputs | None]:
    """Return a function that builds a library without indexes, and the inputs of that build."""
    plan, library = run.plan, run.plan.reproduction.library[name]
    encoder, dump = _find_model(plan.folder, library.encoder), run.paths[library.dump]
    if library.vectors:
        vectors = expand_pattern(run.paths[library.vectors])
        inputs = collect_inputs(run.store, dump, encoder, recipe, None)
        local_vectors = [url.removeprefix("file://") for url in vectors]
        arguments = dump, local_vectors, run.store.url, encoder, recipe, ref
        run_import = partial(import_library.fn, *arguments, beam_options=run.beam_options)
        version_tags = {url: get_version_tag(url) for url in vectors}
        return lambda: run_import().snapshot, None if inputs is None else {**inputs, "vectors": version_tags}
    passage_limit = None if plan.fraction is None else _count_passages(plan, name)
    build = partial(reindex.fn, dump, run.store.url, encoder, recipe, ref, passage_limit, beam_options=run.beam_options)
    return lambda: build().snapshot, collect_inputs(run.store, dump, encoder, recipe, passage_limit)


def evaluate_row(run: ReproductionRun, row: TableRow, data_name: str, evaluator: ReleaseEvaluator) -> None:
    """Find the recorded evaluation of a row on one data set; evaluate the row if there is none.

    Raises:
        StoreError: the store is full or cannot be written.
    """
    with _record_failure(run.failures, (row.name, data_name)):
        run.raise_build_failure(row)
        model = None
        if row.model:
            name = _find_model(run.plan.folder, row.model)
            is_hub_name = "/" in name and not Path(name).is_dir()
            model = str(resolve_folder(name)) if is_hub_name else resolve_model_id(run.store, name)
        run.evaluations[row.name, data_name] = evaluator(run.snapshots[row.library], model)


@stage
def record_table(run: ReproductionRun, lines: Sequence[ReproductionRow], outcome: ReproduceOutcome) -> ReproduceOutcome:
    """Record the table as an evaluation if it is not recorded yet; see `store_evaluation`."""
    evaluations = {f"{line.row}, {line.data}": line.evaluation for line in lines if not line.failure}
    settings = {
        "reproduction": run.plan.reproduction.name,
        "rows": evaluations,
        "published": [[line.row, line.data, line.measure, line.published, line.tolerance] for line in lines],
        "fraction": run.plan.fraction,
        "version": VERSION,
    }
    if run.failures:
        settings["failures"] = {f"{row}, {data}": str(error) for (row, data), error in run.failures.items()}
    questions_digest = digest_json([run.plan.reproduction.title, *evaluations])
    subject = EvaluationSubject(next(iter(run.snapshots.values())), "", questions_digest, settings)
    metrics = {
        f"{row.name}, {data}": {
            measure: run.evaluations[row.name, data].metrics[measure] for measure in row.list_measures(data)
        }
        for row in run.plan.rows
        for data in row.list_data()
        if (row.name, data) in run.evaluations
    }
    report = ReproductionReport(
        run.plan.reproduction.title,
        datetime.now(UTC).isoformat(timespec="seconds"),
        lines,
        outcome.notes,
        {**{f"library {name}": snapshot for name, snapshot in run.snapshots.items()}, **evaluations},
    )
    table_document = {"lines": [asdict(line) | {"verdict": line.verdict} for line in lines]}
    new_evaluation = NewEvaluation(metrics, MeasureValues((), {}), table_document, partial(_write_table, report))
    return store_evaluation(run.store, subject, new_evaluation, run.plan.reproduction.name, outcome)


def _write_table(report: ReproductionReport, folder: Path) -> None:
    write_report(render_reproduction_page(report), folder / REPORT)
    (folder / MARKDOWN).write_text(render_reproduction_markdown(report), encoding="utf-8")


def format_plan(document: Mapping[str, Any]) -> list[str]:
    """Format the plan of a reproduction: download bytes, disk space, hours, licences, notes."""
    unsized_names = [name for name, n_bytes in document["download"].items() if not n_bytes]
    core_count_text = format_count(document["cores"], "core")
    core_count_text += f" and {format_count(document['gpus'], 'GPU')}" if document["gpus"] else ""
    return [
        f"rows      {len(document['row_hours']):,}, with {format_count(document['rows'], 'evaluation')}",
        *(
            f"library   {name}: {count:,} passages, {document['library_hours'][name]:,.1f} hours"
            for name, count in document["passages"].items()
        ),
        *(f"row       {name}: {hours:,.1f} hours" for name, hours in document["row_hours"].items()),
        f"download  {format_bytes(document['download_bytes'])} in "
        f"{format_count(len(document['download']), 'data set')}"
        + (f", of which {', '.join(unsized_names)} of unknown size" if unsized_names else ""),
        f"disk      {format_bytes(document['disk_bytes'])} for text, vectors and indexes, about",
        f"time      {document['hours']:,.1f} hours on {core_count_text}, about",
        *(f"licence   {licence}: {', '.join(names)}" for licence, names in document["licences"].items()),
        *(f"note      {sentence}" for sentence in document["notes"]),
    ]
