"""Evaluate one model on one question set: retrieve passages once, then answer every condition.

Usage::

    evaluation = AnswerEvaluation(retriever, answers, question_set, k=5, corpus_size=n)
    evaluation.retrieve()
    for condition in evaluation.list_conditions():
        evaluation.answer_condition(condition)
    evaluation.results[0].metrics["EM"], evaluation.collapse.describe_collapse()
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, compress
from pathlib import Path
from typing import Any

import numpy as np

from rag_model.errors import StoreError, UsageError
from rag_model.evaluation.answers.ablation import (
    BM25,
    FROZEN_RETRIEVER,
    OPEN_BOOK,
    SHUFFLED_PASSAGES,
    AblationResult,
    EvalCondition,
    build_closed_book,
    build_corpus_condition,
    build_open_book,
    build_retriever_condition,
    describe_retrieval_benefit,
    iter_conditions,
    measure_condition,
)
from rag_model.evaluation.answers.abstaining import AbstentionReport, choose_threshold, measure_threshold
from rag_model.evaluation.answers.collapse import CollapseStats, measure_collapse, measure_unchanged
from rag_model.evaluation.answers.readings import Reading, describe_problems, produce_readings
from rag_model.evaluation.answers.routing import ConditionAnswerer, RoutedAnswers, RoutingReport
from rag_model.evaluation.answers.scores import check_gold_answers, get_deciding_measure
from rag_model.evaluation.answers.settings import EvaluationSettings
from rag_model.evaluation.bootstrap import Estimate
from rag_model.evaluation.questions import Question, QuestionSet
from rag_model.evaluation.retrieval.judging import (
    RetrievalJudge,
    RetrievalResult,
    compute_rank_metrics,
    retrieve,
    search_questions,
)
from rag_model.evaluation.retrieval.staged import ENCODER, PASSAGES, TimingSettings, time_stages
from rag_model.reading.concat import ConcatReader
from rag_model.reading.reader import Reader, ReaderName
from rag_model.retrieve.factory import open_retriever
from rag_model.retrieve.hits import Hit, Retriever
from rag_model.retrieve.indexes import get_index_kind, list_index_names
from rag_model.retrieve.retriever import QuestionEncoder, RankedRows, SnapshotRetriever
from rag_model.store.objects.memo import Record, StageResult
from rag_model.store.store import Store
from rag_model.store.versions.manifest import QUESTION_ENCODER
from rag_model.store.versions.snapshot import Snapshot
from rag_model.toml import from_table
from rag_model.untrusted_text import parse_json

ANSWER_STAGE = "answer"
# version of the code that determines an answer; a new number discards cached answers
ANSWERS_VERSION = 6
# Number of questions per cached record. They fill a batch of a generator, and a killed run loses at
# most the answers of one record.
_BATCH_SIZE = 32
_READINGS_FILE = "readings.jsonl"
# The arguments are the number of finished questions and the number of all questions.
ProgressCallback = Callable[[int, int], None]
# A corpus with more passages is never tried as a single prompt.
_MAX_WHOLE_PASSAGES = 2_000
_BM25_KIND = "bm25"
# Few queries are timed, because answering takes far longer than search.
_TIMING_SETTINGS = TimingSettings(questions=20, seconds=3.0)


@dataclass(frozen=True, slots=True)
class AnswerCache:
    """A function that answers questions in batches and caches the answers in the store.

    Answering is the main cost of an evaluation. If a run is killed, the next run continues from the
    cache. A run with other measures or more ablations reuses the cached answers. Only final answers
    are cached (`Reading.is_final`), so that the next run generates the others again.
    """

    store: Store
    reader: Reader  # called for every batch that is not cached
    # part of the cache key, such as snapshot, model and decoding settings
    inputs: Mapping[str, Any]

    def __call__(
        self, condition: EvalCondition, on_progress: ProgressCallback = lambda done, total: None
    ) -> list[Reading]:
        """Return the answers to all questions of a condition, in order."""
        reading_batches: list[list[Reading]] = []
        n = len(condition.questions)
        for batch_start in range(0, n, _BATCH_SIZE):
            batch = slice(batch_start, batch_start + _BATCH_SIZE)
            reading_batches.append(
                self._answer_batch(condition.questions[batch], condition.hits[batch], condition.other_retriever)
            )
            on_progress(min(batch_start + _BATCH_SIZE, n), n)
        return list(chain.from_iterable(reading_batches))

    def _answer_batch(
        self, questions: Sequence[Question], hits: Sequence[Sequence[Hit]], other_retriever: str
    ) -> list[Reading]:
        key_inputs = self._build_memo_key(questions, hits, other_retriever)
        new_readings: list[Reading] = []
        record = self.store.memo.find(ANSWER_STAGE, self.store.memo.compute_key(key_inputs))
        if record is None:
            new_readings = produce_readings(self.reader, questions, hits)
            final_readings = [reading for reading in new_readings if reading.is_final]
            if not final_readings:
                return new_readings
            write_readings = partial(_write_readings, final_readings)
            record, _ = self.store.memo.get_or_create(ANSWER_STAGE, key_inputs, write_readings)
        reading_by_question = {reading.question: reading for reading in (*new_readings, *self._load_readings(record))}
        is_missing = [question.id not in reading_by_question for question in questions]
        if any(is_missing):
            missing_questions, missing_hits = list(compress(questions, is_missing)), list(compress(hits, is_missing))
            missing_readings = self._answer_batch(missing_questions, missing_hits, other_retriever)
            reading_by_question |= {reading.question: reading for reading in missing_readings}
        return [reading_by_question[question.id] for question in questions]

    def _build_memo_key(
        self, questions: Sequence[Question], hits: Sequence[Sequence[Hit]], other_retriever: str
    ) -> dict[str, Any]:
        """Return the memo key of a batch.

        The key omits the scores of hits, because the other parts of the key determine the scores.
        """
        query_keys = [
            [question.id, question.text, [hit.passage.hash for hit in question_hits]]
            for question, question_hits in zip(questions, hits, strict=True)
        ]
        return {
            **self.inputs,
            "version": ANSWERS_VERSION,
            "asked": query_keys,
            **({"rival": other_retriever} if other_retriever else {}),
        }

    def _load_readings(self, record: Record) -> list[Reading]:
        path = self.store.blobs.get_local_path(record.outputs[_READINGS_FILE])
        try:
            with path.open(encoding="utf-8") as lines:
                return [from_table(Reading, parse_json(line, finite=False), "a reading") for line in lines]
        except (ValueError, UsageError) as error:
            raise StoreError(
                f"the cached answers memo/{ANSWER_STAGE}/{record.key[:12]}… in {self.store.url} "
                f"cannot be read ({error}): delete that record and run again"
            ) from error


def _write_readings(readings: Sequence[Reading], folder: Path) -> StageResult:
    json_lines = (json.dumps(asdict(reading), ensure_ascii=False, allow_nan=False) for reading in readings)
    path = folder / _READINGS_FILE
    path.write_text("".join(f"{json_line}\n" for json_line in json_lines), encoding="utf-8")
    return StageResult({_READINGS_FILE: path}, {"answers": len(readings)})


@dataclass(frozen=True, slots=True)
class WholeCorpus:
    """All passages of a corpus, for a reader whose prompt is long enough for them."""

    reader: str = ""  # name of the reader
    hits: tuple[Hit, ...] = ()  # all passages, in the order of the corpus
    # Sentence that says why the corpus is not read; empty if it is read or was not requested.
    note: str = ""


def open_other_retrievers(
    snapshot: Snapshot, store: Store, own_expression: str | None, encoder: QuestionEncoder | None
) -> dict[str, SnapshotRetriever]:
    """Return the retrievers to compare with the model's own retriever, by name of their condition.

    Lewis et al. 2020 (table 6) train RAG with a frozen retriever and with BM25 and report EM 41.2
    and 31.8 instead of 44.0 on Natural Questions. Here the model is not changed, but reads
    the passages of another retriever. This shows the gain from training the question encoder, and
    whether BM25 would be sufficient. The passage weights p(z|x) are still computed from inner
    products with the model's question encoder, whereas the paper uses BM25 scores for BM25.

    Args:
        snapshot: the snapshot to search; a retriever whose index it does not have is omitted.
        store: the store with the models that retriever expressions name.
        own_expression: expression of the reader's retriever; None means the snapshot's default.
        encoder: question encoder of a model that weights passages by inner products; None if the
            model does not weight passages.
    """
    reader_expression = own_expression or snapshot.manifest.content.default_retriever
    has_encoder = encoder is not None
    retrievers: dict[str, SnapshotRetriever] = {}
    bm25_index = next(
        (name for name in list_index_names(snapshot) if get_index_kind(snapshot, name) == _BM25_KIND), None
    )
    if bm25_index is not None and bm25_index != reader_expression:
        retrievers[BM25] = open_retriever(
            snapshot, bm25_index, embeddings_encoder=encoder, store=store, products=has_encoder
        )
    if has_encoder and any(path.startswith(f"{QUESTION_ENCODER}/") for path in snapshot.manifest.content.files):
        retrievers[FROZEN_RETRIEVER] = open_retriever(snapshot, reader_expression, store=store, products=True)
    return retrievers


def prepare_whole_corpus(
    readers: Mapping[ReaderName, Reader], retriever: SnapshotRetriever, questions: Sequence[str]
) -> WholeCorpus:
    """Return all passages if they fit into a prompt of the reader `concat`, else say why not."""
    n = retriever.snapshot.n
    name, reader = next(
        ((name, reader) for name, reader in readers.items() if isinstance(reader, ConcatReader)), ("", None)
    )
    if n > _MAX_WHOLE_PASSAGES:
        return WholeCorpus(note=f"the whole corpus was not read: {n:,} passages do not fit into one prompt")
    if reader is None:
        reader_names = ", ".join(readers)
        return WholeCorpus(
            note=f"the whole corpus was not read: {reader_names} does not read one prompt; add --reader concat"
        )
    if hits := list_whole_corpus(reader, retriever, questions):
        return WholeCorpus(name, tuple(hits))
    return WholeCorpus(note=f"the whole corpus was not read: its {n:,} passages do not fit into a prompt of {name}")


def list_whole_corpus(reader: ConcatReader, retriever: SnapshotRetriever, questions: Sequence[str]) -> list[Hit]:
    """Return all passages in corpus order; an empty list if they do not fit into one prompt."""
    n = retriever.snapshot.n
    hits = retriever.build_hits(RankedRows("", np.arange(n)[None], np.zeros((1, n), np.float32)))[0]
    try:
        context = reader.build_context(max(questions, key=len), hits)
    except UsageError:
        return []
    included_positions = {position for entry in context.entries for position in entry.places}
    is_missing = (
        position not in included_positions and bool(hit.passage.text.strip()) for position, hit in enumerate(hits)
    )
    return [] if any(is_missing) or any(entry.cut for entry in context.entries) else hits


class AnswerEvaluation:
    """The evaluation of one model: call `retrieve`, answer each condition, then get `results`."""

    def __init__(
        self,
        retriever: Retriever,
        answers: ConditionAnswerer,
        question_set: QuestionSet,
        k: int,
        corpus_size: int,
        settings: EvaluationSettings | None = None,
        other_answers: Mapping[str, ConditionAnswerer] | None = None,
        other_retrievers: Mapping[str, Retriever] | None = None,
        whole_corpus: WholeCorpus | None = None,
    ) -> None:
        """Check the questions and prepare the evaluation.

        Args:
            retriever: the retriever, with the model's question encoder.
            answers: the function that answers with the same model.
            question_set: the questions, with gold answers.
            k: number of passages per answer, at most the size of the corpus.
            corpus_size: number of passages in the corpus.
            settings: all other settings.
            other_answers: functions that answer from the same passages with other readers, by name.
            other_retrievers: other retrievers by name of their condition; used only with ablations.
            whole_corpus: all passages and the reader whose prompt can contain them; used only with
                ablations.

        Raises:
            UsageError: no question has an answer of kind `settings.kind`, or a question has no
                relevance judgement.
            InputError: an answer pattern is not a regular expression.
        """
        self.settings = settings or EvaluationSettings()
        check_gold_answers(question_set.questions, self.settings.kind)
        self.judge = RetrievalJudge.for_questions(
            question_set, self.settings.judged_by, patterns=self.settings.kind == "patterns"
        )
        self.question_set, self.corpus_size, self.k = question_set, corpus_size, min(k, corpus_size)
        self.depth = min(self.settings.search_depth(self.k), corpus_size)
        self.retrievals: list[RetrievalResult] = []
        self.results: list[AblationResult] = []
        # milliseconds per question by stage of retrieval; empty until `retrieve` was called
        self.search_milliseconds: dict[str, float] = {}
        self._retriever = retriever
        self._answer_functions = {"": answers, **(other_answers or {})}
        self._other_retrievers = (other_retrievers or {}) if self.settings.ablations else {}
        self._whole_corpus = (whole_corpus or WholeCorpus()) if self.settings.ablations else WholeCorpus()
        self._other_hits: dict[str, list[list[Hit]]] = {}

    def retrieve(self, on_progress: ProgressCallback = lambda done, total: None) -> None:
        """Retrieve the passages of every question for all conditions, and time the stages."""
        questions = self.question_set.questions
        retrieval_results = retrieve(self._retriever, questions, self.depth, patterns=self.settings.kind == "patterns")
        for retrieval_result in retrieval_results:
            self.retrievals.append(retrieval_result)
            on_progress(len(self.retrievals), len(questions))
        texts = [question.text for question in questions]
        self._other_hits = {
            name: search_questions(retriever, questions, self.k) for name, retriever in self._other_retrievers.items()
        }
        if isinstance(self._retriever, SnapshotRetriever):
            timings = time_stages([self._retriever], texts, self.k, _TIMING_SETTINGS)[0]
            encoder_ms = {ENCODER: sum(timings.encoders.values())} if timings.encoders else {}
            self.search_milliseconds = {**encoder_ms, **timings.stages, PASSAGES: timings.passages}

    def list_conditions(self) -> list[EvalCondition]:
        """Return the conditions to answer, beginning with the open book; call `retrieve` first."""
        ablations = self.settings.ablations
        open_book = build_open_book(self.retrievals, self.k)
        reader_conditions = [
            replace(open_book, name=f"{name}, {OPEN_BOOK}", reader=name) for name in self._answer_functions if name
        ]
        retriever_conditions = [
            build_retriever_condition(name, open_book.questions, hits, open_book.k)
            for name, hits in self._other_hits.items()
        ]
        corpus = self._whole_corpus
        reader = corpus.reader if corpus.reader in self._answer_functions else ""
        corpus_conditions = [build_corpus_condition(open_book.questions, corpus.hits, reader)] if corpus.hits else []
        ablation_conditions = list(iter_conditions(self.retrievals, self.k, ablations)) if ablations else []
        if not ablations and self._routed_answers is not None:
            ablation_conditions = [build_closed_book(self.retrievals)]
        return [open_book, *reader_conditions, *ablation_conditions, *retriever_conditions, *corpus_conditions]

    def answer_condition(
        self, condition: EvalCondition, on_progress: ProgressCallback = lambda done, total: None
    ) -> AblationResult:
        """Answer a condition's questions, measure the answers, and append them to `results`."""

        def answer_questions(condition: EvalCondition) -> list[Reading]:
            return self._answer_functions[condition.reader](condition, on_progress)

        open_book = self.results[0] if self.results else None
        result = measure_condition(condition, answer_questions, self.settings.kind, open_book, self.settings.resampling)
        self.results.append(result)
        return result

    @property
    def _skips_retrieval(self) -> bool:
        return self.settings.kind == "labels" and self.judge.judged_by == "answers"

    @property
    def _measured_depth(self) -> int:
        return min(self.settings.depth, self.corpus_size)

    @property
    def retrieval(self) -> dict[str, float]:
        """The mean of each retrieval measure, such as Success@k.

        It is empty if passages are judged by answers and the answers are labels, because passages
        do not contain labels.
        """
        return {} if self._skips_retrieval else self.judge.compute_means(self.retrievals, self._measured_depth)

    @property
    def intervals(self) -> dict[str, Estimate]:
        """The confidence intervals of the measures of `retrieval`."""
        if self._skips_retrieval:
            return {}
        return self.judge.estimate_measures(self.retrievals, self._measured_depth, self.settings.resampling)

    def list_question_values(self) -> dict[str, Sequence[float | None]]:
        """Return the values of the retrieval and open-book measures, one per question, in order.

        A value is None if the measure does not apply to the question.
        """
        measures = [
            *self.judge.list_measures(self._measured_depth),
            *self.judge.list_rank_measures(self._measured_depth),
        ]
        retrieval = {} if self._skips_retrieval else self.judge.compute_values(self.retrievals, measures)
        answers = self.results[0].scored_answers
        measure_names = dict.fromkeys(name for answer in answers for name in answer.measures)
        return {**retrieval, **{name: [answer.measures.get(name) for answer in answers] for name in measure_names}}

    @property
    def ranks(self) -> dict[str, float]:
        """The metrics of `compute_rank_metrics`, except those that `retrieval` or the answers also have.

        For example, the answers have the R-precision of the passages that were read. RR@k is
        included only if passages are judged by answers, and these are not labels.
        """
        ranks = compute_rank_metrics(self.retrievals, self._measured_depth)
        has_answer_ranks = self.judge.judged_by == "answers" and not self._skips_retrieval
        measures = {*self.retrieval, *self.results[0].metrics}
        return {
            name: rank
            for name, rank in ranks.items()
            if name not in measures and (has_answer_ranks or not name.startswith("RR@"))
        }

    @property
    def stages(self) -> dict[str, float]:
        """Milliseconds per question of each stage of search and open-book answering, in order."""
        return {
            **self.search_milliseconds,
            **{name: 1000 * seconds for name, seconds in self.results[0].stages.items()},
        }

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the report: problems of the open-book answers, the chosen route, which
        reader the ablations use, and why the whole corpus was not read.
        """
        problem_notes = (
            describe_problems([answer.reading for answer in self.results[0].scored_answers]) if self.results else []
        )
        other_readers = [name for name in self._answer_functions if name]
        note_template = (
            "the ablations and the sweep over k use the first reader; the others ({}) answer the open book{}"
        )
        whole_corpus_phrase = (
            f", and {self._whole_corpus.reader} the whole corpus too"
            if self._whole_corpus.reader in other_readers
            else ""
        )
        ablation_note = (
            note_template.format(", ".join(other_readers), whole_corpus_phrase)
            if other_readers and self.settings.ablations
            else ""
        )
        routing_note = "" if self.routing is None else str(self.routing)
        notes = (*problem_notes, routing_note, ablation_note, self._whole_corpus.note)
        return tuple(note for note in notes if note)

    @property
    def n_provisional_answers(self) -> int:
        """The number of answers, in all conditions, that the next run generates again."""
        return sum(not answer.reading.is_final for result in self.results for answer in result.scored_answers)

    @property
    def retrieval_worth(self) -> str:
        """A sentence about whether retrieval is worth its cost."""
        measure = get_deciding_measure(self.settings.kind)
        return describe_retrieval_benefit(self.results, measure, self.search_milliseconds)

    @property
    def abstention(self) -> AbstentionReport | None:
        """Coverage and risk of the open-book answers; None if the settings ask for no threshold."""
        measure, scored_answers = get_deciding_measure(self.settings.kind), self.results[0].scored_answers
        if self.settings.threshold is not None:
            return measure_threshold(scored_answers, measure, self.settings.threshold)
        return None if self.settings.risk is None else choose_threshold(scored_answers, measure, self.settings.risk)

    @property
    def routing(self) -> RoutingReport | None:
        """The report on the routing rule of the reader `auto`; None if `auto` is not evaluated."""
        return None if self._routed_answers is None else self._routed_answers.report

    @property
    def _routed_answers(self) -> RoutedAnswers | None:
        return next(
            (answers for answers in self._answer_functions.values() if isinstance(answers, RoutedAnswers)), None
        )

    @property
    def collapse(self) -> CollapseStats:
        """Statistics of the open-book passages and answers, from which a collapse is detected."""
        passage_ids = [[hit.passage.id for hit in result.hits[: self.k]] for result in self.retrievals]
        answers_by_name = {
            result.name: [answer.reading.answer for answer in result.scored_answers] for result in self.results
        }
        unchanged = (
            measure_unchanged(answers_by_name[OPEN_BOOK], answers_by_name[SHUFFLED_PASSAGES])
            if SHUFFLED_PASSAGES in answers_by_name
            else None
        )
        return measure_collapse(passage_ids, self.corpus_size, unchanged)
