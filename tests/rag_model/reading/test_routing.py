"""The reader `auto` with a writer whose log-likelihoods are known: -4 closed book, -0.5 with a passage."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rag_model.corpus.records import Passage
from rag_model.errors import InputError, UsageError
from rag_model.generate.decoding import DecodingSettings
from rag_model.reading.answer import answer_json
from rag_model.reading.concat import ConcatReader
from rag_model.reading.confidence import AbstainingReader, Threshold
from rag_model.reading.model import ReadingModel, check_route
from rag_model.reading.reader import AnswerCallbacks
from rag_model.reading.routing import AutoReader, Route, identify_model
from rag_model.reading.settings import PromptSettings, ReaderSettings
from rag_model.reading.writers.writer import Completion, Prompt
from rag_model.retrieve.hits import Hit
from tests.fixtures.citing_writer import CitingWriter
from tests.fixtures.tiny_generators import save_llama

QUESTIONS = ["what is Rome?", "who wrote it?"]  # the writer's answer to the first is in the prompt
CLOSED_BOOK_SCORES = [-0.5 / 2, -4.0 / 2]  # per token
PASSAGE = "by George Orwell"


class RecordingRetriever:
    """Records its queries and returns the same passage for each."""

    def __init__(self) -> None:
        self.queries: list[str] = []
        self.k = 0

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        self.queries += queries
        self.k = k
        passage = Passage("1-0", "1", 1, "T", "", PASSAGE, 0, 3, Passage.hash_of("T", PASSAGE))
        return [[Hit(1, 0.5, 0, passage, "", "")] for _ in queries]


class StreamingWriter(CitingWriter):
    """A writer that calls `on_text`."""

    def write(self, prompts: Sequence[Prompt], should_stop: Any = None, on_text: Any = None) -> list[Completion]:
        completions = super().write(prompts)
        for row, completion in enumerate(completions if on_text else []):
            on_text(row, completion.text)
        return completions


def build_auto_reader(route: Route, writer: CitingWriter | None = None) -> tuple[AutoReader, RecordingRetriever]:
    retriever: Any = RecordingRetriever()
    return AutoReader(ConcatReader(retriever, writer or StreamingWriter(), k=1), route), retriever


@pytest.mark.parametrize(
    ("route", "memories", "queries"),
    [
        (Route("weights", -1.0), ["weights", "passages"], QUESTIONS[1:]),
        (Route("weights", -9.0), ["weights", "weights"], []),
        (Route("weights", None), ["passages", "passages"], QUESTIONS),
        (Route("difference", 0.0), ["weights", "passages"], QUESTIONS),
        (Route("difference", 0.1), ["passages", "passages"], QUESTIONS),
    ],
)
def test_likely_closed_book_answer_needs_no_passages(route: Route, memories: list[str], queries: list[str]) -> None:
    reader, retriever = build_auto_reader(route)
    texts: list[tuple[int, str]] = []
    hit_lists: list[list[list[Hit]]] = []
    callbacks = AnswerCallbacks(on_text=lambda row, text: texts.append((row, text)), on_hits=hit_lists.append)
    answers = reader.answer(QUESTIONS, callbacks=callbacks)
    assert [answer.memory for answer in answers] == memories
    assert retriever.queries == queries
    assert [bool(hits) for hits in hit_lists[0]] == [question in queries for question in QUESTIONS]
    expected = {"weights": "Rome", "passages": "Orwell [1]."}
    assert [answer.text for answer in answers] == [expected[memory] for memory in memories]
    assert sorted(texts) == [(row, answer.text) for row, answer in enumerate(answers)]
    hits = RecordingRetriever().search(QUESTIONS, 1)
    assert [each.text for each in reader.answer_from(QUESTIONS, hits)] == [answer.text for answer in answers]
    difference = [score + 0.5 / 2 for score in CLOSED_BOOK_SCORES]
    scores = CLOSED_BOOK_SCORES if route.signal == "weights" else difference
    assert [answer.route and answer.route.score for answer in answers] == pytest.approx(scores)
    for answer, memory in zip(answers, memories, strict=True):
        assert bool(answer.support) == (memory == "passages")
        assert json.loads(json.dumps(answer_json(answer)))["memory"] == memory
        assert answer.usage is not None
        assert answer.usage.new_tokens == (2 if answer.question not in queries else 4)  # tokens of both answers
        assert ("search" in answer.seconds) == (answer.question in queries)
        assert "weights" in answer.seconds


@pytest.mark.parametrize(("k", "searched_k"), [(None, 1), (3, 3), (0, 0)])
def test_k_reaches_the_retriever(k: int | None, searched_k: int) -> None:
    reader, retriever = build_auto_reader(Route("weights", None))
    retriever.k = -1
    reader.answer(QUESTIONS, k)
    assert retriever.k == searched_k


def test_answers_name_the_memory() -> None:
    reader = ConcatReader(None, CitingWriter())
    hits = RecordingRetriever().search(["who?"], 1)
    (with_passage,), (closed_book,) = reader.answer_from(["who?"], hits), reader.answer_from(["who?"], [()])
    assert (with_passage.memory, closed_book.memory) == ("passages", "weights")
    blank = [replace(hits[0][0], passage=replace(hits[0][0].passage, text=" "))]
    assert reader.answer_from(["who?"], [blank])[0].memory == "weights"  # the prompt has no passage
    (withheld,) = AbstainingReader(reader, Threshold("likelihood", 0.0)).answer_from(["who?"], hits)
    assert withheld.memory is None


def test_withheld_closed_book_answer_is_not_searched() -> None:
    reader, retriever = build_auto_reader(Route("weights", -9.0))
    answers = AbstainingReader(reader, Threshold("likelihood", -1.0)).answer(QUESTIONS)
    assert [answer.abstained for answer in answers] == [False, True]
    assert retriever.queries == []


class WriterWithoutLikelihoods(CitingWriter):
    """Returns no likelihoods, like an endpoint without log probabilities."""

    def write(self, prompts: Sequence[Prompt], *arguments: Any) -> list[Completion]:
        return [replace(completion, log_likelihood=None) for completion in super().write(prompts)]


class ClosedBookMuteWriter(CitingWriter):
    """Returns an empty text without passages."""

    def write(self, prompts: Sequence[Prompt], *arguments: Any) -> list[Completion]:
        completions = super().write(prompts)
        pairs = zip(prompts, completions, strict=True)
        return [completion if "[1]" in prompt.user else replace(completion, text="") for prompt, completion in pairs]


@pytest.mark.parametrize("signal", ["weights", "difference"])
def test_closed_book_answer_needs_a_text_and_a_likelihood(signal: Any) -> None:
    with pytest.raises(UsageError, match="does not give the likelihood of its answers"):
        build_auto_reader(Route(signal, -9.0), WriterWithoutLikelihoods())[0].answer(QUESTIONS)
    reader, _ = build_auto_reader(Route(signal, -9.0), ClosedBookMuteWriter())
    assert [answer.memory for answer in reader.answer(QUESTIONS)] == ["passages"] * 2


def test_route_is_saved_and_belongs_to_its_model(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "llama")
    route, path = Route("weights", -0.25, identify_model(str(folder)), "concat"), tmp_path / "route.json"
    route.write(path, n=7)
    assert Route.read(path) == route
    assert json.loads(path.read_text())["n"] == 7
    assert route.explain_mismatch(str(folder), "concat") == ""
    assert "chosen for the reader concat" in route.explain_mismatch(str(folder), "marginal")
    (folder / "more.txt").write_text("x")
    settings = ReaderSettings("auto", route=route)
    with pytest.raises(UsageError, match="chosen for a model other than"):
        check_route(settings, str(folder))
    always_passages = Route("weights", None)
    always_passages.write(path)
    assert Route.read(path) == always_passages
    assert not always_passages.chooses_weights(math.inf)


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "null", '{"signal": "luck", "least": 1, "model": "", "reader": ""}', "\xff",
     '{"signal": "weights", "least": "x", "model": "", "reader": ""}',
     '{"signal": "weights", "least": 1e999, "model": "", "reader": ""}',
     '{"signal": "weights", "least": 1%s, "model": "", "reader": ""}' % ("0" * 400)],
)  # fmt: skip
def test_file_without_a_route_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "route.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match="contains no route"):
        Route.read(path)
    with pytest.raises(InputError, match="cannot be read"):
        Route.read(tmp_path / "nowhere.json")


def test_auto_uses_the_reader_of_the_model(tmp_path: Path) -> None:
    folder = str(save_llama(tmp_path / "llama"))
    settings = ReaderSettings("auto", DecodingSettings(max_new_tokens=2))
    assert settings.reader_for(folder) == settings.reader_for("openai:small") == "concat"
    assert settings.reader_for("reader@3") == "marginal"
    with pytest.raises(UsageError, match="omit --order, --budget, --prompt and --cite"):
        replace(settings, concat=PromptSettings(cite=True)).reader_for("reader@3")
    with pytest.raises(UsageError, match="needs passages"):
        replace(settings, threshold=Threshold("retrieval", 0.5)).reader_for(folder)
    with pytest.raises(UsageError, match="labels"):
        replace(settings, labels={"a": "a", "b": "b"}).reader_for(folder)
    reader = ReadingModel(folder).open_reader(None, settings, CitingWriter())
    assert isinstance(reader, AutoReader)
    assert reader.route == Route("difference", 0.0)
