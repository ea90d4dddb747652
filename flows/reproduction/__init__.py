"""Reproductions of published tables: TOML files of data sets, libraries and rows.

`dpr.toml` and `rag.toml` are built in. `read_reproduction` reads these and users' files, and checks
every field before any work begins.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Literal

from rag_model.errors import UsageError
from rag_model.evaluation.measures.measure import AnswerKind, JudgedBy
from rag_model.index.recipe import IndexRecipe
from rag_model.reading.reader import ReaderName
from rag_model.secrets import refuse_secret
from rag_model.snapshots.recipe import Recipe
from rag_model.toml import from_table, read_toml

# names of data sets and libraries; they must be valid in the name of a ref
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_CHECKSUM = re.compile(r"md5:[0-9a-f]{32}|sha1:[0-9a-f]{40}|sha256:[0-9a-f]{64}")
_CUTOFF = re.compile(r"@(\d{1,9})$")
_DEFAULT_DEPTH = 20  # passages per question, if no measure needs more


@dataclass(frozen=True, slots=True)
class DataFile:
    """A data set: a local path, or a URL from which it is downloaded."""

    url: str = ""  # http(s)://, or hf://datasets/OWNER/NAME@REVISION/PATTERN for files of the Hub
    path: str = ""  # local file, folder or glob; relative to the reproduction's file
    file: str = ""  # name of the local copy; by default derived from the URL
    bytes: int = 0  # size of the download; 0: unknown
    checksum: str = ""  # md5:…, sha1:… or sha256:…; empty: only the digest is reported
    licence: str = ""
    records: int = 0  # number of passages, documents or questions; 0: unknown
    answers: AnswerKind = "spans"  # kind of the gold answers of questions
    judged_by: JudgedBy | None = None  # None: chosen from the fields of the questions

    def __post_init__(self) -> None:
        if bool(self.url) == bool(self.path):
            raise UsageError("a data set has either `url` or `path`: give one of them")
        refuse_secret(self.url)
        if not self.path and not _FILE_NAME.fullmatch(self.local_name):
            raise UsageError(f"{self.local_name!r} cannot name a local copy: set `file` to a name such as test.csv")
        if self.checksum and not _CHECKSUM.fullmatch(self.checksum):
            raise UsageError(
                f"the checksum {self.checksum!r} is invalid: write md5:, sha1: or sha256:, then hex digits"
            )
        if min(self.bytes, self.records) < 0:
            raise UsageError("`bytes` and `records` cannot be negative: leave out what is unknown")

    @property
    def local_name(self) -> str:
        """The name of the copy in the data folder; the copy of files from the Hub is a folder."""
        if self.file or not self.url.startswith("hf://"):
            return self.file or self.url.rpartition("/")[2]
        return re.sub(r"[^A-Za-z0-9._-]+", "-", self.url.rpartition("/")[0].removeprefix("hf://datasets/"))


@dataclass(frozen=True, slots=True)
class Library:
    """A snapshot to build: passages, their encoder, and indexes."""

    dump: str  # data set with the passages
    encoder: str  # folder or hub name of the passage encoder
    # data set with vectors of the passages, to import; empty: encode the passages
    vectors: str = ""
    recipe: Recipe = field(default_factory=lambda: Recipe(index={}))
    # estimated number of passages; 0: derived from the records or the bytes of the dump
    passages: int = 0
    dimensions: int = 0  # dimensions of the vectors; 0: read from the encoder's folder
    parameters: int = 0  # number of weights of the encoder; 0: read from its folder
    licence: str = ""  # licence of the encoder and of the vectors


@dataclass(frozen=True, slots=True)
class TableRow:
    """One system that is measured; the table has a line for each of its data sets and measures."""

    name: str
    library: str  # name of the library whose passages are retrieved
    source: str = ""  # where the values are published
    command: Literal["retrieve", "answer"] = "retrieve"
    retriever: str = "exact"
    # Published values in percent, by data set and measure.
    published: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    tolerance: float = 0.0  # accepted difference from the published values, in percentage points
    measures: tuple[str, ...] = ()  # further measures, which have no published value
    data: tuple[str, ...] = ()  # further data sets to measure, besides those of `published`
    model: str = ""  # answering model: a folder, a hub name or a model of the store
    # Passage encoder that belongs to the model's question encoder, if the model does not record it.
    passage_encoder: str = ""
    k: int | None = None  # passages per answer
    readers: tuple[ReaderName, ...] = ()
    # labels and their texts, as in `evaluate --label`
    labels: Mapping[str, str] = field(default_factory=dict)
    beams: int = 1
    parameters: int = 0  # number of weights of the generator, to estimate the time
    licence: str = ""  # licence of the model

    def __post_init__(self) -> None:
        if (self.command == "answer") != bool(self.model):
            raise UsageError(
                f'row {self.name!r}: `model` and command = "answer" need each other: give both, or neither'
            )
        if not self.list_data() or not all(self.list_measures(name) for name in self.list_data()):
            raise UsageError(f"row {self.name!r} measures nothing: give `published`, or `data` and `measures`")
        if self.published and not self.source:
            raise UsageError(f"row {self.name!r} has published values and no `source`: say where they are published")
        values = [value for measures in self.published.values() for value in measures.values()]
        if any(not 0 <= value <= 100 for value in values) or not 0 <= self.tolerance <= 100:
            raise UsageError(f"row {self.name!r}: values and tolerance must be 0 to 100 percent")

    def list_data(self) -> list[str]:
        """Return the names of the data sets."""
        return list(dict.fromkeys([*self.published, *self.data]))

    def list_measures(self, data: str) -> list[str]:
        """Return the measures of a data set; measures with a published value come first."""
        return list(dict.fromkeys([*self.published.get(data, {}), *self.measures]))

    @property
    def depth(self) -> int:
        """The largest cutoff of the measures: the number of passages at which retrieval is
        measured.
        """
        cutoffs = [
            int(cutoff_match[1])
            for data_name in self.list_data()
            for measure in self.list_measures(data_name)
            if (cutoff_match := _CUTOFF.search(measure))
        ]
        return max(cutoffs, default=_DEFAULT_DEPTH)


@dataclass(frozen=True, slots=True)
class Reproduction:
    """A published table to reproduce: data sets, libraries and rows."""

    title: str
    data: Mapping[str, DataFile]
    library: Mapping[str, Library]
    row: tuple[TableRow, ...]
    name: str = "own"  # prefix of the names of refs
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in (self.name, *self.data, *self.library):
            if not _NAME.fullmatch(name):
                raise UsageError(f"{name!r} cannot name a reproduction, data set or library: use a-z, 0-9 and -")
        for name, library in self.library.items():
            for data_name in filter(None, (library.dump, library.vectors)):
                _check_defined(data_name, self.data, f"library {name}", "data set")
        for row in self.row:
            _check_defined(row.library, self.library, f"row {row.name!r}", "library")
            for data_name in row.list_data():
                _check_defined(data_name, self.data, f"row {row.name!r}", "data set")
        row_names = [row.name for row in self.row]
        if duplicate_name := next((name for name in row_names if row_names.count(name) > 1), None):
            raise UsageError(f"two rows have the name {duplicate_name!r}: give each its own")
        if not self.row:
            raise UsageError("a reproduction needs at least one [[row]]")

    def select_rows(self, patterns: Sequence[str]) -> tuple[TableRow, ...]:
        """Return the rows whose names match one of the glob patterns, or all rows if none is given.

        Raises:
            UsageError: no row matches a pattern.
        """
        for pattern in patterns:
            if not any(fnmatchcase(row.name, pattern) for row in self.row):
                names = ", ".join(row.name for row in self.row)
                raise UsageError(f"no row matches {pattern!r}: choose from {names}")
        return tuple(
            row for row in self.row if not patterns or any(fnmatchcase(row.name, pattern) for pattern in patterns)
        )

    def select_indexes(self, library: str, rows: Sequence[TableRow]) -> dict[str, IndexRecipe]:
        """Return the indexes of a library that the retrievers of these rows name."""
        retriever_words = {
            word for row in rows if row.library == library for word in re.findall(r"[A-Za-z0-9_-]+", row.retriever)
        }
        return {name: index for name, index in self.library[library].recipe.index.items() if name in retriever_words}


def _check_defined(name: str, choices: Mapping[str, object], owner: str, noun: str) -> None:
    if name not in choices:
        raise UsageError(f"{owner} names the {noun} {name!r}, which is not defined: choose from {', '.join(choices)}")


def list_built_in() -> list[str]:
    """Return the names of the built-in reproductions."""
    return sorted(path.name.removesuffix(".toml") for path in _iter_built_in())


def _iter_built_in() -> Iterator[Path]:
    yield from Path(str(files("flows.reproduction"))).glob("*.toml")


def find_reproduction(name: str) -> Path:
    """Return the file of a reproduction: a built-in name, or the path of a TOML file.

    Raises:
        UsageError: there is no such reproduction.
    """
    if name in list_built_in():
        return Path(str(files("flows.reproduction"))) / f"{name}.toml"
    if not Path(name).is_file():
        raise UsageError(f"there is no reproduction {name!r}: give {', '.join(list_built_in())}, or a TOML file")
    return Path(name)


def read_reproduction(name: str) -> Reproduction:
    """Read a built-in reproduction, or a file; local paths become absolute.

    Raises:
        UsageError: there is no such file, or a field is unknown, missing or of the wrong type.
    """
    path = find_reproduction(name)
    toml_table = read_toml(path)
    for library in _list_tables(toml_table.get("library")):
        if isinstance(recipe := library.setdefault("recipe", {}), dict):
            # a recipe without [index] would have the default indexes
            recipe.setdefault("index", {})
    for data_table in _list_tables(toml_table.get("data")):
        if isinstance(local_path := data_table.get("path"), str) and "://" not in local_path:
            data_table["path"] = str(path.parent.absolute() / local_path)
    _resolve_folders(_list_tables(toml_table.get("library")), "encoder", path.parent)
    _resolve_folders([row for row in _as_list(toml_table.get("row")) if isinstance(row, dict)], "model", path.parent)
    # such as own-table of `Own_table.toml`
    default_name = re.sub(r"[^a-z0-9]+", "-", path.stem.lower()).strip("-")[:40].rstrip("-") or "own"
    return from_table(Reproduction, {"name": default_name, **toml_table}, str(path))


def _list_tables(json_value: object) -> list[dict[str, object]]:
    return [table for table in json_value.values() if isinstance(table, dict)] if isinstance(json_value, dict) else []


def _as_list(json_value: object) -> list[object]:
    return json_value if isinstance(json_value, list) else []


def _resolve_folders(tables: Sequence[dict[str, object]], key: str, parent: Path) -> None:
    """Replace each name of a folder that is next to the reproduction file by the folder's path."""
    for table in tables:
        if isinstance(name := table.get(key), str) and (parent / name).is_dir():
            table[key] = str((parent / name).absolute())
