"""The retriever in a real Haystack pipeline, which can be saved and loaded."""

from collections import Counter
from importlib import import_module
from typing import Any

import pytest

from rag_model.errors import StoreError, UsageError
from rag_model.retrieve.hits import Hit
from tests.fixtures.serving import Library
from tests.rag_model.integrations.conftest import QUESTION

TEMPLATE = "{% for document in documents %}{{ document.content }}\n{% endfor %}\n{{ query }}"


@pytest.fixture(scope="module")
def haystack() -> Any:
    """Import Haystack and our module only in the test worker that needs them, because this takes most of a second."""
    import_module("rag_model.integrations.haystack")  # Imported before Haystack, it turns the telemetry off.
    for name in ("components.builders", "components.joiners", "utils"):
        import_module(f"haystack.{name}")
    return import_module("haystack")


@pytest.fixture(scope="module")
def retriever_class(haystack: Any) -> Any:
    return import_module("rag_model.integrations.haystack").BookwheelRetriever


def create_answer_pipeline(retriever: Any, haystack: Any) -> Any:
    class FirstLineReader:
        """A reader that repeats the first line of its prompt."""

        @haystack.component.output_types(replies=list[str])
        def run(self, prompt: str) -> dict[str, list[str]]:
            return {"replies": prompt.splitlines()[:1]}

    builders, pipeline = haystack.components.builders, haystack.Pipeline()
    for name, component in (
        ("retriever", retriever),
        ("prompt", builders.PromptBuilder(TEMPLATE, required_variables="*")),
        ("reader", haystack.component(FirstLineReader)()),
        ("answer", builders.AnswerBuilder()),
    ):
        pipeline.add_component(name, component)
    pipeline.connect("retriever.documents", "prompt.documents")
    pipeline.connect("prompt.prompt", "reader.prompt")
    pipeline.connect("reader.replies", "answer.replies")
    pipeline.connect("retriever.documents", "answer.documents")
    return pipeline


def test_pipeline_answers_from_the_passages(
    source_options: Any, expected_hits: list[Hit], shared_library: Library, haystack: Any, retriever_class: Any
) -> None:
    pipeline = create_answer_pipeline(retriever_class(**source_options, top_k=2), haystack)
    pipeline.warm_up()
    outputs = pipeline.run({name: {"query": QUESTION} for name in ("retriever", "prompt", "answer")})
    (answer,) = outputs["answer"]["answers"]
    assert answer.data == expected_hits[0].text
    assert [(document.id, document.content) for document in answer.documents] == [
        (hit.id, hit.text) for hit in expected_hits
    ]
    scores = [document.score for document in answer.documents]
    assert scores == pytest.approx([hit.score for hit in expected_hits], abs=1e-4)
    assert answer.documents[0].meta["snapshot"] == shared_library.red
    pipeline.get_component("retriever").source.close()


def test_pipeline_can_be_saved_and_loaded(
    folder_options: dict[str, str], expected_hits: list[Hit], haystack: Any, retriever_class: Any
) -> None:
    retriever = retriever_class(**folder_options, retriever="rrf(hnsw, exact)", top_k=2)  # type: ignore[arg-type]
    pipeline = haystack.Pipeline()
    pipeline.add_component("retriever", retriever)
    loaded = haystack.Pipeline.loads(
        pipeline.dumps(), allowed_modules=["rag_model.integrations.haystack"]
    ).get_component("retriever")
    assert isinstance(loaded, retriever_class)
    assert (loaded.source.settings, loaded.top_k) == (retriever.source.settings, 2)
    assert {document.id for document in loaded.run(QUESTION)["documents"]} == {hit.id for hit in expected_hits}
    assert len(loaded.run(QUESTION, top_k=1)["documents"]) == 1
    loaded.source.close()


def test_joiner_sums_the_ranks_of_a_passage(
    folder_options: dict[str, str], haystack: Any, retriever_class: Any
) -> None:
    retrievers = [
        retriever_class(**folder_options, retriever=name, top_k=3)  # type: ignore[arg-type]
        for name in ("exact", "rrf(hnsw, exact)")
    ]
    rankings = [retriever.run(QUESTION)["documents"] for retriever in retrievers]
    assert {document.id: document.meta for document in rankings[0]} == {d.id: d.meta for d in rankings[1]}
    scores = Counter[str]()
    for documents in rankings:
        for rank, document in enumerate(documents):
            scores[document.id] += 1 / (61 + rank)
    fused = haystack.components.joiners.DocumentJoiner("reciprocal_rank_fusion").run(rankings)["documents"]
    assert {document.id for document in fused} == set(scores)
    assert [scores[document.id] for document in fused] == sorted(scores.values(), reverse=True)
    for retriever in retrievers:
        retriever.source.close()


def test_token_is_saved_as_the_name_of_its_variable(
    monkeypatch: pytest.MonkeyPatch, haystack: Any, retriever_class: Any
) -> None:
    monkeypatch.setenv("LIBRARY_TOKEN", "hushhush")
    retriever = retriever_class(service="http://localhost:1", token=haystack.utils.Secret.from_env_var("LIBRARY_TOKEN"))
    assert retriever.source.settings.token == "hushhush"
    assert "hushhush" not in str(retriever.to_dict())
    assert retriever_class.from_dict(retriever.to_dict()).source.settings == retriever.source.settings
    with pytest.raises(ValueError, match="token"):
        retriever_class(service="http://localhost:1", token=haystack.utils.Secret.from_token("hushhush")).to_dict()


def test_invalid_settings_and_a_missing_folder_are_reported(missing_folder: str, retriever_class: Any) -> None:
    with pytest.raises(UsageError, match="none of them is given"):
        retriever_class()
    with pytest.raises(UsageError, match="at least 1"):
        retriever_class(folder=missing_folder, top_k=0)
    with pytest.raises(StoreError, match="no pulled snapshot"):
        retriever_class(folder=missing_folder).run("who?")


def test_telemetry_of_haystack_is_off(haystack: Any) -> None:
    assert haystack.telemetry._telemetry.telemetry is None
