"""The versioned store: one fsspec URL that holds snapshots and what they are made from, models, and evaluations."""

from typing import Any

from rag_model.errors import StoreError
from rag_model.secrets import refuse_secret
from rag_model.store.objects.blobs import Blobs
from rag_model.store.objects.files import Files, json_bytes
from rag_model.store.objects.intents import Intents
from rag_model.store.objects.memo import Memo
from rag_model.store.objects.runs import Runs
from rag_model.store.versions.evaluation_manifest import EvaluationManifest
from rag_model.store.versions.manifest import Manifest
from rag_model.store.versions.model_manifest import ModelManifest
from rag_model.store.versions.refs import Refs
from rag_model.store.versions.shelf import Shelf
from rag_model.store.versions.takedowns import Takedowns
from rag_model.store.versions.trainings import Trainings

FORMAT = 1
MODEL = "model:"  # prefix of a model's name where a snapshot is allowed too; names of refs contain no colon
EVALUATION = "evaluation:"  # likewise of an evaluation's id
TRAINING = "training:"  # likewise of the key of an unfinished training, for `show`
_MARK = "store.json"  # says that the URL is a store, and of which layout


class Store:
    """Blobs, memo, snapshots, models, evaluations, trainings, refs and run reports below one URL.

    A store pickles as its URL, so it travels to workers. Credentials and endpoints come from the environment,
    as fsspec and the clouds' libraries read it: `AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, `FSSPEC_S3_…`,
    `GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_NAME`, `HF_TOKEN`.
    """

    def __init__(self, files: Files) -> None:
        """Use the store at the URL of `files`, unchecked; call `Store.open`."""
        self.files = files
        self.blobs = Blobs(files)
        self.memo = Memo(files, self.blobs)
        self.refs = Refs(files)
        self.snapshots = Shelf(files, self.refs, "snapshot", Manifest.from_bytes)
        self.models = Shelf(files, Refs(files, "models/refs", "model"), "model", ModelManifest.from_bytes)
        self.evaluations = Shelf(
            files, Refs(files, "evaluations/refs", "evaluation"), "evaluation", EvaluationManifest.from_bytes
        )
        self.runs = Runs(files)
        self.intents = Intents(files)
        self.takedowns = Takedowns(files)
        self.trainings = Trainings(files)

    @property
    def url(self) -> str:
        """The store's full URL."""
        return self.files.url

    def shelf(self, name: str) -> tuple[Shelf[Any], str]:
        """Return the shelf of a name, and the name on it: `model:reader` is model `reader`; others are snapshots.

        `evaluation:ab12` is an evaluation by its id.
        """
        for prefix, shelf in ((MODEL, self.models), (EVALUATION, self.evaluations)):
            if name.startswith(prefix):
                return shelf, name.removeprefix(prefix)
        return self.snapshots, name

    @classmethod
    def open(cls, url: str, *, create: bool = False) -> "Store":
        """Open the store at a URL (`s3://bucket/prefix`, `gs://…`, `az://…`, `hf://…`, `file:///…`) or a local path.

        `create` makes a store if there is none.

        Raises:
            StoreError: there is no store (and not `create`), it cannot be reached or written, or it has a
            newer format.
            MissingExtraError: the URL needs a package that is not installed.
            UsageError: the URL may contain a secret.
        """
        refuse_secret(url)
        files = Files(url)
        mark = files.read_json(_MARK)
        if mark is None and create:
            files.create(_MARK, json_bytes({"format": FORMAT}))
            mark = files.read_json(_MARK)
            if mark is None:
                raise StoreError(f"cannot make a store at {files.url}: it is a file; give a folder")
        if mark is None:
            raise StoreError(f"there is no bookwheel store at {files.url}: check the URL, or create one with `reindex`")
        written = mark.get("format")
        if type(written) is not int or not 1 <= written <= FORMAT:
            raise StoreError(
                f"the store at {files.url} is of format {written!r}, newer than {FORMAT}: upgrade bookwheel"
            )
        return cls(files)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the URL."""
        return _reopened, (self.url,)

    def __repr__(self) -> str:
        """Show the URL."""
        return f"Store({self.url!r})"


def _reopened(url: str) -> Store:
    return Store(Files(url))
