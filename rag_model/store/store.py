"""The versioned store: one fsspec URL with snapshots and their inputs, models, and evaluations."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rag_model.errors import StoreError
from rag_model.secrets import refuse_secret
from rag_model.store.objects.blobs import Blobs
from rag_model.store.objects.cache import build_link_tree
from rag_model.store.objects.files import Files, encode_json
from rag_model.store.objects.intents import Intents
from rag_model.store.objects.memo import Memo
from rag_model.store.versions.catalog import Catalog
from rag_model.store.versions.evaluation_manifest import EvaluationManifest
from rag_model.store.versions.manifest import Manifest
from rag_model.store.versions.model_manifest import ModelManifest
from rag_model.store.versions.refs import Refs
from rag_model.store.versions.takedowns import Takedowns
from rag_model.store.versions.trainings import Trainings

FORMAT = 1  # version of the layout of a store
# Prefix of a model's name where snapshots are allowed too; names of refs contain no colon.
MODEL_PREFIX = "model:"
EVALUATION_PREFIX = "evaluation:"  # prefix of an evaluation's id
TRAINING_PREFIX = "training:"  # prefix of the key of an unfinished training, for `show`
_FORMAT_FILE = "store.json"  # file that marks a store, and contains the version of its layout


@dataclass(frozen=True, slots=True)
class RunReports:
    """Reports of the progress and results of running jobs, at `runs/<run>/<stage>/<00042>.json`.

    The reports work with every Beam runner, because a worker only writes a small file for each
    element, such as a part of the corpus. A retried element overwrites its file.
    """

    files: Files

    def write_report(self, run: str, stage: str, i: int, value: Any) -> None:
        """Write the report of element number `i` (from 0) of a stage, as a small JSON value, when
        the element is finished.
        """
        self.files.write(f"{_get_folder_path(run, stage)}/{i:05d}.json", encode_json(value))

    def read_reports(self, run: str, stage: str) -> list[Any]:
        """Return a stage's reports so far, in the order of their elements."""
        folder = _get_folder_path(run, stage)
        report_names = sorted(self.files.list_names(folder), key=lambda name: int(name.removesuffix(".json")))
        reports = self.files.map_concurrently(lambda name: self.files.read(f"{folder}/{name}"), report_names)
        return [json.loads(report) for report in reports if report is not None]

    def count_reports(self, run: str, stage: str) -> int:
        """Return how many of a stage's elements have reported."""
        return len(self.files.list_names(_get_folder_path(run, stage)))

    def delete_reports(self, run: str, *stages: str) -> None:
        """Delete the reports of a run's stages; without stages, all reports of the run."""
        for folder in [_get_folder_path(run, stage) for stage in stages] or [_get_folder_path(run)]:
            self.files.delete_folder(folder)


def _get_folder_path(*names: str) -> str:
    if any(not name or "/" in name or name.startswith(".") for name in names):
        raise StoreError(f"{names!r} cannot name a run or a stage: no slashes and no leading dots")
    return "/".join(("runs", *names))


class Store:
    """Blobs, memo, snapshots, models, evaluations, trainings, refs and run reports below one URL.

    A store is pickled as its URL, so that it can be sent to workers. Credentials and endpoints come
    from the environment variables of fsspec and the clouds' libraries: `AWS_ACCESS_KEY_ID`,
    `AWS_ENDPOINT_URL`, `FSSPEC_S3_…`, `GOOGLE_APPLICATION_CREDENTIALS`,
    `AZURE_STORAGE_ACCOUNT_NAME`, `HF_TOKEN`.
    """

    def __init__(self, files: Files) -> None:
        """Use the store at the URL of `files` without checks; callers should use `Store.open`."""
        self.files = files
        self.blobs = Blobs(files)
        self.memo = Memo(files, self.blobs)
        self.refs = Refs(files)
        self.snapshots = Catalog(files, self.refs, Manifest)
        self.models = Catalog(files, Refs(files, "models/refs", "model"), ModelManifest)
        self.evaluations = Catalog(files, Refs(files, "evaluations/refs", "evaluation"), EvaluationManifest)
        self.runs = RunReports(files)
        self.intents = Intents(files)
        self.takedowns = Takedowns(files)
        self.trainings = Trainings(files)

    @property
    def url(self) -> str:
        """The store's full URL."""
        return self.files.url

    def make_interruptible(self, check: Callable[[], None]) -> "Store":
        """Return a copy whose requests `check` can interrupt; see `Files.make_interruptible`."""
        return Store(self.files.make_interruptible(check))

    def find_catalog(self, name: str) -> tuple[Catalog[Any], str]:
        """Return the catalog that contains the named version, and the name without its prefix.

        `model:reader` is model `reader`, `evaluation:ab12` is an evaluation; other names mean
        snapshots.
        """
        for prefix, catalog in ((MODEL_PREFIX, self.models), (EVALUATION_PREFIX, self.evaluations)):
            if name.startswith(prefix):
                return catalog, name.removeprefix(prefix)
        return self.snapshots, name

    def get_model_folder(self, name: str) -> Path:
        """Return a local folder with a model's files, each verified.

        `name` is an id, a prefix of an id, a ref or ref@number. The folder is in the cache, and all
        calls for a model return the same folder. Its files are links: do not write to them.

        Raises:
            StoreError: there is no such model, or one of its files is missing or damaged.
        """
        files = self.models.get(self.models.resolve_trusted(name)).content.files
        return build_link_tree({path: self.blobs.get_local_path(ref) for path, ref in files.items()})

    @classmethod
    def open(cls, url: str, *, create: bool = False, check: Callable[[], None] | None = None) -> "Store":
        """Open the store at a URL (`s3://bucket/prefix`, `gs://`, `az://`, `hf://`) or a path.

        With `create`, a new store is created if there is none. `check` can interrupt requests to
        the store; see `Files.make_interruptible`.

        Raises:
            StoreError: there is no store and `create` is not set, or it cannot be read or written,
                or it has a newer format.
            MissingExtraError: the URL needs a package that is not installed.
            UsageError: the URL may contain a secret.
        """
        refuse_secret(url)
        files = Files(url) if check is None else Files(url).make_interruptible(check)
        format_record = files.read_json(_FORMAT_FILE)
        if format_record is None and create:
            files.create(_FORMAT_FILE, encode_json({"format": FORMAT}))
            format_record = files.read_json(_FORMAT_FILE)
            if format_record is None:
                raise StoreError(f"cannot create a store at {files.url}: it is a file; give a folder")
        if format_record is None:
            raise StoreError(f"there is no bookwheel store at {files.url}: check the URL, or create one with `reindex`")
        format_number = format_record.get("format")
        if type(format_number) is not int or not 1 <= format_number <= FORMAT:
            raise StoreError(
                f"the store at {files.url} has format {format_number!r}, which is newer than "
                f"{FORMAT}: upgrade bookwheel"
            )
        return cls(files)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.url,)

    def __repr__(self) -> str:
        return f"Store({self.url!r})"


def _reopen(url: str) -> Store:
    return Store(Files(url))
