"""The reader `auto` over a writer whose likelihoods are known: 4 nats closed book, half a nat from a passage."""

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
from tests.fixtures.citing_writer import Quoting
from tests.fixtures.tiny_generators import save_llama

QUESTIONS = ["what is Rome?", "who wrote it?"]  # the writer is surer of a word that the prompt has
CLOSED_BOOK_SCORES = [-0.5 / 2, -4.0 / 2]  # nats by the two tokens of each answer
PASSAGE = "by George Orwell"


class Shelf:
    """A retriever that records its queries, and finds the same passage for all."""

    def __init__(self) -> None:
        self.queries: list[str] = []
        self.k = 0

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        self.queries += queries
        self.k = k
        passage = Passage("1-0", "1", 1, "T", "", PASSAGE, 0, 3, Passage.hash_of("T", PASSAGE))
        return [[Hit(1, 0.5, 0, passage, "", "")] for _ in queries]


class Streaming(Quoting):
    """A writer that passes on each text."""

    def write(self, prompts: Sequence[Prompt], should_stop: Any = None, on_text: Any = None) -> list[Completion]:
        written = super().write(prompts)
        for row, completion in enumerate(written if on_text else []):
            on_text(row, completion.text)
        return written


def auto(route: Route, writer: Quoting | None = None) -> tuple[AutoReader, Shelf]:
    shelf: Any = Shelf()
    return AutoReader(ConcatReader(shelf, writer or Streaming(), k=1), route), shelf


@pytest.mark.parametrize(
    ("route", "memories", "searched"),
    [
        (Route("weights", -1.0), ["weights", "passages"], QUESTIONS[1:]),
        (Route("weights", -9.0), ["weights", "weights"], []),
        (Route("weights", None), ["passages", "passages"], QUESTIONS),
        (Route("difference", 0.0), ["weights", "passages"], QUESTIONS),
        (Route("difference", 0.1), ["passages", "passages"], QUESTIONS),
    ],
)
def test_a_likely_answer_of_the_weights_needs_no_passages(
    route: Route, memories: list[str], searched: list[str]
) -> None:
    reader, shelf = auto(route)
    texts: list[tuple[int, str]] = []
    shown: list[list[list[Hit]]] = []
    answers = reader.answer(
        QUESTIONS, callbacks=AnswerCallbacks(on_text=lambda row, text: texts.append((row, text)), on_hits=shown.append)
    )
    assert [answer.memory for answer in answers] == memories
    assert shelf.queries == searched
    assert [bool(hits) for hits in shown[0]] == [question in searched for question in QUESTIONS]
    assert [answer.text for answer in answers] == [
        "Rome" if memory == "weights" else "Orwell [1]." for memory in memories
    ]
    assert sorted(texts) == [(row, answer.text) for row, answer in enumerate(answers)]
    hits = Shelf().search(QUESTIONS, 1)
    assert [one.text for one in reader.answer_from(QUESTIONS, hits)] == [answer.text for answer in answers]
    difference = [score + 0.5 / 2 for score in CLOSED_BOOK_SCORES]
    scores = CLOSED_BOOK_SCORES if route.signal == "weights" else difference
    assert [answer.route and answer.route.score for answer in answers] == pytest.approx(scores)
    for answer, memory in zip(answers, memories, strict=True):
        assert bool(answer.support) == (memory == "passages")
        assert json.loads(json.dumps(answer_json(answer)))["memory"] == memory
        assert answer.usage is not None
        assert answer.usage.new_tokens == (2 if answer.question not in searched else 4)  # those of both answers
        assert ("search" in answer.seconds) == (answer.question in searched)
        assert "weights" in answer.seconds


@pytest.mark.parametrize(("k", "searched_k"), [(None, 1), (3, 3), (0, 0)])
def test_the_number_of_passages_reaches_the_retriever_which_refuses_0(k: int | None, searched_k: int) -> None:
    reader, shelf = auto(Route("weights", None))
    shelf.k = -1
    reader.answer(QUESTIONS, k)
    assert shelf.k == searched_k


def test_every_reader_names_the_memory() -> None:
    reader = ConcatReader(None, Quoting())
    hits = Shelf().search(["who?"], 1)
    (read,), (closed_book,) = reader.answer_from(["who?"], hits), reader.answer_from(["who?"], [()])
    assert (read.memory, closed_book.memory) == ("passages", "weights")
    blank = [replace(hits[0][0], passage=replace(hits[0][0].passage, text=" "))]
    assert reader.answer_from(["who?"], [blank])[0].memory == "weights"  # the prompt has no passage
    (withheld,) = AbstainingReader(reader, Threshold("likelihood", 0.0)).answer_from(["who?"], hits)
    assert withheld.memory is None


def test_a_withheld_answer_of_the_weights_is_not_searched() -> None:
    reader, shelf = auto(Route("weights", -9.0))
    answers = AbstainingReader(reader, Threshold("likelihood", -1.0)).answer(QUESTIONS)
    assert [answer.abstained for answer in answers] == [False, True]
    assert shelf.queries == []


class Silent(Quoting):
    """A writer like an endpoint without log probabilities."""

    def write(self, prompts: Sequence[Prompt], *arguments: Any) -> list[Completion]:
        return [replace(one, log_likelihood=None) for one in super().write(prompts)]


class Mute(Quoting):
    """A writer that says nothing without passages."""

    def write(self, prompts: Sequence[Prompt], *arguments: Any) -> list[Completion]:
        written = super().write(prompts)
        pairs = zip(prompts, written, strict=True)
        return [one if "[1]" in prompt.user else replace(one, text="") for prompt, one in pairs]


@pytest.mark.parametrize("signal", ["weights", "difference"])
def test_an_answer_needs_a_text_and_a_likelihood(signal: Any) -> None:
    with pytest.raises(UsageError, match="does not give the likelihood of its answers"):
        auto(Route(signal, -9.0), Silent())[0].answer(QUESTIONS)
    assert [one.memory for one in auto(Route(signal, -9.0), Mute())[0].answer(QUESTIONS)] == ["passages"] * 2


def test_a_route_is_kept_in_a_file_and_belongs_to_its_model(tmp_path: Path) -> None:
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
    never = Route("weights", None)
    never.write(path)
    assert Route.read(path) == never
    assert not never.chooses_weights(math.inf)


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "null", '{"signal": "luck", "least": 1, "model": "", "reader": ""}', "\xff",
     '{"signal": "weights", "least": "x", "model": "", "reader": ""}',
     '{"signal": "weights", "least": 1e999, "model": "", "reader": ""}',
     '{"signal": "weights", "least": 1%s, "model": "", "reader": ""}' % ("0" * 400)],
)  # fmt: skip
def test_a_file_without_a_route_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "route.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match="contains no route"):
        Route.read(path)
    with pytest.raises(InputError, match="cannot be read"):
        Route.read(tmp_path / "nowhere.json")


def test_auto_reads_passages_as_the_model_does(tmp_path: Path) -> None:
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
    reader = ReadingModel(folder).open_reader(None, settings, Quoting())
    assert isinstance(reader, AutoReader)
    assert reader.route == Route("difference", 0.0)
