"""Delete old moves (entries of refs' logs), versions that no move names, and abandoned trainings.

The current move of a ref is never deleted, so a tag (a ref with one move) keeps its snapshot
forever. Other moves are kept if they are among the `keep` newest moves of the ref, or if they were
current less than `older_than` ago. The oldest moves of a log are deleted first and numbers never
change, so a log has no gaps, and the ref can still be moved. If a ref was deleted at least
`older_than` ago, only its last move, which records the deletion, is kept.

Then each manifest that no remaining move names is deleted if it is at least `older_than` old. This
includes snapshots that a gate refused and snapshots without a tag. The files of expired snapshots
stay until `gc` deletes those that no other version needs. A model does not keep the snapshot that
it was trained on.

An evaluation is deleted with its snapshot, or with its model if the store has the model, even if
the evaluation is new. Tags on the snapshot and on a model in the store keep the evaluation.

An unfinished training counts as abandoned if its newest checkpoint is `older_than` old and no build
or training runs; until then its snapshot is kept. The record of its checkpoint is deleted, and the
checkpoint's files stay until `gc`.

Ages are measured by the store's clock (`rag_model.store.upkeep.roots`). An age of exactly
`older_than` counts as old.
"""

from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise

from rag_model.errors import UsageError
from rag_model.store.objects.files import StoredFile
from rag_model.store.store import MODEL_PREFIX, Store
from rag_model.store.upkeep.roots import (
    MANIFEST_PATH,
    MOVE_PATH,
    StoreView,
    find_abandoned_trainings,
    group_moves_by_ref,
    list_manifest_ids,
    preview_sweep,
    read_ids_at_moves,
    sweep,
)
from rag_model.store.versions.evaluations import iter_evaluations, subject_paths
from rag_model.store.versions.trainings import CHECKPOINT_PATH


@dataclass(frozen=True, slots=True)
class ExpirePolicy:
    """The rules that decide which moves and manifests are deleted."""

    keep: int = 10  # number of newest moves of every ref to keep, including the current one
    older_than: float = 90 * 86400.0  # minimum age of the moves and manifests to delete, in seconds

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise UsageError(f"keep must be at least 1, not {self.keep}: the current move of a ref is always kept")
        if self.older_than < 0:
            raise UsageError(f"an age must be 0 or more, not {self.older_than} s")


@dataclass(frozen=True, slots=True)
class ExpireReport:
    """The moves and manifests that were deleted, or would be deleted with `dry_run`."""

    # Moves such as `latest@3`, or `model:reader@3` for a ref of models; oldest first for each ref.
    moves: tuple[str, ...]
    snapshots: tuple[str, ...]  # full ids, sorted
    models: tuple[str, ...] = ()  # full ids, sorted
    evaluations: tuple[str, ...] = ()  # full ids, sorted
    trainings: tuple[str, ...] = ()  # keys of abandoned trainings, sorted


def expire_store(store: Store, policy: ExpirePolicy | None = None, *, dry_run: bool = False) -> ExpireReport:
    """Delete old moves, and manifests that only old moves name; with `dry_run` only list them.

    Warning: a ref cannot be rolled back to a deleted move, and `gc` will delete the files of
    deleted manifests.

    Raises:
        StoreError: a ref's log cannot be read, or a file cannot be deleted; run it again to
            continue.
    """
    plan = partial(list_expired_files, store, policy or ExpirePolicy())
    files = preview_sweep(store, plan) if dry_run else sweep(store, plan, threads=1)
    move_matches = [match for file in files if (match := MOVE_PATH.fullmatch(file.path))]
    snapshots, models, evaluations = (
        list_manifest_ids(files, folder) for folder in ("snapshots", "models", "evaluations")
    )
    trainings = {match[1] for file in files if (match := CHECKPOINT_PATH.fullmatch(file.path))}
    move_names = tuple(f"{MODEL_PREFIX if match[1] else ''}{match[2]}@{int(match[3])}" for match in move_matches)
    return ExpireReport(move_names, snapshots, models, evaluations, tuple(sorted(trainings)))


def list_expired_files(store: Store, policy: ExpirePolicy, view: StoreView) -> list[StoredFile]:
    """Return the files to delete: the old moves of each ref in order, then other files."""
    cutoff = view.time - policy.older_than
    abandoned_records, training_snapshots = find_abandoned_trainings(store, view, cutoff)
    expired_moves = []
    needed_paths = {*view.needed_paths, *map(store.snapshots.manifest_path, training_snapshots)}
    for catalog, ref_files in ((store.snapshots, view.moves), (store.models, view.models)):
        moves_by_ref = group_moves_by_ref(ref_files)
        newest_by_ref = {ref: (ref, max(moves)) for ref, moves in moves_by_ref.items()}
        id_by_move = read_ids_at_moves(catalog, [*newest_by_ref.values()])
        n_kept_by_ref = {ref: policy.keep if id_by_move[move] else 1 for ref, move in newest_by_ref.items()}
        expired_numbers_by_ref = {
            ref: _find_expired_numbers(moves, cutoff, n_kept_by_ref[ref]) for ref, moves in moves_by_ref.items()
        }
        expired_moves += [
            moves[number] for ref, moves in moves_by_ref.items() for number in sorted(expired_numbers_by_ref[ref])
        ]
        kept_moves = [
            (ref, number)
            for ref, moves in moves_by_ref.items()
            for number in moves
            if number not in expired_numbers_by_ref[ref]
        ]
        id_by_move |= read_ids_at_moves(catalog, [move for move in kept_moves if move not in id_by_move])
        needed_paths |= {catalog.manifest_path(identity) for identity in id_by_move.values() if identity}
    manifests = [file for file in (*view.manifests, *view.models) if MANIFEST_PATH.fullmatch(file.path)]
    unnamed_manifests = [file for file in manifests if file.path not in needed_paths and file.modified <= cutoff]
    kept_paths = {file.path for file in manifests} - {file.path for file in unnamed_manifests}
    return [*expired_moves, *_find_orphans(store, view, kept_paths), *unnamed_manifests, *abandoned_records]


def _find_orphans(store: Store, view: StoreView, kept_paths: set[str]) -> list[StoredFile]:
    """Return the manifests of evaluations whose snapshot or model is not kept."""
    kept_ids = {
        evaluation.id
        for evaluation in iter_evaluations(store)
        if kept_paths.issuperset(subject_paths(store, evaluation.content.subject))
    }
    candidates = [(file, match) for file in view.evaluations if (match := MANIFEST_PATH.fullmatch(file.path))]
    return [file for file, match in candidates if match[2] not in kept_ids and file.path not in view.needed_paths]


def _find_expired_numbers(moves: dict[int, StoredFile], cutoff: float, n_kept: int) -> set[int]:
    """Return the numbers of moves (log entries) to delete: all before the first kept move."""
    numbers = sorted(moves)
    expired_numbers: set[int] = set()
    for number, next_number in islice(pairwise(numbers), max(0, len(numbers) - n_kept)):
        if moves[next_number].modified > cutoff:
            break
        expired_numbers.add(number)
    return expired_numbers
