"""The retriever in a real Haystack pipeline that answers, also one that was written and read back."""

from collections import Counter
from importlib import import_module
from typing import Any

import pytest

from rag_model.errors import StoreError, UsageError
from rag_model.retrieve.hits import Hit
from tests.fixtures.serving import Library
from tests.rag_model.integrations.conftest import ASKED

TEMPLATE = "{% for document in documents %}{{ document.content }}\n{% endfor %}\n{{ query }}"


@pytest.fixture(scope="module")
def haystack() -> Any:
    """Haystack with our module, which only one worker imports: they take most of a second."""
    import_module("rag_model.integrations.haystack")  # before Haystack: its telemetry stays off
    for name in ("components.builders", "components.joiners", "utils"):
        import_module(f"haystack.{name}")
    return import_module("haystack")


@pytest.fixture(scope="module")
def retriever_class(haystack: Any) -> Any:
    return import_module("rag_model.integrations.haystack").BookwheelRetriever


def answering(retriever: Any, haystack: Any) -> Any:
    class Parrot:
        """A reader that repeats the first line of its prompt."""

        @haystack.component.output_types(replies=list[str])
        def run(self, prompt: str) -> dict[str, list[str]]:
            return {"replies": prompt.splitlines()[:1]}

    builders, pipeline = haystack.components.builders, haystack.Pipeline()
    for name, part in (
        ("retriever", retriever),
        ("prompt", builders.PromptBuilder(TEMPLATE, required_variables="*")),
        ("reader", haystack.component(Parrot)()),
        ("answer", builders.AnswerBuilder()),
    ):
        pipeline.add_component(name, part)
    pipeline.connect("retriever.documents", "prompt.documents")
    pipeline.connect("prompt.prompt", "reader.prompt")
    pipeline.connect("reader.replies", "answer.replies")
    pipeline.connect("retriever.documents", "answer.documents")
    return pipeline


def test_a_pipeline_answers_from_the_passages(
    place: dict[str, str], expected: list[Hit], made_library: Library, haystack: Any, retriever_class: Any
) -> None:
    pipeline = answering(retriever_class(**place, top_k=2), haystack)  # type: ignore[arg-type]
    pipeline.warm_up()
    told = pipeline.run({"retriever": {"query": ASKED}, "prompt": {"query": ASKED}, "answer": {"query": ASKED}})
    (answer,) = told["answer"]["answers"]
    assert answer.data == expected[0].text
    assert [(document.id, document.content) for document in answer.documents] == [
        (hit.id, hit.text) for hit in expected
    ]
    assert [document.score for document in answer.documents] == pytest.approx([hit.score for hit in expected], abs=1e-4)
    assert answer.documents[0].meta["snapshot"] == made_library.red
    pipeline.get_component("retriever").source.close()


def test_a_pipeline_is_written_and_read_back(
    places: dict[str, dict[str, str]], expected: list[Hit], haystack: Any, retriever_class: Any
) -> None:
    made = retriever_class(**places["folder"], retriever="rrf(hnsw, exact)", top_k=2)  # type: ignore[arg-type]
    pipeline = haystack.Pipeline()
    pipeline.add_component("retriever", made)
    read = haystack.Pipeline.loads(pipeline.dumps(), allowed_modules=["rag_model.integrations.haystack"]).get_component(
        "retriever"
    )
    assert isinstance(read, retriever_class)
    assert (read.source.settings, read.top_k) == (made.source.settings, 2)
    assert {one.id for one in read.run(ASKED)["documents"]} == {hit.id for hit in expected}
    assert len(read.run(ASKED, top_k=1)["documents"]) == 1
    read.source.close()


def test_joiner_sums_the_ranks_of_a_passage(
    places: dict[str, dict[str, str]], haystack: Any, retriever_class: Any
) -> None:
    retrievers = [
        retriever_class(**places["folder"], retriever=name, top_k=3)  # type: ignore[arg-type]
        for name in ("exact", "rrf(hnsw, exact)")
    ]
    lists = [retriever.run(ASKED)["documents"] for retriever in retrievers]
    assert {one.id: one.meta for one in lists[0]} == {one.id: one.meta for one in lists[1]}
    scores = Counter[str]()
    for documents in lists:
        for rank, document in enumerate(documents):
            scores[document.id] += 1 / (61 + rank)
    joined = haystack.components.joiners.DocumentJoiner("reciprocal_rank_fusion").run(lists)["documents"]
    assert {one.id for one in joined} == set(scores)
    assert [scores[one.id] for one in joined] == sorted(scores.values(), reverse=True)
    for retriever in retrievers:
        retriever.source.close()


def test_a_token_is_written_as_the_name_of_its_variable(
    monkeypatch: pytest.MonkeyPatch, haystack: Any, retriever_class: Any
) -> None:
    monkeypatch.setenv("LIBRARY_TOKEN", "hushhush")
    made = retriever_class(service="http://localhost:1", token=haystack.utils.Secret.from_env_var("LIBRARY_TOKEN"))
    assert made.source.settings.token == "hushhush"
    assert "hushhush" not in str(made.to_dict())
    assert retriever_class.from_dict(made.to_dict()).source.settings == made.source.settings
    with pytest.raises(ValueError, match="token"):
        retriever_class(service="http://localhost:1", token=haystack.utils.Secret.from_token("hushhush")).to_dict()


def test_what_is_wrong_is_told_when_it_is_made_or_asked(nowhere: str, retriever_class: Any) -> None:
    with pytest.raises(UsageError, match="none of them is given"):
        retriever_class()
    with pytest.raises(UsageError, match="at least 1"):
        retriever_class(folder=nowhere, top_k=0)
    with pytest.raises(StoreError, match="no pulled snapshot"):
        retriever_class(folder=nowhere).run("who?")


def test_haystack_reports_nothing(haystack: Any) -> None:
    assert haystack.telemetry._telemetry.telemetry is None
