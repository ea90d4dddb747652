"""The evaluation of a snapshot for a release: that which is recorded, or a new one."""

from dataclasses import dataclass
from typing import Any

from flows.compare import compare
from flows.evaluate import evaluate
from flows.outcome import CollapseRefusedError, Compared, Evaluated
from flows.recording import OUTCOME
from rag_model.errors import StoreError
from rag_model.evaluation.answers.scores import names_of, right_by
from rag_model.evaluation.answers.settings import Evaluation
from rag_model.evaluation.questions.files import read_questions
from rag_model.evaluation.records.acceptance import Acceptance, Measured
from rag_model.evaluation.records.subject import answers_subject, retrieval_subject
from rag_model.evaluation.retrieval.judging import Judge, evidence_names
from rag_model.json_text import parse_json
from rag_model.store.store import Store
from rag_model.store.versions.evaluation_manifest import EvaluationManifest, Subject
from rag_model.store.versions.evaluations import known
from rag_model.store.versions.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Examined:
    """An evaluation in the store."""

    manifest: EvaluationManifest
    collapsed: str  # why the model's retrieval has collapsed; empty: it has not
    new: bool  # False: it was recorded before, and nothing was asked

    @property
    def figures(self) -> Measured:
        """The figures of its one retriever."""
        return next(iter(self.manifest.content.figures.values()))


class Examiner:
    """Evaluates snapshots with the same questions and settings, each once."""

    def __init__(self, store: Store, questions: str, settings: Evaluation) -> None:
        """Read the questions.

        Raises:
            InputError: they cannot be read.
            UsageError: they cannot be judged as the settings say.
        """
        self.store, self.questions, self.settings = store, questions, settings
        self.asked = read_questions(questions)
        self.judge = Judge.of(self.asked, settings.judged_by, patterns=settings.kind == "patterns")

    def headline(self, model: str | None) -> str:
        """Return the measure that decides: of the answers if a model gives them, else of retrieval."""
        return right_by(self.settings.kind) if model else self.judge.headline(self.settings.depth)

    def check(self, acceptance: Acceptance, *, answers: bool) -> None:
        """Check, before anything is built, that what is accepted can be measured; `answers`: a model gives some.

        Raises:
            UsageError: a measure is named that no evaluation with these settings has.
        """
        depth, evidence = self.settings.depth, any(question.evidence for question in self.asked.questions)
        nowhere = answers and self.settings.kind == "labels" and self.judge.by == "answers"  # no passage holds a label
        found = [] if nowhere else [*self.judge.measures(depth), *self.judge.ranks(depth)]
        found += evidence_names() if evidence else []
        found += names_of(self.settings.kind, evidence=evidence) if answers else []
        named = (*acceptance.floors, *acceptance.measures)
        found += [name for name in named if not nowhere and self.judge.can_measure(name, depth)]
        acceptance.check(dict.fromkeys(found))

    def __call__(self, snapshot: str, model: str | None) -> Examined:
        """Return the evaluation of a snapshot, a full id: of retrieval alone, or of a model's answers.

        Raises:
            StoreError: the evaluation cannot be recorded.
            BookwheelError: the snapshot or the model cannot be evaluated.
        """
        found = known(self.store, self._subject(snapshot, model))
        if found is not None:
            return Examined(found, self._collapsed(found), new=False)
        outcome = self._measured(snapshot, model)
        if outcome.evaluation is None:
            raise StoreError(f"a release records its evaluations, and this one was not: {outcome.unrecorded}")
        made = self.store.evaluations.get(self.store.evaluations.trusted(outcome.evaluation))
        return Examined(made, self._collapsed(made), new=True)

    def _subject(self, snapshot: str, model: str | None) -> Subject:
        with Snapshot.from_store(self.store, snapshot) as opened:
            if model:
                return answers_subject(self.store, opened, model, self.asked, self.settings)
            named = [self.settings.expression] if self.settings.expression else []
            return retrieval_subject(self.store, opened, self.asked, named, self.settings.depth, self.judge)

    def _measured(self, snapshot: str, model: str | None) -> Compared | Evaluated:
        if model is None:
            named = [self.settings.expression] if self.settings.expression else []
            given = self.settings.depth, self.settings.judged_by, self.settings.kind == "patterns"
            return compare.fn(self.store.url, self.questions, named, snapshot, *given)
        try:
            return evaluate.fn(self.store.url, model, self.questions, snapshot, self.settings)
        except CollapseRefusedError as refused:
            return refused.outcome

    def _collapsed(self, found: EvaluationManifest) -> str:
        try:
            told: Any = parse_json(self.store.blobs.read(found.content.files[OUTCOME]), finite=False)
            return str(told.get("refusal", ""))
        except (AttributeError, KeyError, ValueError) as broken:
            raise StoreError(
                f"{OUTCOME} of evaluation {found.id[:12]} in {self.store.url} is damaged ({broken}): restore it from a "
                "copy"
            ) from broken
