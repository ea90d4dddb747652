"""`bookwheel answer` over a real snapshot. The models are tiny and random: what they say means nothing."""

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
from tests.fixtures.scripted_server import event, replies, scripted, streams
from tests.fixtures.tiny_generators import save_bart, save_llama

USAGE = {"prompt_tokens": 70, "completion_tokens": 5}
ASKED = ["who wrote about anarchism?", "Où est 東京 🗼?"]


def save_model(folder: Path, encoder: Path, kind: str) -> Path:
    generator = load_generator(save_bart(folder / "bart"), PaperTemplate(max_answer=16), device="cpu")
    question = TrainableEncoder.load(encoder, "question", device="cpu")
    rag = Rag(question, generator, RagSettings(kind=kind, k=3))  # type: ignore[arg-type]
    save_rag(rag, folder / "rag", question.space())
    return folder / "rag"


@pytest.fixture(scope="module")
def models(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def model(kind: str) -> Path:
        if kind not in made:
            made[kind] = save_model(tmp_path_factory.mktemp(kind), tiny, kind)
        return made[kind]

    return model


@pytest.mark.parametrize("kind", ["sequence", "token"])
def test_answers_come_with_their_passages(kind: str, library: Path, models: Callable, bookwheel: Callable) -> None:
    result = bookwheel("answer", *ASKED, "--store", library, "--model", models(kind), "--json")
    assert result.code == 0, result.err
    reply = result.json
    assert set(reply) == {"snapshot", "model", "answers"}
    assert reply["model"] == str(models(kind))
    searched = bookwheel("search", *ASKED, "--store", library, "-k", 3, "--json").json
    assert reply["snapshot"] == searched["snapshot"]
    for one, question, hits in zip(reply["answers"], ASKED, searched["results"], strict=True):
        assert one["question"] == question
        assert isinstance(one["answer"], str)
        assert [passage["id"] for passage in one["passages"]] == [hit["id"] for hit in hits["hits"]]
        assert {"id", "title", "weight", "posterior", "licence"} <= set(one["passages"][0])
        for key in ("weight", "posterior"):
            assert sum(passage[key] for passage in one["passages"]) == pytest.approx(1, abs=1e-4)
        assert bool(one["tokens"]) == (kind == "token")
        assert "".join(token["text"] for token in one["tokens"]) == (one["answer"] if kind == "token" else "")


def test_words_say_which_passages_carry_the_answer(library: Path, models: Callable, bookwheel: Callable) -> None:
    result = bookwheel("answer", ASKED[0], "--store", library, "--model", models("token"), "-k", 2, "--beams", 2)
    assert result.code == 0, result.err
    assert result.out.startswith(ASKED[0])
    assert result.out.count("% of it from ") == 2
    assert "CC BY-SA" in result.out


def test_a_model_of_the_store_is_named_as_snapshots_are(
    library: Path, models: Callable, tiny: Path, bookwheel: Callable, tmp_path: Path
) -> None:
    url = shutil.copytree(library, tmp_path / "store")
    store = Store.open(str(url))
    put = put_model(store, models("token"), ModelMetadata("rag-token", None, {}), "reader")
    for name in ("reader", "reader@1", put.model, put.model[:16]):
        result = bookwheel("answer", ASKED[0], "--store", url, "--model", name, "-k", 1, "--json")
        assert result.code == 0, result.err
        assert result.json["model"] == put.model
    put_model(store, tiny, ModelMetadata("dpr", None, {}), "asker")
    result = bookwheel("answer", ASKED[0], "--store", url, "--model", "asker")
    assert (result.code, "is a dpr, which cannot generate answers" in result.complaint) == (2, True)


def test_a_model_of_another_space_is_refused(
    library: Path, other_tiny: Path, bookwheel: Callable, tmp_path: Path
) -> None:
    folder = save_model(tmp_path, other_tiny, "token")
    result = bookwheel("answer", ASKED[0], "--store", library, "--model", folder)
    assert (result.code, "weights differ" in result.complaint) == (3, True)


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), chat=True, longest=1024)


def test_all_passages_are_read_in_one_prompt(
    library: Path, models: Callable, generator: Path, bookwheel: Callable, tmp_path: Path
) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Be brief.\n---\n{context}\n\n{question}\n", encoding="utf-8")
    given = ["--store", library, "--reader", "concat", "--order", "ends", "--budget", "150", "--prompt", prompt]
    for model in (generator, models("token")):
        result = bookwheel("answer", *ASKED, *given, "--model", model, "-k", "3", "--cite", "--json")
        assert result.code == 0, result.err
        assert result.json["model"] == str(model)
        searched = bookwheel("search", *ASKED, "--store", library, "-k", 3, "--json").json
        for one, hits in zip(result.json["answers"], searched["results"], strict=True):
            assert [passage["id"] for passage in one["passages"]] == [hit["id"] for hit in hits["hits"]]
            assert [passage["posterior"] for passage in one["passages"]] == [None] * 3
            assert [entry["number"] for entry in one["context"]] == [*range(1, 1 + len(one["context"]))]
            assert 0 < one["usage"]["prompt_tokens"] < 150 + 150
            assert {"citations", "statements", "log_likelihood"} <= set(one)
    said = bookwheel("answer", ASKED[0], *given, "--model", generator)
    assert (said.code, "  [1] " in said.out, "CC BY-SA" in said.out) == (0, True, True)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (
            ["--order", "rank"],
            2,
            "--order only applies to a reader with one prompt for all passages: give --reader concat too",
        ),
        (["--reader", "concat", "--budget", "0"], 2, "the budget is 0 tokens"),
        (["--reader", "concat", "--budget", "5"], 2, "a budget of 5 tokens has no room for a passage"),
        (["--reader", "concat", "--prompt", "missing.txt"], 1, "missing.txt cannot be read"),
        (["--reader", "concat", "--asks", "x"], 2, "has no question encoder"),
        (["--reader", "marginal", "--model", "openai:any"], 2, "its answers cannot be marginalized"),
        (["--model", "openai:any", "--beams", "2"], 2, "without beam search"),
    ],
)
def test_what_does_not_go_into_one_prompt_is_one_sentence(
    words: list[str], code: int, says: str, library: Path, generator: Path, bookwheel: Callable
) -> None:
    model = [] if "--model" in words else ["--model", generator]
    result = bookwheel("answer", ASKED[0], "--store", library, *model, *words)
    assert (result.code, says in result.complaint) == (code, True), result.err


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["-k", "100000"], 2, "k is 100000 but the snapshot holds"),
        (["-k", "0"], 2, "k is 0"),
        (["--beams", "0"], 2, "beams is 0"),
        (["--index", "bm25"], 2, "no index 'bm25'"),
        (["--model", "nobody"], 1, "nobody"),
        (["--model", "gen/nobody"], 1, "model gen/nobody is not a local folder, and the hub cannot be reached"),
    ],
)
def test_what_can_not_be_done_is_one_sentence(
    words: list[str], code: int, says: str, library: Path, models: Callable, bookwheel: Callable
) -> None:
    model = [] if "--model" in words else ["--model", models("token")]
    result = bookwheel("answer", ASKED[0], "--store", library, *model, *words)
    assert (result.code, says in result.complaint) == (code, True), result.err


def test_no_question_is_a_usage_error(library: Path, models: Callable, bookwheel: Callable) -> None:
    result = bookwheel("answer", "--store", library, "--model", models("token"))
    assert (result.code, "there is no question" in result.complaint) == (2, True)
    result = bookwheel("answer", " ", "--store", library, "--model", models("token"))
    assert (result.code, "is empty" in result.complaint) == (2, True)


def test_questions_come_from_a_file_too(library: Path, models: Callable, bookwheel: Callable, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"question": one, "answers": ["x"]}) + "\n" for one in ASKED))
    given = ["--store", library, "--model", models("sequence"), "--json"]
    from_file = bookwheel("answer", "--questions", path, *given)
    assert from_file.code == 0, from_file.err
    assert from_file.json == bookwheel("answer", *ASKED, *given).json


def test_a_model_behind_an_endpoint_is_named_by_its_address(
    library: Path, bookwheel: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = streams(event("a "), event("king [1]."), event("", "stop", usage=USAGE))
    with scripted(written, replies(404, {"error": {"message": "no such model"}})) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "sk-not-to-be-told")
        monkeypatch.setenv("BOOKWHEEL_LLM_PRICES", "1,2")
        command = ("answer", ASKED[0], "--store", library, "--model", "openai:tiny", "--json")
        (found,) = bookwheel(*command).json["answers"]
        assert (found["answer"], found["citations"]) == ("a king [1].", [1])
        assert found["usage"] == {"prompt_tokens": 70, "new_tokens": 5, "cost": 80e-6, "estimated": False}
        assert found["passages"][0]["text"] in server.bodies[0]["messages"][-1]["content"]
        assert (server.bodies[0]["max_tokens"], found["problem"]["kind"]) == (4096, "prompt_truncated")
        failed = bookwheel(*command)
    assert (failed.code, failed.json["exit_code"]) == (1, 1)
    assert failed.err.strip().endswith("(no such model): check both")
    assert "sk-not" not in failed.err + failed.out
    marginal = bookwheel(*command, "--reader", "marginal")
    assert (marginal.code, "does not give the likelihood" in marginal.err) == (2, True)


def test_an_answer_that_is_missing_is_explained(
    library: Path, bookwheel: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasoning = streams(event("<think>\nWho was it?"), event("", "length"))
    with scripted(reasoning) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        command = ("answer", ASKED[0], "--store", library, "--model", "openai:tiny", "--max-tokens", "60")
        (found,) = bookwheel(*command, "--json").json["answers"]
        shown = bookwheel(*command).out
        assert [body["max_tokens"] for body in server.bodies] == [60, 60]
    message = "the model reasoned for all of its 60 tokens: allow more with --max-tokens"
    assert (found["answer"], found["problem"]) == ("", {"kind": "reasoning", "message": message})
    assert f"({message})" in shown
    assert bookwheel(*command, "--max-tokens", "0").code == 2
