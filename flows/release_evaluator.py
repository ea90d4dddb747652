"""Evaluate each version of a release once, with the same questions and settings.

This is separate from `release`, which also trains models, because importing the code of trainings
takes longer than looking up a recorded evaluation.
"""

from dataclasses import dataclass
from typing import Any

from flows.compare import compare
from flows.evaluate import evaluate
from flows.evaluation_records import OUTCOME
from flows.outcome import CollapseRefusedError, CompareOutcome, EvaluateOutcome
from rag_model.errors import StoreError
from rag_model.evaluation.answers.scores import get_deciding_measure, list_measures
from rag_model.evaluation.answers.settings import EvaluationSettings
from rag_model.evaluation.gate import MetricMap, ReleaseCriteria
from rag_model.evaluation.matching import compile_pattern
from rag_model.evaluation.questions import read_questions
from rag_model.evaluation.retrieval.judging import RetrievalJudge, list_evidence_measures
from rag_model.evaluation.retrieval.staged import DEFAULT_TIMING
from rag_model.evaluation.subject import describe_answers_subject, describe_retrieval_subject
from rag_model.store.store import Store
from rag_model.store.versions.evaluation_manifest import EvaluationManifest, EvaluationSubject
from rag_model.store.versions.evaluations import find_evaluation
from rag_model.store.versions.snapshot import Snapshot
from rag_model.untrusted_text import parse_json


@dataclass(frozen=True, slots=True)
class ReleaseEvaluation:
    """A recorded evaluation of a release's candidate, or of the present version."""

    manifest: EvaluationManifest
    collapsed: str  # how retrieval has collapsed, in one sentence; empty if it has not
    is_new: bool  # False: an earlier run recorded the evaluation

    @property
    def metrics(self) -> MetricMap:
        """The metrics of the only retriever that was evaluated."""
        return next(iter(self.manifest.content.metrics.values()))


class ReleaseEvaluator:
    """Evaluates each snapshot once, with the same questions and settings."""

    def __init__(
        self,
        store: Store,
        questions: str,
        settings: EvaluationSettings,
        asks: str | None = None,
        timing_seconds: float = DEFAULT_TIMING.seconds,
    ) -> None:
        """Read the questions; `asks` is the passage encoder, as in `flows.evaluate`.

        Raises:
            InputError: the questions cannot be read.
            UsageError: the questions cannot be judged as the settings require.
        """
        self.store, self.questions, self.settings, self.asks = store, questions, settings, asks
        self._timing_seconds = timing_seconds  # per retriever
        self.question_set = read_questions(questions)
        self.judge = RetrievalJudge.for_questions(
            self.question_set, settings.judged_by, patterns=settings.kind == "patterns"
        )

    def get_headline_measure(self, model: str | None) -> str:
        """Return the measure that decides: of answers if there is a model, else of retrieval."""
        if model:
            return get_deciding_measure(self.settings.kind)
        return self.judge.get_headline_measure(self.settings.depth)

    def check(self, acceptance: ReleaseCriteria, *, has_model: bool) -> None:
        """Check before the build that the evaluation will have all measures in `acceptance`.

        `has_model` says whether a model answers the questions.

        Raises:
            InputError: an answer is not a regular expression, and the settings require one.
            UsageError: evaluations with these settings do not have a measure that `acceptance`
                names.
        """
        for question in self.question_set.questions if self.settings.kind == "patterns" else ():
            for answer in question.answers:
                compile_pattern(answer)
        depth, has_evidence = self.settings.depth, any(question.evidence for question in self.question_set.questions)
        # If the answers are labels, no passage contains them, so they cannot judge retrieval.
        has_no_text_answers = has_model and self.settings.kind == "labels" and self.judge.judged_by == "answers"
        measures = (
            [] if has_no_text_answers else [*self.judge.list_measures(depth), *self.judge.list_rank_measures(depth)]
        )
        measures += list_evidence_measures() if has_evidence and has_model else []
        measures += list_measures(self.settings.kind, evidence=has_evidence) if has_model else []
        acceptance.check_measures(dict.fromkeys(measures))

    def __call__(self, snapshot: str, model: str | None) -> ReleaseEvaluation:
        """Return the evaluation of a snapshot (full id): of retrieval, or of a model's answers.

        Raises:
            StoreError: the evaluation cannot be recorded.
            BookwheelError: the snapshot or the model cannot be evaluated.
        """
        recorded_evaluation = find_evaluation(self.store, self._build_subject(snapshot, model))
        if recorded_evaluation is not None:
            return ReleaseEvaluation(recorded_evaluation, self._read_collapse(recorded_evaluation), is_new=False)
        outcome = self._evaluate(snapshot, model)
        if outcome.evaluation is None:
            raise StoreError(f"the evaluation of the release could not be recorded: {outcome.unrecorded}")
        new_evaluation = self.store.evaluations.get(self.store.evaluations.resolve_trusted(outcome.evaluation))
        return ReleaseEvaluation(new_evaluation, self._read_collapse(new_evaluation), is_new=True)

    def _build_subject(self, snapshot: str, model: str | None) -> EvaluationSubject:
        with Snapshot.from_store(self.store, snapshot) as opened_snapshot:
            if model:
                return describe_answers_subject(
                    self.store, opened_snapshot, model, self.question_set, self.settings, self.asks
                )
            expressions = [self.settings.expression] if self.settings.expression else []
            return describe_retrieval_subject(
                self.store, opened_snapshot, self.question_set, expressions, self.settings.depth, self.judge
            )

    def _evaluate(self, snapshot: str, model: str | None) -> CompareOutcome | EvaluateOutcome:
        if model is None:
            expressions = [self.settings.expression] if self.settings.expression else []
            retrieval_options = self.settings.depth, self.settings.judged_by, self.settings.kind == "patterns"
            timing_seconds = self._timing_seconds
            return compare.fn(
                self.store.url, self.questions, expressions, snapshot, *retrieval_options, timing_seconds=timing_seconds
            )
        try:
            return evaluate.fn(self.store.url, model, self.questions, snapshot, self.settings, asks=self.asks)
        except CollapseRefusedError as error:
            outcome: EvaluateOutcome = error.outcome
            return outcome

    def _read_collapse(self, manifest: EvaluationManifest) -> str:
        try:
            outcome: Any = parse_json(self.store.blobs.read(manifest.content.files[OUTCOME]), finite=False)
            return str(outcome.get("refusal", ""))
        except (AttributeError, KeyError, ValueError) as error:
            raise StoreError(
                f"{OUTCOME} of evaluation {manifest.id[:12]} in {self.store.url} is damaged "
                f"({error}): restore it from a copy"
            ) from error
