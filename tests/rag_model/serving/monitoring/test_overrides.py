"""Override checks of a live service: answers whose origin is known, in the model or in the passages, and sampling."""

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
from rag_model.serving.answering.loaded_snapshot import ServedModel
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
from tests.fixtures.citing_writer import CitingWriter
from tests.fixtures.known_memories import (
    INVENTED_LETTERS,
    ONE_PROMPT,
    QUESTIONS,
    READ_LETTERS,
    REMEMBERED_LETTERS,
    TrainedLibrary,
    get_answer_shares,
    make_trained_library,
    read_town,
)
from tests.fixtures.scripted_server import ScriptedServer, Step, hang, make_event, respond, send, serve_script
from tests.fixtures.serving import TIMEOUT, make_settings, run_service, wait_until
from tests.rag_model.serving.monitoring.test_metrics import read_metrics

MARGINAL, CONCAT = ReaderSettings("marginal"), ReaderSettings("concat", concat=ONE_PROMPT)
N_UNSUPPORTED = len(REMEMBERED_LETTERS) + len(INVENTED_LETTERS)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> TrainedLibrary:
    return make_trained_library(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("reading", [MARGINAL, CONCAT], ids=["marginal", "concat"])
def test_service_counts_answers_that_override_the_passages(
    world: TrainedLibrary, dest: Path, reading: ReaderSettings
) -> None:
    settings = make_settings(override_every=1)
    metrics = ServiceMetrics(settings)
    with run_service(world.url, dest, settings, metrics, model=str(world.model), reader_settings=reading) as service:
        reply = service.client.post("/answer", json={"questions": QUESTIONS, "k": 2}).json()
        wait_until(lambda: read_metrics(metrics)["bookwheel_answers_sampled_total"] == len(QUESTIONS))
        samples = read_metrics(metrics)
    likelihoods = [get_answer_shares(question, world.hits[question]) for question in QUESTIONS]
    likeliest = [max(texts, key=texts.__getitem__) for texts in likelihoods]
    assert [answer["answer"] for answer in reply["answers"]] == likeliest
    assert samples["bookwheel_answers_total given"] == len(READ_LETTERS) + N_UNSUPPORTED
    assert samples["bookwheel_answers_unsupported_total"] == N_UNSUPPORTED
    assert samples["bookwheel_answers_override_total"] == len(REMEMBERED_LETTERS)
    for stage in ("search", "assembly", "generation"):
        assert samples[f"bookwheel_answer_stage_seconds_count {stage}"] == len(QUESTIONS)


def test_answer_that_only_the_passages_make_likely_is_no_override(world: TrainedLibrary) -> None:
    """The probabilities of all answers are known in this test."""
    model = ServedModel.load(None, str(world.model), MARGINAL)
    assert model.has_likelihoods
    reader = model.model.open_reader(None, MARGINAL)
    answers = reader.answer_from(QUESTIONS, [world.hits[question] for question in QUESTIONS])
    unsupported = [answer for answer in answers if is_unsupported(answer)]
    assert [answer.question[0] for answer in unsupported] == [*REMEMBERED_LETTERS, *INVENTED_LETTERS]
    remembered = [is_remembered(model.create_likelihood_reader(), answer) for answer in unsupported]
    assert remembered == [True] * len(REMEMBERED_LETTERS) + [False] * len(INVENTED_LETTERS)


def answer_with(text: str) -> Step:
    """Return a reply of the endpoint with this answer, 7 prompt tokens and 2 generated tokens."""
    return send(make_event(text), make_event("", "stop", usage={"prompt_tokens": 7, "completion_tokens": 2}))


def test_endpoint_is_asked_without_passages_about_unsupported_answers(
    world: TrainedLibrary, dest: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It repeats the first answer, changes the second, is not asked about the third, and fails twice."""
    settings = make_settings(override_every=1)
    metrics = ServiceMetrics(settings)
    answer_steps = [answer_with(text) for text in ("mow [1].", "xer", read_town(world.hits["a?"]), "now", "now")]
    check_steps = [answer_with("The Mow"), answer_with("pij"), None, respond(400), respond(400)]
    steps = [step for pair in zip(answer_steps, check_steps, strict=True) for step in pair if step]
    with serve_script(*steps) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        reading = ReaderSettings(concat=PromptSettings(cite=True))
        with run_service(world.url, dest, settings, metrics, model="openai:tiny", reader_settings=reading) as service:
            for number, question in enumerate(("m?", "x?", "a?", "n?", "n?"), start=1):
                assert service.client.post("/answer", json={"questions": [question], "k": 2}).status_code == 200
                wait_until(partial(has_checked, metrics, number))
            samples = read_metrics(metrics)
    assert (samples["bookwheel_answers_unsupported_total"], samples["bookwheel_answers_sampled_total"]) == (4, 3)
    assert (samples["bookwheel_answers_override_total"], samples["bookwheel_answers_unchecked_total"]) == (1, 2)
    kinds = ("answer read", "answer written", "check read", "check written")
    token_counts = {kind: samples["bookwheel_tokens_total " + " ".join(reversed(kind.split()))] for kind in kinds}
    assert token_counts == {"answer read": 35, "answer written": 10, "check read": 14, "check written": 4}
    answer_request, check_request = server.bodies[:2]
    system_prompt, user_prompt = (
        PromptSettings(cite=True).build_system_message(closed_book=True),
        PromptSettings().build_user_message("", "m?"),
    )
    messages = [(message["role"], message["content"]) for message in check_request["messages"]]
    assert messages == [("system", system_prompt), ("user", user_prompt)]
    assert {**answer_request, "messages": []} == {**check_request, "messages": []}
    assert check_request["temperature"] == 0
    assert caplog.text.count("was not checked") == 1


def has_checked(metrics: ServiceMetrics, number: int) -> bool:
    """Return whether this number of sampled answers was checked, or could not be checked."""
    samples = read_metrics(metrics)
    return samples["bookwheel_answers_sampled_total"] + samples["bookwheel_answers_unchecked_total"] == number


@pytest.fixture
def silent_endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ScriptedServer, OverrideChecker]]:
    """An endpoint that receives the question and never answers."""
    with serve_script(hang()) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        model = ServedModel.load(None, "openai:tiny", ReaderSettings())
        yield server, create_override_checker(model)
        model.close()


def test_check_at_a_silent_endpoint_times_out(silent_endpoint: tuple[ScriptedServer, OverrideChecker]) -> None:
    checks: list[OverrideCheck | None] = []
    overrides = OverrideMonitor(1, checks.append, seconds=0.2)
    overrides.record_answer(lambda: silent_endpoint[1], create_answer(), unsupported=True)
    wait_until(lambda: checks == [None])
    overrides.close()


def test_shutdown_does_not_wait_for_the_endpoint(silent_endpoint: tuple[ScriptedServer, OverrideChecker]) -> None:
    checks: list[OverrideCheck | None] = []
    overrides = OverrideMonitor(1, checks.append, seconds=10 * TIMEOUT)
    overrides.record_answer(lambda: silent_endpoint[1], create_answer(), unsupported=True)
    wait_until(lambda: len(silent_endpoint[0].bodies) == 1)
    overrides.close()
    assert checks == []


@pytest.mark.parametrize(
    ("text", "check", "is_same"),
    [
        ("The Eiffel Tower [1].", "eiffel tower", True),
        ("Paris", "It is Paris, in France.", True),
        ("Paris", "Parisians", False),
        ("Lyon", "Paris", False),
        ("the", "a", False),  # Both have only stop words.
        ("Paris", "", False),
    ],
)
def test_answers_are_equal_if_one_contains_the_words_of_the_other(text: str, check: str, is_same: bool) -> None:
    entry = ContextEntry(1, "T", "", "", 1, (0,), "text")
    first_answer = Answer("?", text, None, (), context=(entry,))
    assert is_repeated(first_answer, Answer("?", check, None, ())) is is_same


def test_endpoint_without_likelihoods_is_not_asked_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    model = ServedModel.load(None, "openai:tiny", ReaderSettings())
    assert can_check_overrides(model)
    assert not model.has_likelihoods
    with pytest.raises(UsageError, match="cannot compute the likelihood"):
        model.create_likelihood_reader()
    model.close()


def test_citations_are_ignored_in_override_checks() -> None:
    hit = Hit(1, 0.5, 0, Passage("1-0", "1", 1, "T", "", "by Orwell", 0, 2, Passage.hash_of("T", "by Orwell")), "", "")
    writer = CitingWriter()
    (cited,) = ConcatReader(None, writer, PromptSettings(cite=True)).answer_from(["who?"], [[hit]])
    assert (cited.text, cited.plain) == ("Orwell [1].", "Orwell.")
    assert not is_remembered(ConcatReader(None, writer), cited)


class PausedReader:
    """Scores all texts as certain, once `go` is set."""

    def __init__(self) -> None:
        self.go, self.called = threading.Event(), threading.Event()

    def log_likelihood(
        self, questions: Sequence[str], hits: Sequence[Sequence[Hit]], texts: Sequence[str]
    ) -> list[float]:
        self.called.set()
        assert self.go.wait(TIMEOUT)
        if texts[0] == "fails":
            raise UsageError("no such text")
        return [0.0] * len(texts)


@pytest.fixture
def paused_reader() -> PausedReader:
    return PausedReader()


def create_answer(text: str = "x") -> Answer:
    return Answer("?", text, None, ())


def test_one_answer_in_three_is_checked(paused_reader: PausedReader) -> None:
    checks: list[OverrideCheck | None] = []
    paused_reader.go.set()
    overrides = OverrideMonitor(3, checks.append)
    for unsupported in (True, True, False, True, True, True, True, True):
        overrides.record_answer(lambda: LikelihoodChecker(paused_reader), create_answer(), unsupported=unsupported)
    wait_until(lambda: len(checks) == 2)
    overrides.close()
    assert checks == [
        OverrideCheck(override=False),
        OverrideCheck(override=True),
    ]  # The third answer is supported, and the sixth is not.


def test_no_thread_starts_if_no_answer_is_sampled(paused_reader: PausedReader) -> None:
    overrides = OverrideMonitor(0, lambda check: None)
    overrides.record_answer(lambda: LikelihoodChecker(paused_reader), create_answer(), unsupported=True)
    overrides.close()
    assert not paused_reader.called.is_set()
    assert overrides.thread.problem == ""


def test_queue_of_checks_is_bounded_and_cleared_by_a_swap(paused_reader: PausedReader) -> None:
    checks: list[OverrideCheck | None] = []
    overrides = OverrideMonitor(1, checks.append)
    overrides.record_answer(lambda: LikelihoodChecker(paused_reader), create_answer(), unsupported=True)
    assert paused_reader.called.wait(TIMEOUT)
    for _ in range(5):
        overrides.record_answer(lambda: LikelihoodChecker(paused_reader), create_answer(), unsupported=True)
    overrides.clear()
    for _ in range(40):
        overrides.record_answer(lambda: LikelihoodChecker(paused_reader), create_answer(), unsupported=False)
    paused_reader.go.set()
    wait_until(lambda: len(checks) == 33)
    overrides.record_answer(lambda: LikelihoodChecker(paused_reader), create_answer(), unsupported=True)
    wait_until(lambda: len(checks) == 34)
    overrides.close()
    assert [check and check.override for check in checks] == [True, *[False] * 32, True]


def test_failed_check_affects_no_other_answer(paused_reader: PausedReader, caplog: pytest.LogCaptureFixture) -> None:
    checks: list[OverrideCheck | None] = []
    paused_reader.go.set()
    overrides = OverrideMonitor(1, checks.append)
    overrides.record_answer(lambda: LikelihoodChecker(paused_reader), create_answer("fails"), unsupported=True)
    overrides.record_answer(lambda: LikelihoodChecker(paused_reader), create_answer(), unsupported=True)
    wait_until(lambda: checks == [None, OverrideCheck(override=True)])
    assert "was not checked" in caplog.text
    assert overrides.thread.problem == ""
    overrides.close()
