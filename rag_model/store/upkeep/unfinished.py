"""Which files of unfinished trainings may go: what no checkpoint needs (`gc`), and abandoned trainings (`expire`)."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from rag_model.errors import StoreError
from rag_model.store.objects.files import Found
from rag_model.store.store import Store
from rag_model.store.upkeep.sweep import View
from rag_model.store.versions.checks import ID
from rag_model.store.versions.signatures import SIGNED
from rag_model.store.versions.trainings import FOLDER, RECORD, TRAINED, StoredCheckpoint


def unneeded(store: Store) -> Iterator[Found]:
    """Yield the files of trainings that are not needed to go on: all of a training whose model is published.

    Of others all but the newest record, its signatures, and the files that it names. Where it cannot be read, every
    file is kept.
    """
    for key, files in _by_key(store).items():
        if _published(store, key):
            yield from files
            continue
        try:
            newest = store.trainings.newest(key)
        except StoreError:
            continue
        needed = _needed(store, key, newest)
        yield from (file for file in files if file.path not in needed and not _signs(file, needed))


def abandoned(store: Store, view: View, bound: float) -> tuple[Sequence[Found], Sequence[str]]:
    """Return the records of trainings whose files are all of `bound` or older, and the snapshots of the other ones.

    While a build or a training runs, none is abandoned: it may be about to go on.
    """
    gone, kept = list[Found](), list[str]()
    for key, files in _by_key(store).items():
        if not view.building and all(file.written <= bound for file in files):
            gone += [file for file in files if RECORD.fullmatch(file.path)]
        else:
            kept.append(key)
    snapshots = [found.reached.snapshot for key, found in store.trainings.every() if key in kept]
    return gone, snapshots


def _by_key(store: Store) -> dict[str, list[Found]]:
    files: dict[str, list[Found]] = defaultdict(list)
    for file in store.files.tree(FOLDER):
        if ID.fullmatch(key := file.path.split("/")[1]):
            files[key].append(file)
    return files


def _published(store: Store, key: str) -> bool:
    """Return whether a training's model is in the store, so that it is looked up and not trained again."""
    record = store.memo.get(TRAINED, key)
    model = record.facts.get("model") if record else None
    return isinstance(model, str) and model in store.models.list()


def _needed(store: Store, key: str, newest: StoredCheckpoint | None) -> set[str]:
    if newest is None:
        return set()
    return {store.trainings.path(key, newest.number), *(f"{FOLDER}/{key}/{ref.path}" for ref in newest.files.values())}


def _signs(file: Found, needed: set[str]) -> bool:
    signed = SIGNED.fullmatch(file.path)
    return signed is not None and f"{signed[1]}.json" in needed
