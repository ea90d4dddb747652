"""Watch the drift of the generator, by its answers to fixed probe questions without passages.

What a model's weights know changes with a new version of the model, and a model behind an endpoint
may change without a new name. With the probe questions x_1..n, the recorded answers y_i, and the
answers y'_i of the model that is served now:

    same       = 1/n sum [y'_i = y_i]                                   (in SQuAD's normal form)
    difference = 1/n sum (log p_now(y_i|x_i) - log p_then(y_i|x_i)) / |y_i|      nats a token

`difference` is computed for the recorded answers, even if the model gives other answers now. If it
is negative, the recorded answers have become less likely, which may show a change before an answer
changes. A remote model does not return the likelihood of a given text, so for it there is only
`same`.

The first model of a service is the reference. The reference's answers are kept in a file in the
folder of the pulled snapshots, so that a later process compares with the same answers. For other
probe questions, another prompt or other decoding settings, there is another file. If the file is
deleted, the next answers become the reference.

A local model is asked once, after it has been loaded, and a remote model at intervals. The
questions are asked by one thread, of the lowest priority on one core, which starts with the first
model.
"""

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rag_model.atomic_write import atomic_write
from rag_model.digest import ALGORITHM, digest_json
from rag_model.errors import BookwheelError, StoppedError, UsageError
from rag_model.evaluation.measures.answers import normalise
from rag_model.reading.answer import Answer, TokenUsage, sum_usage
from rag_model.reading.reader import AnswerCallbacks, StopCheck
from rag_model.serving.answering.loaded_snapshot import ServedModel
from rag_model.serving.monitoring.overrides import can_check_overrides
from rag_model.serving.runtime import SupervisedThread, limit_compute_threads, set_lowest_priority
from rag_model.toml import from_table
from rag_model.untrusted_text import parse_json

_LOG = logging.getLogger(__name__)
MAX_PROBES = 32  # a model of 135 million parameters answers them in half a minute on one core
MIN_PROBES = 10  # with fewer probes, one changed answer would look like drift
_BATCH_QUESTIONS = 8  # number of questions between two checks whether another model is served


@dataclass(frozen=True, slots=True)
class ProbeMetrics:
    """The drift of the served generator from the recorded answers."""

    same: float  # share of equal answers
    # mean change of the log-likelihood in nats per token; None if the model gives no likelihoods
    difference: float | None


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """An answer without passages: the recorded answer, or the answer of the served model."""

    text: str
    log_likelihood: float | None  # log-likelihood of the text; None if unknown, or if it is empty
    tokens: int  # number of tokens of the text


def choose_probes(questions: Sequence[str]) -> list[str]:
    """Choose up to 32 distinct questions, evenly spread over the list, as the probe questions.

    Raises:
        UsageError: There are fewer than 10 distinct questions.
    """
    distinct_questions = list(dict.fromkeys(questions))
    if len(distinct_questions) < MIN_PROBES:
        raise UsageError(
            f"{len(distinct_questions)} different probe questions are too few to see drift of a "
            f"model: give at least {MIN_PROBES}"
        )
    n_probes, last_position = min(len(distinct_questions), MAX_PROBES), len(distinct_questions) - 1
    return [distinct_questions[i * last_position // (n_probes - 1)] for i in range(n_probes)]


def ask_probes(
    model: ServedModel, questions: Sequence[str], recorded_answers: Sequence[ProbeAnswer] | None, should_stop: StopCheck
) -> tuple[list[ProbeAnswer], list[float | None], TokenUsage | None]:
    """Answer questions without passages.

    Returns:
        The answers; the log-likelihoods of the recorded answers, or of the new answers if
        `recorded_answers` is None (for a remote model or an empty text, the log-likelihood is
        None); the numbers of tokens read and written.

    Raises:
        StoppedError: `should_stop` returned True.
        BookwheelError: A remote model could not be called.
    """
    reader: Any = model.create_likelihood_reader() if model.is_local else model.create_uncited_reader()
    answers: list[Answer] = []
    likelihoods: list[float | None] = []
    for i in range(0, len(questions), _BATCH_QUESTIONS):
        if should_stop():
            raise StoppedError("another model is served")
        batch = questions[i : i + _BATCH_QUESTIONS]
        batch_answers = reader.answer_from(batch, [()] * len(batch), AnswerCallbacks(should_stop))
        texts = [answer.plain for answer in batch_answers]
        if recorded_answers is not None:
            texts = [answer.text for answer in recorded_answers[i : i + _BATCH_QUESTIONS]]
        answers += batch_answers
        text_rows = [row for row, text in enumerate(texts) if text and model.is_local]
        likelihood_by_row = dict(
            zip(
                text_rows,
                reader.log_likelihood(
                    [batch[row] for row in text_rows], [()] * len(text_rows), [texts[row] for row in text_rows]
                ),
                strict=True,
            )
            if text_rows
            else ()
        )
        likelihoods += [likelihood_by_row.get(row) for row in range(len(batch))]
    probe_answers = [
        ProbeAnswer(
            answer.plain,
            likelihood if recorded_answers is None else None,
            1 if answer.usage is None else max(1, answer.usage.new_tokens),
        )
        for answer, likelihood in zip(answers, likelihoods, strict=True)
    ]
    return probe_answers, likelihoods, sum_usage(answer.usage for answer in answers)


def compare_probes(
    recorded_answers: Sequence[ProbeAnswer], answers: Sequence[ProbeAnswer], likelihoods: Sequence[float | None]
) -> ProbeMetrics:
    """Compare answers with the recorded answers; `likelihoods` are those of the recorded texts.

    >>> before = [ProbeAnswer("Rome.", -1.0, 2), ProbeAnswer("Paris", -0.5, 1)]
    >>> compare_probes(before, [ProbeAnswer("rome", None, 2), ProbeAnswer("Lyon", None, 1)], [-1.5, -1.5])
    ProbeMetrics(same=0.5, difference=-0.625)
    """
    answer_pairs = zip(recorded_answers, answers, strict=True)
    unchanged_share = sum(
        normalise(recorded_answer.text) == normalise(answer.text) for recorded_answer, answer in answer_pairs
    ) / len(recorded_answers)
    differences = [
        (likelihood - recorded_answer.log_likelihood) / recorded_answer.tokens
        for recorded_answer, likelihood in zip(recorded_answers, likelihoods, strict=True)
        if likelihood is not None and recorded_answer.log_likelihood is not None
    ]
    return ProbeMetrics(unchanged_share, math.fsum(differences) / len(differences) if differences else None)


class ProbeMonitor:
    """Asks the served model the probe questions. Thread-safe; methods take microseconds."""

    def __init__(
        self,
        questions: Sequence[str] = (),
        folder: Path | None = None,
        seconds: float = 3600.0,
        on_usage: Callable[[TokenUsage], None] = lambda usage: None,
    ) -> None:
        """Choose the probes with `choose_probes`; without questions, no model is monitored.

        Args:
            questions: The questions to choose from.
            folder: Folder for the file of recorded answers; None keeps them in memory.
            seconds: Time between two rounds of questions to a remote model.
            on_usage: Receives the tokens of each round.

        Raises:
            UsageError: See `choose_probes`.
        """
        self._questions = choose_probes(questions) if questions else []
        self._folder, self._seconds, self.on_usage = folder, seconds, on_usage
        # by digest of the probe questions and the settings; used if there is no folder
        self._recorded_answers: dict[str, list[ProbeAnswer]] = {}
        self._condition = threading.Condition()
        self._model: ServedModel | None = None
        self._metrics: ProbeMetrics | None = None
        self._next_time: float | None = None  # when the questions are due; None until a swap
        self._is_closed = False
        self._is_started = False
        self.thread = SupervisedThread("probes", self._run_monitor)

    def start_monitoring(self, model: ServedModel | None) -> None:
        """Monitor `model`, unless it is monitored already; with None, monitor no model."""
        with self._condition:
            if model is self._model:
                return
            self._model, self._metrics, self._next_time = model, None, None
            if model is not None and self._questions and can_check_overrides(model):
                self._next_time = 0.0
                if not self._is_started:
                    self._is_started = True
                    self.thread.start()
            self._condition.notify()

    def compute_metrics(self) -> ProbeMetrics | None:
        """Return the drift of the served model; None if it was not or cannot be measured."""
        with self._condition:
            return self._metrics

    def close(self) -> None:
        """Stop the thread; do not wait for a remote model."""
        with self._condition:
            self._is_closed, self._model = True, None
            self._condition.notify()
        self.thread.join()

    def _run_monitor(self) -> None:
        limit_compute_threads(1)
        set_lowest_priority()
        while (model := self._wait_for_round()) is not None:
            metrics = self._measure(model)
            with self._condition:
                if model is self._model:
                    self._metrics = metrics
                    # The weights of a local model do not change, so a round is repeated only if it
                    # failed.
                    is_done = model.is_local and metrics is not None
                    self._next_time = None if is_done else time.monotonic() + self._seconds
            del model  # do not keep an old model in memory while waiting

    def _wait_for_round(self) -> ServedModel | None:
        """Wait until the questions are due, and return the model; None if the monitor is closed."""
        with self._condition:
            while not self._is_closed:
                wait_seconds = None if self._next_time is None else self._next_time - time.monotonic()
                if self._model is not None and wait_seconds is not None and wait_seconds <= 0:
                    return self._model
                self._condition.wait(wait_seconds)
            return None

    def _measure(self, model: ServedModel) -> ProbeMetrics | None:
        """Ask a model, and compare its answers with the recorded answers; None if that fails."""
        try:
            settings = {"settings": asdict(model.settings.decoding), "prompt": asdict(model.settings.concat)}
            key = digest_json({"probes": self._questions, "reader": model.settings.reader_for(model.id), **settings})
            recorded_answers = self._read_recorded_answers(key)
            answers, likelihoods, token_usage = ask_probes(
                model, self._questions, recorded_answers, lambda: self._is_closed or self._model is not model
            )
            if token_usage is not None:
                self.on_usage(token_usage)
            if recorded_answers is None:
                self._record_answers(key, answers, model.id)
                recorded_answers = answers
            return compare_probes(recorded_answers, answers, likelihoods)
        except StoppedError:
            return None
        except BookwheelError as error:
            _LOG.warning("could not measure the drift of model %s, and will try again: %s", model.id, error)
        except BaseException:
            # includes the panic of a native library, which must not end the thread
            _LOG.exception("could not measure the drift of model %s", model.id)
        return None

    def _get_record_path(self, key: str) -> Path | None:
        name = f"probes-{key.removeprefix(f'{ALGORITHM}:')[:16]}.json"
        return None if self._folder is None else self._folder / name

    def _read_recorded_answers(self, key: str) -> list[ProbeAnswer] | None:
        """Return the recorded answers to these probe questions; None if there are none."""
        path = self._get_record_path(key)
        if path is None:
            return self._recorded_answers.get(key)
        try:
            record = parse_json(path.read_text(encoding="utf-8"))
            rows = [{name: row[name] for name in ("text", "log_likelihood", "tokens")} for row in record["answers"]]
            answers = [from_table(ProbeAnswer, row, "an answer") for row in rows]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, UsageError) as error:
            _LOG.warning("%s has no readable answers of probes (%s): it is replaced with new answers", path, error)
            return None
        return answers if len(answers) == len(self._questions) else None

    def _record_answers(self, key: str, answers: list[ProbeAnswer], model: str) -> None:
        """Record answers as the reference that later answers are compared with."""
        path = self._get_record_path(key)
        if path is None:
            self._recorded_answers[key] = answers
            return
        rows = [{"question": q, **asdict(answer)} for q, answer in zip(self._questions, answers, strict=True)]
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary_path:
            text = json.dumps({"model": model, "answers": rows}, ensure_ascii=False, indent=1)
            temporary_path.write_text(text + "\n", encoding="utf-8")
        _LOG.info("recorded the answers of model %s to %d probe questions in %s", model, len(rows), path)
