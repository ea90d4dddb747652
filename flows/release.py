"""Release a library: rebuild it, train a model on it if asked to, evaluate both, and move the ref if they are accepted.

Purpose: the scheduled chain from a dump to what services follow. The ref that they follow moves last and only once.
Until then the new snapshot is named `REF-candidate`, and a new model `NAME-candidate`.
Caching: each step is skipped if its inputs are as they were: the rebuild and the training by the store's memo, the
evaluation because it is recorded. A run that died goes on when it is run again; one that has nothing new does nothing.
Requires: a store that this machine and the workers both reach; with a model the extras model and train.
"""

import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from flows import artifacts
from flows.admission import Url
from flows.examine import Examined, Examiner
from flows.finetune import finetune
from flows.outcome import Released, ReleaseRefusedError
from flows.progress import StageClock
from flows.reindex import DEFAULT_ENCODER, reindex
from flows.stage import deployed, stage
from flows.training import KindName, RecipeTables
from rag_model.errors import UsageError
from rag_model.evaluation.answers.settings import Evaluation
from rag_model.evaluation.gate import Verdict
from rag_model.evaluation.records.acceptance import Acceptance, accept
from rag_model.evaluation.records.differences import beside
from rag_model.reading.model import model_id
from rag_model.snapshots.rebuilt import Inputs, inputs_of, known, remember
from rag_model.snapshots.recipe import Recipe, check_fit
from rag_model.store.store import MODEL, Store
from rag_model.store.versions.model_parts import GENERATOR
from rag_model.store.versions.moves import advance, tag
from rag_model.store.versions.refs import RefMove, checked_name
from rag_model.training.objectives.registry import objective

CANDIDATE = "-candidate"  # after the name of a ref: what is built and evaluated, and not accepted yet


@dataclass(frozen=True, slots=True)
class Training:
    """A model to train on the new snapshot: `flows.finetune` has the meaning of each field."""

    kind: KindName
    train: Url | None = None
    dev: Url | None = None
    name: str | None = None  # the ref of models that moves with the release; by default the kind
    encoder: Url | None = None
    generator: Url | None = None
    teacher: Url | None = None
    recipe: RecipeTables = None
    max_steps: int | None = None

    @property
    def ref(self) -> str:
        """The ref of models that moves with the release."""
        return self.name or self.kind


@deployed("release")
def release(
    dump: Url,
    store: Url,
    questions: Url,
    encoder: Url = DEFAULT_ENCODER,
    recipe: Recipe | None = None,
    ref: str = "latest",
    limit: int | None = None,
    model: str | None = None,
    training: Training | None = None,
    settings: Evaluation | None = None,
    acceptance: Acceptance | None = None,
    beam_options: Sequence[str] = (),
) -> Released:
    """Rebuild from `dump`, evaluate with `questions`, and move `ref` if the evaluation is accepted.

    Args:
        dump: URL, path or glob of a MediaWiki dump, of JSONL or Parquet documents, or of psgs_w100.tsv.
        store: URL or folder of the store; made if there is none.
        questions: DPR's CSV, JSONL with `question` and `answers` or `passages`, KILT's JSONL, or a BEIR folder.
        encoder: folder or hub name of the passage encoder.
        recipe: all other settings that decide the snapshot; by default the default recipe.
        ref: the ref to move to the new snapshot, when it is accepted.
        limit: read at most this many articles, for a quick test.
        model: what answers the questions, as `evaluate` takes it; by default retrieval alone is measured.
        training: train a RAG model on the new snapshot instead; its ref moves with the snapshot's.
        settings: of the evaluation, the retriever and the model's `readers` among them; `depth` is the number of
            passages that are measured.
        acceptance: floors on figures, and the loss against the present snapshot and model that is tolerated.
        beam_options: options of Beam and of its runner, as on their own command lines.

    Raises:
        GateRefusedError: the indexes of the new snapshot were refused; the ref did not move.
        ReleaseRefusedError: the evaluation is recorded and was not accepted; the ref did not move.
        BookwheelError: a stage failed; run it again to go on.
    """
    target, clock, acceptance = Store.open(store, create=True), StageClock("release"), acceptance or Acceptance()
    candidate, done = checked_name(f"{checked_name(ref)}{CANDIDATE}"), dict[str, bool]()
    check(model, training)
    examine = Examiner(target, questions, settings or Evaluation())
    examine.check(acceptance, answers=model is not None or training is not None)  # before hours of building
    with target.intents.held(f"release-{secrets.token_hex(8)}"):  # keeps `gc` from deleting new and reused files
        now = target.refs.current(ref)
        base = now.snapshot if now else None
        with clock("look"):
            inputs = look(target, dump, encoder, recipe or Recipe(), limit)
            snapshot = made_before(target, inputs, base)
        served, answering = models(target, model, training)
        answers = training is not None or answering is not None
        compared = base is not None and acceptance.tolerance is not None and (served is not None) == answers
        before = examine(base, served) if base and compared else None
        if before is not None:
            acceptance.check(before.figures)  # what applies to no question of these, too
        if done.setdefault("reindex", snapshot is None):
            snapshot = reindex.fn(dump, store, encoder, recipe, candidate, limit, False, beam_options, ref).snapshot
            keep(target, inputs, base, snapshot)
        assert snapshot is not None  # only a rehearsal has none
        if training is not None:
            answering, done["finetune"] = train(training, store, snapshot, beam_options)
        found = examine(snapshot, answering)
        done["evaluate"] = found.new or (before is not None and before.new)
        with clock("judge"):
            now = standing(target, ref, snapshot, now)
            withdrawn = moved_away(target, ref, snapshot, now)
            verdict = decide(target, acceptance, examine.headline(answering), found, before, withdrawn)
        with clock("move"):
            moved = move(target, verdict, Candidate(ref, snapshot, training, answering, found.manifest.id), now)
        done["move"] = verdict.passed and moved != now
    outcome = Released(
        ref=ref,
        snapshot=snapshot,
        number=moved.number if moved and verdict.passed else None,
        evaluation=found.manifest.id,
        present=before.manifest.id if before else None,
        model=answering,
        figures={name: str(figure) for name, figure in found.figures.items()},
        gate=asdict(verdict),
        done=done,
        seconds=clock.seconds,
    )
    artifacts.show_release(outcome)
    if not verdict.passed:
        raise ReleaseRefusedError(outcome, verdict.reason)
    return outcome


@dataclass(frozen=True, slots=True)
class Candidate:
    """What may be released."""

    ref: str  # of the snapshot
    snapshot: str  # full id
    training: Training | None
    model: str | None  # full id, if it was trained
    evaluation: str  # full id


def check(model: str | None, training: Training | None) -> None:
    """Check, before anything is built, that a release can move what is asked for.

    Raises:
        UsageError: a model is both named and trained, or the training makes no model that answers questions from the
            snapshot that is released.
    """
    if training is None:
        return
    result = objective(training.kind).result
    checked_name(f"{checked_name(training.ref)}{CANDIDATE}")
    if model is not None:
        raise UsageError(f"model {model} is given beside a training, whose model is evaluated: leave one of them out")
    if GENERATOR not in result.parts:
        raise UsageError(
            f"`finetune {training.kind}` makes no model that answers questions: train it by itself, and release what "
            "is built or ranked with it"
        )
    if result.rebuilds:
        raise UsageError(
            f"`finetune {training.kind}` makes an index of its own for its model, which is not the snapshot that is "
            "released: run it by itself, and move its ref with `tag`"
        )


@stage
def look(store: Store, dump: str, encoder: str, recipe: Recipe, limit: int | None) -> Inputs | None:
    """Return everything that decides the snapshot."""
    check_fit(recipe, recipe.represented())
    return inputs_of(store, dump, encoder, recipe, limit)


def made_before(store: Store, inputs: Inputs | None, base: str | None) -> str | None:
    """Return the snapshot that an earlier release made of the same inputs; None if it has to be built."""
    return None if inputs is None else known(store, inputs, base)


def keep(store: Store, inputs: Inputs | None, base: str | None, snapshot: str | None) -> None:
    """Record what was built, so that the next release need not build it."""
    if inputs is not None and snapshot is not None:
        remember(store, inputs, base, snapshot)


def models(store: Store, model: str | None, training: Training | None) -> tuple[str | None, str | None]:
    """Return the model that answers at present and the one of the candidate, each by its id; None: there is none."""
    if training is not None:
        current = store.models.refs.current(training.ref)
        return (current.snapshot if current else None), None
    answering = model_id(store, model) if model else None
    return answering, answering


def train(training: Training, store: str, snapshot: str, beam_options: Sequence[str]) -> tuple[str, bool]:
    """Train a model on the snapshot, or find the one that was; return its id, and whether it was trained now."""
    made = finetune.fn(
        training.kind,
        store,
        training.train,
        training.dev,
        snapshot,
        training.encoder,
        training.generator,
        training.teacher,
        training.recipe,
        f"{training.ref}{CANDIDATE}",
        training.max_steps,
        None,
        beam_options,
    )
    return made.model, made.trained


def standing(store: Store, ref: str, snapshot: str, now: RefMove | None) -> RefMove | None:
    """Return the move that a release starts from: `now`, or that of another release which was first with the same."""
    current = store.refs.current(ref)
    return current if current is not None and current.snapshot == snapshot else now


def moved_away(store: Store, ref: str, snapshot: str, now: RefMove | None) -> str:
    """Return the last move by which a ref named a snapshot that it names no longer; empty: there is none."""
    if now is None or now.snapshot == snapshot:
        return ""
    named = [move.number for move in store.refs.history(ref) if move.snapshot == snapshot]
    return f"{ref}@{named[-1]}" if named else ""


@stage
def decide(
    store: Store, acceptance: Acceptance, headline: str, found: Examined, before: Examined | None, withdrawn: str
) -> Verdict:
    """Hold the candidate's evaluation to its floors, and beside that of what the ref names now."""
    lost = None
    if before is not None:
        (lost,) = beside(store, before.manifest, found.manifest).pairs.values()
    return accept(acceptance, found.figures, lost, headline, found.collapsed, withdrawn)


@stage
def move(store: Store, verdict: Verdict, candidate: Candidate, now: RefMove | None) -> RefMove | None:
    """Move the model's ref and then the snapshot's, if the candidate is accepted; return the ref's current move."""
    if not verdict.passed:
        return now
    note = f"release, evaluation {candidate.evaluation[:12]}"
    if candidate.training is not None:
        tag(store, f"{MODEL}{candidate.model}", candidate.training.ref, note)
    return advance(store, candidate.snapshot, candidate.ref, now, note)
