"""Release a new version: rebuild, train a model if requested, evaluate, and move the ref.

Purpose: the scheduled chain from a dump to the snapshot that services follow. The ref that services
    follow moves last, only once, and only if the evaluation is accepted. Until then the ref
    `REF-candidate` names the new snapshot, and `NAME-candidate` a new model.
Caching: a step is skipped if its inputs are unchanged. The store's memo records rebuild and
training, and the evaluation is recorded too. An interrupted run continues when it is run again.
Requires: a store that this machine and the workers both reach; with a model the extras `model`
and `train`.
"""

import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from flows import artifacts
from flows.finetune import finetune
from flows.outcome import ReleaseOutcome, ReleaseRefusedError
from flows.parameters import DumpParameter, RecipeParameter, StoreParameter, Url, create_file_option
from flows.reindex import DEFAULT_ENCODER, reindex
from flows.release_evaluator import ReleaseEvaluation, ReleaseEvaluator
from flows.stage import StageClock, deployment_flow, stage
from flows.training import KindName, RecipeTables
from rag_model.errors import RefConflictError, RefusedError, UsageError
from rag_model.evaluation.answers.settings import EvaluationSettings
from rag_model.evaluation.gate import GateVerdict, ReleaseCriteria, check_release
from rag_model.evaluation.records import compare_evaluations
from rag_model.reading.model import resolve_model_id
from rag_model.snapshots.parent import Parent
from rag_model.snapshots.planning import Inputs, collect_inputs, find_or_build_snapshot
from rag_model.snapshots.recipe import Recipe, check_indexes_and_retrievers
from rag_model.store.store import MODEL_PREFIX, Store
from rag_model.store.versions.model_manifest import GENERATOR
from rag_model.store.versions.moves import advance, check_current_move, undo
from rag_model.store.versions.refs import RefMove, Refs, check_ref_name
from rag_model.toml import from_table, read_toml
from rag_model.training.objectives.objective import get_objective

CANDIDATE = "-candidate"  # suffix of refs that name a snapshot or model that is not accepted yet


@dataclass(frozen=True, slots=True)
class ReleaseTraining:
    """A model to train on the new snapshot; `flows.finetune` documents each field."""

    kind: KindName
    train: Url | None = None
    dev: Url | None = None
    name: str | None = None  # the ref of the trained model; by default the kind
    encoder: Url | None = None
    generator: Url | None = None
    teacher: Url | None = None
    recipe: RecipeTables = None
    max_steps: int | None = None

    @property
    def ref(self) -> str:
        """The ref of the trained model, which moves together with the ref of the snapshot."""
        return self.name or self.kind


def _read_training(path: Path) -> ReleaseTraining:
    return from_table(ReleaseTraining, read_toml(path), str(path))


@deployment_flow("release", takes_turns=True)
def release(
    dump: DumpParameter,
    store: StoreParameter,
    questions: Url,
    encoder: Url = DEFAULT_ENCODER,
    recipe: RecipeParameter = None,
    ref: str = "latest",
    limit: int | None = None,
    model: str | None = None,
    training: Annotated[
        ReleaseTraining | None,
        create_file_option(
            _read_training,
            "Train a RAG model on the new snapshot: TOML with kind, train, dev, name and [recipe.TABLE]s.",
        ),
    ] = None,
    settings: EvaluationSettings | None = None,
    acceptance: ReleaseCriteria | None = None,
    beam_options: Sequence[str] = (),
    rebuild_graphs: bool = False,
) -> ReleaseOutcome:
    """Rebuild from `dump`, evaluate with `questions`, and move `ref` if the evaluation is accepted.

    Args:
        dump: URL, path or glob of a dump; docs/howto/build.md lists the formats.
        store: URL or folder of the store; created if it does not exist.
        questions: DPR's CSV, JSONL with `question` and `answers` or `passages`, KILT's JSONL, or a
            BEIR folder.
        encoder: Folder or hub name of the passage encoder.
        recipe: All other settings that decide the snapshot; by default the default recipe.
        ref: The ref to move to the new snapshot if the evaluation is accepted.
        limit: Read at most this many articles, for a quick test.
        model: The model that answers the questions, as `evaluate` takes it; by default only
            retrieval is measured.
        training: Instead of `model`: train a RAG model on the new snapshot; the refs of model and
            snapshot move together.
        settings: Settings of the evaluation, such as the retriever and the model's `readers`;
            `depth` is the number of passages that are measured.
        acceptance: Minimum values of metrics, and how much worse than the present snapshot and
            model the candidate may be.
        beam_options: Options of Beam and its runner, such as `--runner=FlinkRunner
            --flink_master=host:8081`; on the command line after `--`.
        rebuild_graphs: Build every cell of a graph again instead of updating the parent's.

    Raises:
        GateRefusedError: the indexes of the new snapshot were refused; the ref did not move.
        ReleaseRefusedError: the evaluation is recorded and was not accepted; the ref did not move.
        RefConflictError: another writer moved `ref`, or the ref of the trained model, during the
            release; its move is kept.
        BookwheelError: a stage failed; run the release again to continue.
    """
    opened_store, clock = Store.open(store, create=True), StageClock("release")
    acceptance = acceptance or ReleaseCriteria()
    candidate_ref = check_ref_name(f"{check_ref_name(ref)}{CANDIDATE}")
    check_release_request(model, training)
    evaluator = ReleaseEvaluator(opened_store, questions, settings or EvaluationSettings())
    # Check this before the build, which may take hours.
    evaluator.check(acceptance, has_model=model is not None or training is not None)
    # keeps `gc` from deleting new and reused files
    with opened_store.intents.hold(f"release-{secrets.token_hex(8)}"):
        current_move = opened_store.refs.find_current(ref)
        present_snapshot = current_move.snapshot if current_move else None
        with clock("look"):
            inputs = collect_release_inputs(opened_store, dump, encoder, recipe or Recipe(), limit, ref)
        model_ref = None if training is None else training.ref
        model_move = opened_store.models.refs.find_current(model_ref) if model_ref else None
        candidate_model = resolve_model_id(opened_store, model) if model else None
        present_model = model_move.snapshot if model_move else candidate_model
        has_model = training is not None or candidate_model is not None
        has_comparison = acceptance.tolerance is not None and (present_model is not None) == has_model
        present_evaluation = None
        if present_snapshot and has_comparison:
            present_evaluation = evaluator(present_snapshot, present_model)
            # Metrics lack a measure that applies to no question: refuse it before the build.
            acceptance.check_measures(present_evaluation.metrics)
        arguments = dump, store, encoder, recipe, candidate_ref, limit, False, beam_options
        build = partial(reindex.fn, *arguments, base=ref, rebuild_graphs=rebuild_graphs)
        snapshot, is_built = find_or_build_snapshot(
            opened_store, inputs, present_snapshot, lambda: build().snapshot, always_builds=rebuild_graphs
        )
        done = {"reindex": is_built}
        if training is not None:
            candidate_model, done["finetune"] = train_candidate(training, store, snapshot, beam_options)
        candidate_evaluation = evaluator(snapshot, candidate_model)
        done["evaluate"] = candidate_evaluation.is_new or (present_evaluation is not None and present_evaluation.is_new)
        with clock("judge"):
            current_move = find_initial_move(opened_store.refs, ref, snapshot, current_move)
            withdrawn_move = find_withdrawal(opened_store, ref, snapshot, current_move)
            verdict = judge_candidate(
                opened_store,
                acceptance,
                evaluator.get_headline_measure(candidate_model),
                candidate_evaluation,
                present_evaluation,
                withdrawn_move,
            )
        with clock("move"):
            note = f"release, evaluation {candidate_evaluation.manifest.id[:12]}"
            new_move = None
            if verdict.passed:
                moves = current_move, model_move
                new_move = move_refs(opened_store, snapshot, ref, candidate_model, model_ref, *moves, note)
        done["move"] = verdict.passed and new_move != current_move
    outcome = ReleaseOutcome(
        ref=ref,
        snapshot=snapshot,
        number=new_move.number if new_move else None,
        evaluation=candidate_evaluation.manifest.id,
        present=present_evaluation.manifest.id if present_evaluation else None,
        model=candidate_model,
        figures={name: str(metric) for name, metric in candidate_evaluation.metrics.items()},
        gate=asdict(verdict),
        done=done,
        seconds=clock.seconds,
    )
    artifacts.show_release(outcome)
    if not verdict.passed:
        raise ReleaseRefusedError.from_reason(outcome, verdict.reason)
    return outcome


def check_release_request(model: str | None, training: ReleaseTraining | None) -> None:
    """Check before the build that a release with this model or training is possible.

    Raises:
        UsageError: both a model and a training are given, or the trained model does not answer
            questions from the snapshot that is released.
    """
    if training is None:
        return
    training_result = get_objective(training.kind).result
    check_ref_name(f"{check_ref_name(training.ref)}{CANDIDATE}")
    if model is not None:
        raise UsageError(f"model {model} and a training are given, and only one model is evaluated: leave one out")
    if GENERATOR not in training_result.parts:
        raise UsageError(
            f"`finetune {training.kind}` trains no model that answers questions: run it "
            f"separately, and release a snapshot that is built or ranked with its model"
        )
    if training_result.rebuilds:
        raise UsageError(
            f"`finetune {training.kind}` builds a separate index for its model, which is not the "
            f"snapshot that is released: run it separately, and move its ref with `tag`"
        )


@stage
def collect_release_inputs(
    store: Store, dump: str, encoder: str, recipe: Recipe, limit: int | None, ref: str
) -> Inputs | None:
    """Return all inputs that determine the snapshot; None if they cannot be collected."""
    check_indexes_and_retrievers(recipe, recipe.list_representations())
    return collect_inputs(store, dump, encoder, recipe, limit, Parent.from_ref(store, ref).pins)


def train_candidate(
    training: ReleaseTraining, store: str, snapshot: str, beam_options: Sequence[str]
) -> tuple[str, bool]:
    """Train a model on the snapshot, unless it exists; return its id, and whether it is new."""
    training_arguments: dict[str, Any] = {field.name: getattr(training, field.name) for field in fields(training)}
    training_arguments |= {"store": store, "ref": snapshot, "name": f"{training.ref}{CANDIDATE}"}
    outcome = finetune.fn(**training_arguments, beam_options=beam_options)
    assert outcome is not None  # None only if several processes share a training
    return outcome.model, outcome.trained


def find_initial_move(refs: Refs, ref: str, snapshot: str, initial_move: RefMove | None) -> RefMove | None:
    """Return the entry of the ref's log that this release may replace.

    This is `initial_move`, or the current entry if another release has already moved the ref to
    `snapshot`.
    """
    current_move = refs.find_current(ref)
    return current_move if current_move is not None and current_move.snapshot == snapshot else initial_move


def find_withdrawal(store: Store, ref: str, snapshot: str, current_move: RefMove | None) -> str:
    """Return `REF@NUMBER` of the last move to `snapshot` if the ref has moved on since; else ""."""
    if current_move is None or current_move.snapshot == snapshot:
        return ""
    numbers = [move.number for move in store.refs.read_history(ref) if move.snapshot == snapshot]
    return f"{ref}@{numbers[-1]}" if numbers else ""


@stage
def judge_candidate(
    store: Store,
    acceptance: ReleaseCriteria,
    headline: str,
    candidate_evaluation: ReleaseEvaluation,
    present_evaluation: ReleaseEvaluation | None,
    withdrawn_move: str,
) -> GateVerdict:
    """Compare the candidate's evaluation with the required minimums and the present evaluation."""
    differences = None
    if present_evaluation is not None:
        (differences,) = compare_evaluations(
            store, present_evaluation.manifest, candidate_evaluation.manifest
        ).pairs.values()
    return check_release(
        acceptance, candidate_evaluation.metrics, differences, headline, candidate_evaluation.collapsed, withdrawn_move
    )


@stage
def move_refs(
    store: Store,
    snapshot: str,
    ref: str,
    model: str | None,
    model_ref: str | None,
    current_move: RefMove | None,
    model_move: RefMove | None,
    note: str,
) -> RefMove:
    """Move the ref of the trained model, if there is one, and then the ref of the snapshot.

    Return the new log entry of the ref of the snapshot. If this ref cannot be moved, the ref of the
    model stays, or is moved back.

    Raises:
        RefusedError: a file of the snapshot or the model is missing, or is not trusted.
        RefConflictError: `current_move` or `model_move` is not current any more.
    """
    if model is None or model_ref is None:
        return advance(store, snapshot, ref, current_move, note)
    check_current_move(store, ref, current_move)
    model_move = find_initial_move(store.models.refs, model_ref, model, model_move)
    new_model_move = advance(store, f"{MODEL_PREFIX}{model}", model_ref, model_move, note)
    try:
        return advance(store, snapshot, ref, current_move, note)
    except (RefConflictError, RefusedError):
        if model_move is None or model_move.snapshot != model:
            with suppress(RefConflictError):  # a later move of another writer is kept
                undo(store, f"{MODEL_PREFIX}{model_ref}", new_model_move, model_move)
        raise
