"""Which memory answered, live: a made world in which it is known of each answer; and the sample that is checked."""

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from rag_model.corpus.records import Passage
from rag_model.errors import UsageError
from rag_model.reading.answer import Answer, ContextEntry
from rag_model.reading.concat import ConcatReader
from rag_model.reading.settings import PromptSettings, ReaderSettings
from rag_model.retrieve.hits import Hit
from rag_model.serving.answering.served_model import ServedModel
from rag_model.serving.monitoring.metrics import ServiceMetrics
from rag_model.serving.monitoring.overrides import (
    LikelihoodChecker,
    OverrideCheck,
    OverrideChecker,
    OverrideMonitor,
    can_check_overrides,
    create_override_checker,
    is_remembered,
    is_repeated,
    is_unsupported,
)
from tests.fixtures.citing_writer import Quoting
from tests.fixtures.known_memories import (
    INVENTS,
    ONE_PROMPT,
    QUESTIONS,
    READS,
    REMEMBERS,
    World,
    make_world,
    said,
    town_of,
)
from tests.fixtures.scripted_server import Scripted, Step, event, hangs, replies, scripted, streams
from tests.fixtures.serving import PATIENCE, serving, until, with_limits
from tests.rag_model.serving.monitoring.test_metrics import scraped

APART, TOGETHER = ReaderSettings("marginal"), ReaderSettings("concat", concat=ONE_PROMPT)
UNHELD = len(REMEMBERS) + len(INVENTS)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("reading", [APART, TOGETHER], ids=["marginal", "concat"])
def test_a_service_counts_the_answers_that_memory_gives_over_the_passages(
    world: World, dest: Path, reading: ReaderSettings
) -> None:
    settings = with_limits(override_every=1)
    metrics = ServiceMetrics(settings)
    with serving(world.url, dest, settings, metrics, model=str(world.model), reader_settings=reading) as service:
        reply = service.client.post("/answer", json={"questions": QUESTIONS, "k": 2}).json()
        until(lambda: scraped(metrics)["bookwheel_answers_sampled_total"] == len(QUESTIONS))
        seen = scraped(metrics)
    likeliest = [max(some, key=lambda one: some[one]) for some in (said(one, world.hits[one]) for one in QUESTIONS)]
    assert [one["answer"] for one in reply["answers"]] == likeliest
    assert seen["bookwheel_answers_total given"] == len(READS) + UNHELD
    assert seen["bookwheel_answers_unsupported_total"] == UNHELD
    assert seen["bookwheel_answers_override_total"] == len(REMEMBERS)
    for stage in ("search", "assembly", "generation"):
        assert seen[f"bookwheel_answer_stage_seconds_count {stage}"] == len(QUESTIONS)


def test_what_only_the_passages_make_likely_is_no_override(world: World) -> None:
    """In this world the probabilities are known, too."""
    model = ServedModel.load(None, str(world.model), APART)
    assert model.has_likelihoods
    reader = model.model.open_reader(None, APART)
    answers = reader.answer_from(QUESTIONS, [world.hits[one] for one in QUESTIONS])
    unheld = [answer for answer in answers if is_unsupported(answer)]
    assert [one.question[0] for one in unheld] == [*REMEMBERS, *INVENTS]
    assert [is_remembered(model.create_likelihood_reader(), one) for one in unheld] == [True] * len(REMEMBERS) + [
        False
    ] * len(INVENTS)


def wrote(text: str) -> Step:
    """Send an answer that took 7 tokens to read and 2 to write."""
    return streams(event(text), event("", "stop", usage={"prompt_tokens": 7, "completion_tokens": 2}))


def test_an_endpoint_is_asked_closed_book_what_no_passage_supports(
    world: World, dest: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It repeats one answer, gives another one than before, is not asked for a third, and fails twice."""
    settings = with_limits(override_every=1)
    metrics = ServiceMetrics(settings)
    answered = [wrote("mow [1]."), wrote("xer"), wrote(town_of(world.hits["a?"])), wrote("now"), wrote("now")]
    checked = [wrote("The Mow"), wrote("pij"), None, replies(400), replies(400)]
    steps = [step for both in zip(answered, checked, strict=True) for step in both if step]
    with scripted(*steps) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        reading = ReaderSettings(concat=PromptSettings(cite=True))
        with serving(world.url, dest, settings, metrics, model="openai:tiny", reader_settings=reading) as service:
            for number, question in enumerate(("m?", "x?", "a?", "n?", "n?"), start=1):
                assert service.client.post("/answer", json={"questions": [question], "k": 2}).status_code == 200
                until(partial(are_checked, metrics, number))
            seen = scraped(metrics)
    assert (seen["bookwheel_answers_unsupported_total"], seen["bookwheel_answers_sampled_total"]) == (4, 3)
    assert (seen["bookwheel_answers_override_total"], seen["bookwheel_answers_unchecked_total"]) == (1, 2)
    kinds = ("answer read", "answer written", "check read", "check written")
    tokens = {kind: seen["bookwheel_tokens_total " + " ".join(reversed(kind.split()))] for kind in kinds}
    assert tokens == {"answer read": 35, "answer written": 10, "check read": 14, "check written": 4}
    asked, again = (server.bodies[place] for place in (0, 1))
    closed, alone = PromptSettings(cite=True).system(closed=True), PromptSettings().user("", "m?")
    assert again["messages"] == [{"role": "system", "content": closed}, {"role": "user", "content": alone}]
    assert {**asked, "messages": []} == {**again, "messages": []}
    assert again["temperature"] == 0
    assert caplog.text.count("was not checked") == 1


def are_checked(metrics: ServiceMetrics, number: int) -> bool:
    """Return whether so many sampled answers are done with."""
    seen = scraped(metrics)
    return seen["bookwheel_answers_sampled_total"] + seen["bookwheel_answers_unchecked_total"] == number


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Scripted, OverrideChecker]]:
    """An endpoint that takes the question, and says nothing."""
    with scripted(hangs()) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        behind = ServedModel.load(None, "openai:tiny", ReaderSettings())
        yield server, create_override_checker(behind)
        behind.close()


def test_an_endpoint_that_says_nothing_is_given_up(silent: tuple[Scripted, OverrideChecker]) -> None:
    found: list[OverrideCheck | None] = []
    overrides = OverrideMonitor(1, found.append, seconds=0.2)
    overrides.record_answer(lambda: silent[1], answer(), unsupported=True)
    until(lambda: found == [None])
    overrides.close()


def test_the_end_of_a_service_does_not_wait_for_an_endpoint(silent: tuple[Scripted, OverrideChecker]) -> None:
    found: list[OverrideCheck | None] = []
    overrides = OverrideMonitor(1, found.append, seconds=10 * PATIENCE)
    overrides.record_answer(lambda: silent[1], answer(), unsupported=True)
    until(lambda: len(silent[0].bodies) == 1)
    overrides.close()
    assert found == []


@pytest.mark.parametrize(
    ("said", "alone", "same"),
    [
        ("The Eiffel Tower [1].", "eiffel tower", True),
        ("Paris", "It is Paris, in France.", True),
        ("Paris", "Parisians", False),
        ("Lyon", "Paris", False),
        ("the", "a", False),  # no words are left of either
        ("Paris", "", False),
    ],
)
def test_two_answers_are_the_same_if_one_has_the_words_of_the_other(said: str, alone: str, same: bool) -> None:
    entry = ContextEntry(1, "T", "", "", 1, (0,), "text")
    given = Answer("?", said, None, (), context=(entry,))
    assert is_repeated(given, Answer("?", alone, None, ())) is same


def test_what_tells_no_likelihoods_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    behind = ServedModel.load(None, "openai:tiny", ReaderSettings())
    assert can_check_overrides(behind)
    assert not behind.has_likelihoods
    with pytest.raises(UsageError, match="cannot compute the likelihood"):
        behind.create_likelihood_reader()
    behind.close()


def test_citations_are_no_part_of_what_is_remembered() -> None:
    hit = Hit(1, 0.5, 0, Passage("1-0", "1", 1, "T", "", "by Orwell", 0, 2, Passage.hash_of("T", "by Orwell")), "", "")
    writer = Quoting()
    (cited,) = ConcatReader(None, writer, PromptSettings(cite=True)).answer_from(["who?"], [[hit]])
    assert (cited.text, cited.plain) == ("Orwell [1].", "Orwell.")
    assert not is_remembered(ConcatReader(None, writer), cited)


class Told:
    """Tells that all answers are remembered, once it may."""

    def __init__(self) -> None:
        self.go, self.asked = threading.Event(), threading.Event()

    def log_likelihood(
        self, questions: Sequence[str], hits: Sequence[Sequence[Hit]], texts: Sequence[str]
    ) -> list[float]:
        self.asked.set()
        assert self.go.wait(PATIENCE)
        if texts[0] == "fails":
            raise UsageError("no such text")
        return [0.0] * len(texts)


@pytest.fixture
def told() -> Told:
    return Told()


def answer(text: str = "x") -> Answer:
    return Answer("?", text, None, ())


def test_one_answer_in_three_is_checked(told: Told) -> None:
    found: list[OverrideCheck | None] = []
    told.go.set()
    overrides = OverrideMonitor(3, found.append)
    for unsupported in (True, True, False, True, True, True, True, True):
        overrides.record_answer(lambda: LikelihoodChecker(told), answer(), unsupported=unsupported)
    until(lambda: len(found) == 2)
    overrides.close()
    assert found == [
        OverrideCheck(override=False),
        OverrideCheck(override=True),
    ]  # the third, which is supported, and the sixth


def test_none_is_checked_and_no_thread_begins_where_none_is_wanted(told: Told) -> None:
    overrides = OverrideMonitor(0, lambda found: None)
    overrides.record_answer(lambda: LikelihoodChecker(told), answer(), unsupported=True)
    overrides.close()
    assert not told.asked.is_set()
    assert overrides.thread.problem == ""


def test_few_wait_and_none_of_a_version_that_is_gone(told: Told) -> None:
    found: list[OverrideCheck | None] = []
    overrides = OverrideMonitor(1, found.append)
    overrides.record_answer(lambda: LikelihoodChecker(told), answer(), unsupported=True)
    assert told.asked.wait(PATIENCE)
    for _ in range(5):
        overrides.record_answer(lambda: LikelihoodChecker(told), answer(), unsupported=True)
    overrides.clear()
    for _ in range(40):
        overrides.record_answer(lambda: LikelihoodChecker(told), answer(), unsupported=False)
    told.go.set()
    until(lambda: len(found) == 33)
    overrides.record_answer(lambda: LikelihoodChecker(told), answer(), unsupported=True)
    until(lambda: len(found) == 34)
    overrides.close()
    assert [one and one.override for one in found] == [True, *[False] * 32, True]


def test_an_answer_that_cannot_be_checked_costs_no_other(told: Told, caplog: pytest.LogCaptureFixture) -> None:
    found: list[OverrideCheck | None] = []
    told.go.set()
    overrides = OverrideMonitor(1, found.append)
    overrides.record_answer(lambda: LikelihoodChecker(told), answer("fails"), unsupported=True)
    overrides.record_answer(lambda: LikelihoodChecker(told), answer(), unsupported=True)
    until(lambda: found == [None, OverrideCheck(override=True)])
    assert "was not checked" in caplog.text
    assert overrides.thread.problem == ""
    overrides.close()
