"""The retriever in a real Haystack pipeline that answers, also one that was written and read back."""

from collections import Counter

import pytest

from rag_model.errors import StoreError, UsageError
from rag_model.integrations.haystack import BookwheelRetriever  # before Haystack: its telemetry stays off
from rag_model.retrieve.hits import Hit
from tests.fixtures.serving import Library
from tests.rag_model.integrations.conftest import ASKED

# isort: split
from haystack import Pipeline, component, telemetry
from haystack.components.builders import AnswerBuilder, PromptBuilder
from haystack.components.joiners import DocumentJoiner
from haystack.utils import Secret

TEMPLATE = "{% for document in documents %}{{ document.content }}\n{% endfor %}\n{{ query }}"


@component
class Parrot:
    """A reader that repeats the first line of its prompt."""

    @component.output_types(replies=list[str])
    def run(self, prompt: str) -> dict[str, list[str]]:
        return {"replies": prompt.splitlines()[:1]}


def answering(retriever: BookwheelRetriever) -> Pipeline:
    pipeline = Pipeline()
    for name, part in (
        ("retriever", retriever),
        ("prompt", PromptBuilder(TEMPLATE, required_variables="*")),
        ("reader", Parrot()),
        ("answer", AnswerBuilder()),
    ):
        pipeline.add_component(name, part)
    pipeline.connect("retriever.documents", "prompt.documents")
    pipeline.connect("prompt.prompt", "reader.prompt")
    pipeline.connect("reader.replies", "answer.replies")
    pipeline.connect("retriever.documents", "answer.documents")
    return pipeline


def test_a_pipeline_answers_from_the_passages(
    place: dict[str, str], expected: list[Hit], made_library: Library
) -> None:
    pipeline = answering(BookwheelRetriever(**place, top_k=2))  # type: ignore[arg-type]
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


def test_a_pipeline_is_written_and_read_back(places: dict[str, dict[str, str]], expected: list[Hit]) -> None:
    made = BookwheelRetriever(**places["folder"], retriever="rrf(hnsw, exact)", top_k=2)  # type: ignore[arg-type]
    pipeline = Pipeline()
    pipeline.add_component("retriever", made)
    read = Pipeline.loads(pipeline.dumps(), allowed_modules=["rag_model.integrations.haystack"]).get_component(
        "retriever"
    )
    assert isinstance(read, BookwheelRetriever)
    assert (read.source.settings, read.top_k) == (made.source.settings, 2)
    assert {one.id for one in read.run(ASKED)["documents"]} == {hit.id for hit in expected}
    assert len(read.run(ASKED, top_k=1)["documents"]) == 1
    read.source.close()


def test_joiner_sums_the_ranks_of_a_passage(places: dict[str, dict[str, str]]) -> None:
    retrievers = [
        BookwheelRetriever(**places["folder"], retriever=name, top_k=3)  # type: ignore[arg-type]
        for name in ("exact", "rrf(hnsw, exact)")
    ]
    lists = [retriever.run(ASKED)["documents"] for retriever in retrievers]
    assert {one.id: one.meta for one in lists[0]} == {one.id: one.meta for one in lists[1]}
    scores = Counter[str]()
    for documents in lists:
        for rank, document in enumerate(documents):
            scores[document.id] += 1 / (61 + rank)
    joined = DocumentJoiner("reciprocal_rank_fusion").run(lists)["documents"]
    assert {one.id for one in joined} == set(scores)
    assert [scores[one.id] for one in joined] == sorted(scores.values(), reverse=True)
    for retriever in retrievers:
        retriever.source.close()


def test_a_token_is_written_as_the_name_of_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIBRARY_TOKEN", "hushhush")
    made = BookwheelRetriever(service="http://localhost:1", token=Secret.from_env_var("LIBRARY_TOKEN"))
    assert made.source.settings.token == "hushhush"
    assert "hushhush" not in str(made.to_dict())
    assert BookwheelRetriever.from_dict(made.to_dict()).source.settings == made.source.settings
    with pytest.raises(ValueError, match="token"):
        BookwheelRetriever(service="http://localhost:1", token=Secret.from_token("hushhush")).to_dict()


def test_what_is_wrong_is_told_when_it_is_made_or_asked(nowhere: str) -> None:
    with pytest.raises(UsageError, match="none of them is given"):
        BookwheelRetriever()
    with pytest.raises(UsageError, match="at least 1"):
        BookwheelRetriever(folder=nowhere, top_k=0)
    with pytest.raises(StoreError, match="no pulled snapshot"):
        BookwheelRetriever(folder=nowhere).run("who?")


def test_haystack_reports_nothing() -> None:
    assert telemetry._telemetry.telemetry is None
