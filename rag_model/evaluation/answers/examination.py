"""One model on one set of questions: retrieve once, answer under each condition, measure the use of passages.

>>> examination = Examination(retriever, answering, asked, k=5, corpus=snapshot.n)  # doctest: +SKIP
>>> examination.retrieve()  # doctest: +SKIP
>>> for condition in examination.conditions():  # doctest: +SKIP
...     examination.answer(condition)
>>> examination.rows[0].figures["EM"], examination.collapse.reason()  # doctest: +SKIP
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rag_model.evaluation.answers.ablation import (
    OPEN,
    SHUFFLED,
    Condition,
    Row,
    conditions,
    measure,
    open_book,
    rival_book,
    whole_book,
)
from rag_model.evaluation.answers.abstaining import Abstaining, choose
from rag_model.evaluation.answers.abstaining import measure as measure_threshold
from rag_model.evaluation.answers.answering import Answering
from rag_model.evaluation.answers.collapse import Collapse, unchanged_share
from rag_model.evaluation.answers.collapse import measure as measure_collapse
from rag_model.evaluation.answers.price import worth
from rag_model.evaluation.answers.readings import Reading
from rag_model.evaluation.answers.rivals import Whole
from rag_model.evaluation.answers.scores import check_golds, right_by
from rag_model.evaluation.answers.settings import Evaluation
from rag_model.evaluation.bootstrap import Estimate
from rag_model.evaluation.questions.files import QuestionSet
from rag_model.evaluation.retrieval.judging import Judge, ranks_of
from rag_model.evaluation.retrieval.retrieved import Retrieved, ask
from rag_model.evaluation.retrieval.staged import ENCODER, PASSAGES
from rag_model.evaluation.retrieval.timing import Timing, time_stages
from rag_model.retrieve.found import SnapshotRetriever
from rag_model.retrieve.retriever import Hit, Retriever

Tell = Callable[[int, int], None]  # done, total
_TIMING = Timing(questions=20, seconds=3.0)  # asked one by one: answering takes far longer


def _silent(done: int, total: int) -> None:
    """Ignore the progress."""


class Examination:
    """The evaluation of one model, step by step."""

    def __init__(
        self,
        retriever: Retriever,
        answering: Answering,
        asked: QuestionSet,
        k: int,
        corpus: int,
        settings: Evaluation | None = None,
        beside: Mapping[str, Answering] | None = None,
        rivals: Mapping[str, Retriever] | None = None,
        whole: Whole | None = None,
    ) -> None:
        """Prepare to ask.

        Args:
            retriever: with the model's question encoder.
            answering: with the same model.
            asked: the questions, with answers.
            k: passages that a question is answered from; all where the corpus has fewer.
            corpus: passages that there are.
            settings: everything else.
            beside: other readers, by name, which answer from the same passages.
            rivals: other retrievers, by the name of their condition; asked with the ablations.
            whole: every passage, and the reader that has room for all at once; read with the ablations.

        Raises:
            UsageError: no question has an answer of the kind that the settings name, or one names nothing to judge by.
            InputError: an answer is no regular expression, where they are patterns.
        """
        self.settings = settings or Evaluation()
        check_golds(asked.questions, self.settings.kind)
        self.judge = Judge.of(asked, self.settings.judged_by, patterns=self.settings.kind == "patterns")
        self.asked, self.corpus, self.k = asked, corpus, min(k, corpus)
        self.depth = min(self.settings.deepest(self.k), corpus)
        self.outcomes: list[Retrieved] = []
        self.rows: list[Row] = []
        self.search: dict[str, float] = {}  # milliseconds a question of each stage of retrieval, once retrieved
        self._retriever = retriever
        self._answering: Mapping[str, Answering] = {"": answering, **(beside or {})}
        self._rivals = (rivals or {}) if self.settings.ablations else {}
        self._whole = (whole or Whole()) if self.settings.ablations else Whole()
        self._rival_hits: dict[str, list[list[Hit]]] = {}

    def retrieve(self, tell: Tell = _silent) -> None:
        """Search every question, as deep as its conditions need; by its rivals too, and time the stages."""
        questions = self.asked.questions
        found = ask(self._retriever, questions, self.depth, patterns=self.settings.kind == "patterns")
        for outcome in found:
            self.outcomes.append(outcome)
            tell(len(self.outcomes), len(questions))
        texts = [question.text for question in questions]
        self._rival_hits = {name: one.search(texts, self.k) for name, one in self._rivals.items()}
        if isinstance(self._retriever, SnapshotRetriever):
            costs = time_stages([self._retriever], texts, self.k, _TIMING)[0]
            encoding = {ENCODER: sum(costs.encoders.values())} if costs.encoders else {}
            self.search = {**encoding, **costs.stages, PASSAGES: costs.passages}

    def conditions(self) -> list[Condition]:
        """Return what to answer under, the open book first; call `retrieve` before."""
        book, ablations = open_book(self.outcomes, self.k), self.settings.ablations
        readers = [replace(book, name=f"{name}, {OPEN}", reader=name) for name in self._answering if name]
        rivals = [rival_book(name, book.questions, hits, book.k) for name, hits in self._rival_hits.items()]
        by = self._whole.reader if self._whole.reader in self._answering else ""
        whole = [whole_book(book.questions, self._whole.hits, by)] if self._whole.hits else []
        ablated = conditions(self.outcomes, self.k, ablations) if ablations else ()
        return [book, *readers, *ablated, *rivals, *whole]

    def answer(self, condition: Condition, tell: Tell = _silent) -> Row:
        """Answer a condition's questions, measure the answers, and keep the row."""

        def answered(one: Condition) -> list[Reading]:
            return self._answering[one.reader](one, tell)

        book = self.rows[0] if self.rows else None
        row = measure(condition, answered, self.settings.kind, book, self.settings.resampling)
        self.rows.append(row)
        return row

    @property
    def _nowhere(self) -> bool:
        return self.settings.kind == "labels" and self.judge.by == "answers"

    @property
    def _measured(self) -> int:
        return min(self.settings.depth, self.corpus)

    @property
    def retrieval(self) -> dict[str, float]:
        """Return how often retrieval finds an answer: Success@k; empty for labels, which no passage holds."""
        return {} if self._nowhere else self.judge.means(self.outcomes, self._measured)

    @property
    def intervals(self) -> dict[str, Estimate]:
        """Return the confidence intervals of retrieval's figures; empty for labels."""
        if self._nowhere:
            return {}
        return self.judge.intervals(self.outcomes, self._measured, self.settings.resampling)

    def values(self) -> dict[str, Sequence[float | None]]:
        """Return each measure of each question, in order, retrieval's and the open book's; None: it does not apply."""
        names = [*self.judge.measures(self._measured), *self.judge.ranks(self._measured)]
        found = {} if self._nowhere else self.judge.values(self.outcomes, names)
        scored = self.rows[0].scored
        measured = dict.fromkeys(name for one in scored for name in one.measures)
        return {**found, **{name: [one.measures.get(name) for one in scored] for name in measured}}

    @property
    def ranks(self) -> dict[str, float]:
        """Return `ranks_of` the outcomes; for labels only the figures from evidence."""
        ranks = ranks_of(self.outcomes, self._measured)
        return {name: value for name, value in ranks.items() if self.settings.kind != "labels" or name[:3] != "RR@"}

    @property
    def stages(self) -> dict[str, float]:
        """Return the milliseconds a question of each stage between the open book's questions and answers, in order."""
        return {**self.search, **{name: 1000 * seconds for name, seconds in self.rows[0].stages.items()}}

    @property
    def notes(self) -> tuple[str, ...]:
        """Return sentences about the ablations: of several readers whose they are, and what was left out and why."""
        others = [name for name in self._answering if name]
        said = "the ablations, and the sweep over k, are of the first reader; of others ({}) there is the open book{}"
        read = f", and of {self._whole.reader} the whole corpus" if self._whole.reader in others else ""
        whose = said.format(", ".join(others), read) if others and self.settings.ablations else ""
        return tuple(one for one in (whose, self._whole.missing) if one)

    @property
    def worth(self) -> str:
        """Return `price.worth` of what was answered."""
        return worth(self.rows, right_by(self.settings.kind), self.search)

    @property
    def abstaining(self) -> Abstaining | None:
        """Return the threshold that the open book chooses, or what a given one does; None: neither is asked for."""
        right, scored = right_by(self.settings.kind), self.rows[0].scored
        if self.settings.threshold is not None:
            return measure_threshold(scored, right, self.settings.threshold)
        return None if self.settings.risk is None else choose(scored, right, self.settings.risk)

    @property
    def collapse(self) -> Collapse:
        """Return how varied the open book's passages are, and how many answers stay the same if they are shuffled."""
        given = [[hit.passage.id for hit in outcome.hits[: self.k]] for outcome in self.outcomes]
        said = {row.name: [one.reading.answer for one in row.scored] for row in self.rows}
        shuffled = unchanged_share(said[OPEN], said[SHUFFLED]) if SHUFFLED in said else None
        return measure_collapse(given, self.corpus, shuffled)
