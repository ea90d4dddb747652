"""The drift of a generator: a service whose model differs from the one whose answers were recorded."""

import json
from pathlib import Path

import pytest

from rag_model.errors import UsageError
from rag_model.evaluation.measures.answers import normalise
from rag_model.generate.decoding import DecodingSettings
from rag_model.reading.routing import Route, identify_model
from rag_model.reading.settings import PromptSettings, ReaderSettings
from rag_model.serving.answering.loaded_snapshot import ServedModel
from rag_model.serving.monitoring.metrics import ServiceMetrics
from rag_model.serving.monitoring.probes import MAX_PROBES, ProbeMetrics, ProbeMonitor, choose_probes
from tests.fixtures.alert_rules import assert_firing
from tests.fixtures.scripted_server import make_event, send, serve_script
from tests.fixtures.serving import Library, make_settings, run_service, wait_until
from tests.fixtures.tiny_generators import save_llama
from tests.rag_model.serving.monitoring.test_metrics import read_metrics

PROBES = [f"who was the king of city {number}?" for number in range(12)]
DECODING = DecodingSettings(max_new_tokens=4)
SETTINGS = make_settings(override_every=0)
SAME_RATIO, DIFFERENCE = "bookwheel_probe_same_ratio", "bookwheel_probe_likelihood_difference_nats"


def create_settings(route: Route) -> ReaderSettings:
    return ReaderSettings("auto", DECODING, PromptSettings(instruction="", budget=60), route=route)


def test_another_model_is_compared_with_the_recorded_answers(
    shared_library: Library, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    models = [save_llama(tmp_path / f"llama{seed}", seed) for seed in (1, 2)]
    settings = create_settings(Route("weights", -99.0, identify_model(str(models[0])), "concat"))
    expositions = []
    for model in models:
        metrics = ServiceMetrics(SETTINGS, probes=ProbeMonitor(PROBES, tmp_path / "dest"))
        serve_options = {"model": str(model), "reader_settings": settings}
        with run_service(shared_library.url, tmp_path / "dest", SETTINGS, metrics, **serve_options) as service:
            reply = service.client.post("/answer", json={"questions": PROBES[:2], "k": 2}).json()
            wait_until(lambda metrics=metrics: SAME_RATIO in read_metrics(metrics))  # type: ignore[misc]
            samples = read_metrics(metrics)
            expositions.append(metrics.render_exposition())
        if model == models[0]:
            assert (samples[SAME_RATIO], samples[DIFFERENCE]) == (1.0, pytest.approx(0.0, abs=1e-6))
            assert [answer["memory"] for answer in reply["answers"]] == ["weights"] * 2
            assert [answer["passages"] for answer in reply["answers"]] == [[], []]
            assert samples["bookwheel_answers_memory_total weights"] == 2
        assert samples["bookwheel_tokens_total written probe"] >= len(PROBES)
    # The route was chosen for the first model, so it is not used for the second.
    assert "the route was chosen for a model other than" in caplog.text
    assert {answer["route"]["signal"] for answer in reply["answers"]} == {"difference"}

    (file,) = (tmp_path / "dest").glob("probes-*.json")
    rows = json.loads(file.read_text())["answers"]
    assert [row["question"] for row in rows] == PROBES
    second_model = ServedModel.load(
        None, str(models[1]), ReaderSettings("concat", DECODING, settings.concat)
    ).create_uncited_reader()
    no_passages = [()] * len(PROBES)
    second_answers = [normalise(answer.text) for answer in second_model.answer_from(PROBES, no_passages)]
    equal = [normalise(row["text"]) == text for row, text in zip(rows, second_answers, strict=True)]
    assert samples[SAME_RATIO] == sum(equal) / len(PROBES)
    likelihoods = second_model.log_likelihood(PROBES, no_passages, [row["text"] for row in rows])
    expected = [
        (likelihood - row["log_likelihood"]) / row["tokens"] for row, likelihood in zip(rows, likelihoods, strict=True)
    ]
    assert samples[DIFFERENCE] == pytest.approx(sum(expected) / len(expected), abs=1e-4)
    assert_firing(tmp_path, expositions[0], expositions[0])
    assert_firing(tmp_path, expositions[1], expositions[1], "BookwheelGeneratorDrifted")


def test_endpoint_is_probed_repeatedly(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["Rome"] * 12 + ["rome."] * 9 + ["Paris"]
    replies = [send(make_event(text), make_event("", "stop")) for text in texts]
    with serve_script(*replies) as server:
        for name, value in {"OPENAI_BASE_URL": server.url, "BOOKWHEEL_LLM_CONCURRENCY": "1"}.items():
            monkeypatch.setenv(name, value)
        model = ServedModel.load(None, "openai:changes", ReaderSettings("concat", DECODING))
        monitor = ProbeMonitor(PROBES, seconds=0.3)
        try:
            assert monitor.compute_metrics() is None
            monitor.start_monitoring(model)
            wait_until(lambda: monitor.compute_metrics() == ProbeMetrics(1.0, None))
            wait_until(lambda: monitor.compute_metrics() == ProbeMetrics(0.75, None))
            wait_until(lambda: monitor.compute_metrics() == ProbeMetrics(0.0, None))
            monitor.start_monitoring(None)
            assert monitor.compute_metrics() is None
        finally:
            monitor.close()
            model.close()


def test_damaged_record_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = ServedModel.load(None, str(save_llama(tmp_path / "llama")), ReaderSettings("concat", DECODING))
    texts = []
    for damage in (None, "{", '{"answers": [{"text": 1, "log_likelihood": 0, "tokens": 1}]}', '{"answers": []}'):
        monitor = ProbeMonitor(PROBES, tmp_path / "dest")
        if damage is not None:
            (file,) = (tmp_path / "dest").glob("probes-*.json")
            file.write_text(damage)
        monitor.start_monitoring(model)
        wait_until(lambda monitor=monitor: monitor.compute_metrics() is not None)  # type: ignore[misc]
        monitor.close()
        (file,) = (tmp_path / "dest").glob("probes-*.json")
        texts.append(file.read_text())
    assert len(set(texts)) == 1
    assert caplog.text.count("has no readable answers of probes") == 2


def test_probes_are_distinct_questions_from_the_whole_file() -> None:
    questions = [f"q{number}" for number in range(1000)]
    probes = choose_probes(questions)
    assert len(set(probes)) == MAX_PROBES
    assert (probes[0], probes[-1]) == ("q0", "q999")
    assert choose_probes([*PROBES, *PROBES]) == PROBES
    with pytest.raises(UsageError, match="9 different probe questions are too few"):
        choose_probes([*PROBES[:9], PROBES[0]])
    monitor = ProbeMonitor()  # Without probes it starts no thread.
    monitor.start_monitoring(None)
    monitor.close()
