"""`bookwheel answer` over a real snapshot. The models are tiny and random, so their answers have no meaning."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rag_model.encoders.trainable import TrainableEncoder
from rag_model.generate.load import load_generator
from rag_model.generate.prompts import PaperTemplate
from rag_model.generate.rag import Rag, RagSettings
from rag_model.generate.rag_folder import save_rag
from rag_model.store.store import Store
from rag_model.store.versions.models import ModelMetadata, put_model
from tests.fixtures.scripted_server import make_event, respond, send, serve_script
from tests.fixtures.tiny_generators import save_bart, save_llama

USAGE = {"prompt_tokens": 70, "completion_tokens": 5}
QUESTIONS = ["who wrote about anarchism?", "Où est 東京 🗼?"]


def save_model(folder: Path, encoder: Path, kind: str) -> Path:
    generator = load_generator(save_bart(folder / "bart"), PaperTemplate(max_answer=16), device="cpu")
    question = TrainableEncoder.load(encoder, "question", device="cpu")
    rag = Rag(question, generator, RagSettings(kind=kind, k=3))  # type: ignore[arg-type]
    save_rag(rag, folder / "rag", question.space())
    return folder / "rag"


@pytest.fixture(scope="module")
def models(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def get_model_folder(kind: str) -> Path:
        if kind not in folders:
            folders[kind] = save_model(tmp_path_factory.mktemp(kind), tiny, kind)
        return folders[kind]

    return get_model_folder


@pytest.mark.parametrize("kind", ["sequence", "token"])
def test_answers_list_their_passages(kind: str, library: Path, models: Callable, bookwheel: Callable) -> None:
    result = bookwheel("answer", *QUESTIONS, "--store", library, "--model", models(kind), "--json")
    assert result.code == 0, result.err
    reply = result.json
    assert set(reply) == {"snapshot", "model", "answers"}
    assert reply["model"] == str(models(kind))
    search_reply = bookwheel("search", *QUESTIONS, "--store", library, "-k", 3, "--json").json
    assert reply["snapshot"] == search_reply["snapshot"]
    for answer, question, hits in zip(reply["answers"], QUESTIONS, search_reply["results"], strict=True):
        assert answer["question"] == question
        assert isinstance(answer["answer"], str)
        assert [passage["id"] for passage in answer["passages"]] == [hit["id"] for hit in hits["hits"]]
        assert {"id", "title", "weight", "posterior", "licence"} <= set(answer["passages"][0])
        for key in ("weight", "posterior"):
            assert sum(passage[key] for passage in answer["passages"]) == pytest.approx(1, abs=1e-4)
        assert bool(answer["tokens"]) == (kind == "token")
        assert "".join(token["text"] for token in answer["tokens"]) == (answer["answer"] if kind == "token" else "")


def test_text_output_names_the_passages_of_the_answer(library: Path, models: Callable, bookwheel: Callable) -> None:
    result = bookwheel("answer", QUESTIONS[0], "--store", library, "--model", models("token"), "-k", 2, "--beams", 2)
    assert result.code == 0, result.err
    assert result.out.startswith(QUESTIONS[0])
    assert result.out.count("% of it from ") == 2
    assert "CC BY-SA" in result.out


def test_model_of_the_store_is_named_like_a_snapshot(
    library: Path, models: Callable, tiny: Path, bookwheel: Callable, tmp_path: Path
) -> None:
    url = shutil.copytree(library, tmp_path / "store")
    store = Store.open(str(url))
    model_version = put_model(store, models("token"), ModelMetadata("rag-token", None, {}), "reader")
    for name in ("reader", "reader@1", model_version.model, model_version.model[:16]):
        result = bookwheel("answer", QUESTIONS[0], "--store", url, "--model", name, "-k", 1, "--json")
        assert result.code == 0, result.err
        assert result.json["model"] == model_version.model
    put_model(store, tiny, ModelMetadata("dpr", None, {}), "question-encoder")
    result = bookwheel("answer", QUESTIONS[0], "--store", url, "--model", "question-encoder")
    assert (result.code, "is a dpr, which cannot generate answers" in result.complaint) == (2, True)


def test_model_of_another_encoder_space_is_rejected(
    library: Path, other_tiny: Path, bookwheel: Callable, tmp_path: Path
) -> None:
    folder = save_model(tmp_path, other_tiny, "token")
    result = bookwheel("answer", QUESTIONS[0], "--store", library, "--model", folder)
    assert (result.code, "weights differ" in result.complaint) == (3, True)


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), chat=True, longest=1024)


def test_concat_reader_puts_all_passages_into_one_prompt(
    library: Path, models: Callable, generator: Path, bookwheel: Callable, tmp_path: Path
) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Be brief.\n---\n{context}\n\n{question}\n", encoding="utf-8")
    arguments = ["--store", library, "--reader", "concat", "--order", "ends", "--budget", "150", "--prompt", prompt]
    for model in (generator, models("token")):
        result = bookwheel("answer", *QUESTIONS, *arguments, "--model", model, "-k", "3", "--cite", "--json")
        assert result.code == 0, result.err
        assert result.json["model"] == str(model)
        search_reply = bookwheel("search", *QUESTIONS, "--store", library, "-k", 3, "--json").json
        for answer, hits in zip(result.json["answers"], search_reply["results"], strict=True):
            assert [passage["id"] for passage in answer["passages"]] == [hit["id"] for hit in hits["hits"]]
            assert [passage["posterior"] for passage in answer["passages"]] == [None] * 3
            assert [entry["number"] for entry in answer["context"]] == [*range(1, 1 + len(answer["context"]))]
            assert 0 < answer["usage"]["prompt_tokens"] < 150 + 150
            assert {"citations", "statements", "log_likelihood"} <= set(answer)
    text = bookwheel("answer", QUESTIONS[0], *arguments, "--model", generator)
    assert (text.code, "  [1] " in text.out, "CC BY-SA" in text.out) == (0, True, True)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--order", "rank"], 2, "--order only applies to a reader with one prompt for all passages"),
        (["--reader", "concat", "--budget", "0"], 2, "the budget is 0 tokens"),
        (["--reader", "concat", "--budget", "5"], 2, "a budget of 5 tokens has no room for a passage"),
        (["--reader", "concat", "--prompt", "missing.txt"], 1, "missing.txt cannot be read"),
        (["--reader", "concat", "--asks", "x"], 2, "has no question encoder"),
        (["--reader", "marginal", "--model", "openai:any"], 2, "its answers cannot be marginalized"),
        (["--model", "openai:any", "--beams", "2"], 2, "without beam search"),
    ],
)
def test_invalid_concat_option_fails_with_one_sentence(
    options: list[str], code: int, message: str, library: Path, generator: Path, bookwheel: Callable
) -> None:
    model = [] if "--model" in options else ["--model", generator]
    result = bookwheel("answer", QUESTIONS[0], "--store", library, *model, *options)
    assert (result.code, message in result.complaint) == (code, True), result.err


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["-k", "100000"], 2, "k is 100000 but the snapshot holds"),
        (["-k", "0"], 2, "k is 0"),
        (["--beams", "0"], 2, "beams is 0"),
        (["--index", "bm25"], 2, "no index 'bm25'"),
        (["--model", "missing"], 1, "missing"),
        (["--model", "gen/missing"], 1, "model gen/missing is not a local folder, and the hub cannot be reached"),
    ],
)
def test_invalid_option_fails_with_one_sentence(
    options: list[str], code: int, message: str, library: Path, models: Callable, bookwheel: Callable
) -> None:
    model = [] if "--model" in options else ["--model", models("token")]
    result = bookwheel("answer", QUESTIONS[0], "--store", library, *model, *options)
    assert (result.code, message in result.complaint) == (code, True), result.err


def test_missing_question_is_a_usage_error(library: Path, models: Callable, bookwheel: Callable) -> None:
    result = bookwheel("answer", "--store", library, "--model", models("token"))
    assert (result.code, "there is no question" in result.complaint) == (2, True)
    result = bookwheel("answer", " ", "--store", library, "--model", models("token"))
    assert (result.code, "is empty" in result.complaint) == (2, True)


def test_questions_are_read_from_a_file(library: Path, models: Callable, bookwheel: Callable, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"question": question, "answers": ["x"]}) + "\n" for question in QUESTIONS))
    arguments = ["--store", library, "--model", models("sequence"), "--json"]
    from_file = bookwheel("answer", "--questions", path, *arguments)
    assert from_file.code == 0, from_file.err
    assert from_file.json == bookwheel("answer", *QUESTIONS, *arguments).json


def test_endpoint_model_answers_with_citations_and_usage(
    library: Path, bookwheel: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_stream = send(make_event("a "), make_event("king [1]."), make_event("", "stop", usage=USAGE))
    with serve_script(answer_stream, respond(404, {"error": {"message": "no such model"}})) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "sk-not-to-be-told")
        monkeypatch.setenv("BOOKWHEEL_LLM_PRICES", "1,2")
        command = ("answer", QUESTIONS[0], "--store", library, "--model", "openai:tiny", "--json")
        (answer,) = bookwheel(*command).json["answers"]
        assert (answer["answer"], answer["citations"]) == ("a king [1].", [1])
        assert answer["usage"] == {"prompt_tokens": 70, "new_tokens": 5, "cost": 80e-6, "estimated": False}
        assert answer["passages"][0]["text"] in server.bodies[0]["messages"][-1]["content"]
        assert (server.bodies[0]["max_tokens"], answer["problem"]["kind"]) == (4096, "prompt_truncated")
        failure = bookwheel(*command)
    assert (failure.code, failure.json["exit_code"]) == (1, 1)
    assert failure.err.strip().endswith("(no such model): check both")
    assert "sk-not" not in failure.err + failure.out
    marginal = bookwheel(*command, "--reader", "marginal")
    assert (marginal.code, "does not give the likelihood" in marginal.err) == (2, True)


def test_missing_answer_is_explained(library: Path, bookwheel: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    reasoning = send(make_event("<think>\nWho was it?"), make_event("", "length"))
    with serve_script(reasoning) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        command = ("answer", QUESTIONS[0], "--store", library, "--model", "openai:tiny", "--max-tokens", "60")
        (answer,) = bookwheel(*command, "--json").json["answers"]
        output = bookwheel(*command).out
        assert [body["max_tokens"] for body in server.bodies] == [60, 60]
    message = "the model reasoned for all of its 60 tokens: allow more with --max-tokens"
    assert (answer["answer"], answer["problem"]) == ("", {"kind": "reasoning", "message": message})
    assert f"({message})" in output
    assert bookwheel(*command, "--max-tokens", "0").code == 2
