"""A new folder in a repository of the Hugging Face Hub: filled on this machine, then sent as one commit.

Readers see the commit whole or not at all. It names the commit that it was made after, so of two writers who found the
place empty one is refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import CommitOperationAdd, get_token
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.utils import HfUri

from rag_model.errors import StoreError, UsageError, reason
from rag_model.store.objects.hub import KINDS, HubApi, asked, explained, repository_of

_MADE = {".gitattributes"}  # by the Hub, in a new repository
_CHANGED = {409, 412}  # the repository was made, or a commit followed the one that is named


@contextmanager
def committed(url: str, kind: str, summary: str) -> Iterator[Path]:
    """Yield a folder to fill, whose files are committed below `url` when the block succeeds.

    A repository that does not exist is made then, private. `kind` is what may be there: `dataset` or `model`.

    Raises:
        StoreError: the Hub cannot be reached, or does not let the token write; nothing was committed.
        UsageError: the place is not empty, or in a repository of another kind.
    """
    place, api = repository_of(url), HubApi()
    if place.type != kind:
        raise UsageError(f"{url} is in a repository of {place.type}s: give hf://{KINDS[kind]}USER/NAME")
    _check_names(place, url)
    with _sentences(url), asked():
        parent = _parent(api, place, url)
    with TemporaryDirectory(prefix="bookwheel-") as folder:
        yield Path(folder)
        with _sentences(url):
            _commit(api, place, Path(folder), parent or _new(api, place), summary)


@contextmanager
def _sentences(url: str) -> Iterator[None]:
    try:
        with explained():
            yield
    except OSError as refused:
        status = getattr(getattr(refused.__cause__, "response", None), "status_code", None)
        if status in _CHANGED:
            raise StoreError(f"{url} was changed by someone else meanwhile: look at it, and export again") from refused
        what = (
            "cannot write to" if not isinstance(refused, PermissionError) else "the token in HF_TOKEN cannot write to"
        )
        raise StoreError(f"{what} {url}: {refused}") from refused
    except (RuntimeError, ValueError) as failed:  # of one file's upload, or of the card's first lines
        raise StoreError(f"cannot write to {url}: {reason(failed.__cause__ or failed)}; export again") from failed


def _check_names(place: HfUri, url: str) -> None:
    try:
        CommitOperationAdd(f"{place.path_in_repo}/README.md", b"")
    except ValueError as refused:
        raise UsageError(f"{url} is no place for files: the Hub takes no folder .., .git or .cache") from refused


def _parent(api: HubApi, place: HfUri, url: str) -> str | None:
    """Return the commit that the place is empty in; None if there is no such repository."""
    if get_token() is None:
        raise StoreError(f"cannot write to {url}: HF_TOKEN is not set; set it to a token that may write")
    where = {"repo_type": place.type, "revision": place.revision}
    try:
        parent = api.repo_info(place.id, **where).sha
    except RepositoryNotFoundError:
        if place.revision:
            raise
        return None
    api.auth_check(place.id, repo_type=place.type, write=True)
    if place.path_in_repo:
        there = bool(api.get_paths_info(place.id, place.path_in_repo, **where))
    else:
        there = any(one.path not in _MADE for one in api.list_repo_tree(place.id, **where))
    if there:
        raise UsageError(f"there is something at {url} already: give a new repository, or a new folder in this one")
    return str(parent)


def _new(api: HubApi, place: HfUri) -> str:
    api.create_repo(place.id, repo_type=place.type, private=True)
    return str(api.repo_info(place.id, repo_type=place.type).sha)


def _commit(api: HubApi, place: HfUri, folder: Path, parent: str, summary: str) -> None:
    below = f"{place.path_in_repo}/" if place.path_in_repo else ""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    adding = [CommitOperationAdd(f"{below}{path.relative_to(folder).as_posix()}", path) for path in files]
    where = {"repo_type": place.type, "revision": place.revision}
    # first, by itself: it alone can be told to send what a .gitignore in the repository names
    api.preupload_lfs_files(place.id, adding, gitignore_content="", free_memory=False, **where)
    api.create_commit(place.id, adding, commit_message=summary, parent_commit=parent, **where)
