"""`--retriever`: one expression for search, evaluate and answer, with an error message if it is wrong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.tiny import save_cross_encoder
from tests.fixtures.tiny_rag import save_tiny_rag

QUESTION = "Who wrote What is Property?"
QUESTIONS = [
    {"id": "p", "question": QUESTION, "answers": ["Proudhon"]},
    {"id": "a", "question": "What is autism?", "answers": ["disorder", "developmental"]},
]
Bookwheel = Callable[..., Any]


@pytest.fixture(scope="module")
def rag(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_rag(tmp_path_factory.mktemp("rag"), tiny)


def test_ivfpq_is_default_without_graph(ivf_library: Path, rag: Path, questions: Path, bookwheel: Bookwheel) -> None:
    result = bookwheel("search", QUESTION, "--store", ivf_library, "--json")
    assert result.code == 0, result.err
    assert result.json == bookwheel("search", QUESTION, "--store", ivf_library, "--json", "--index", "ivfpq").json
    result = bookwheel("evaluate", "--store", ivf_library, "--questions", questions, "--json")
    assert (result.code, result.json["retriever"], result.json["index"]) == (0, "ivfpq", "ivfpq"), result.err
    result = bookwheel("answer", QUESTION, "--store", ivf_library, "--model", rag, "--json")
    assert result.code == 0, result.err
    result = bookwheel("evaluate", "--store", ivf_library, "--questions", questions, "--model", rag, "--json")
    assert (result.code, result.json["retriever"]) == (0, "ivfpq"), result.err


def test_search_shows_rank_of_each_leg(library: Path, bookwheel: Bookwheel, tmp_path: Path) -> None:
    def search(*words: object) -> list[dict[str, Any]]:
        result = bookwheel("search", QUESTION, "--store", library, "-k", 4, "--json", *words)
        assert result.code == 0, result.err
        hits: list[dict[str, Any]] = result.json["results"][0]["hits"]
        return hits

    assert search("--retriever", "hnsw") == search("--index", "hnsw")
    assert search("--index", "hnsw", "--retriever", " hnsw") == search("--index", "hnsw")
    assert not any("legs" in hit for hit in search())
    for hit in search("--retriever", "rrf(hnsw:50, exact:50, k=60)"):
        ranks = {leg["leg"]: leg["rank"] for leg in hit["legs"]}
        assert set(ranks) <= {"hnsw", "exact"}
        assert hit["score"] == pytest.approx(sum(1 / (60 + rank) for rank in ranks.values()))
    output = bookwheel("search", QUESTION, "--store", library, "--retriever", "rrf(hnsw, exact)").out
    assert "(hnsw 1, exact 1)" in output
    cross = save_cross_encoder(tmp_path / "cross")
    for hit in search("--retriever", f"rerank(rrf(hnsw, exact), {cross}, 9)"):
        assert [leg["leg"] for leg in hit["legs"]][-1] == "rrf(hnsw, exact)"
        assert 1 <= hit["legs"][-1]["rank"] <= 9


def test_fused_retriever_is_evaluated_and_answers(
    library: Path, rag: Path, questions: Path, bookwheel: Bookwheel
) -> None:
    expression = "rrf(hnsw, exact:30)"
    result = bookwheel("evaluate", "--store", library, "--questions", questions, "--retriever", expression, "--json")
    assert (result.code, result.json["retriever"], result.json["n"]) == (0, expression, 2), result.err
    assert list(result.json["metrics"]) == ["Success@1", "Success@5", "Success@20"]
    options = ["--store", library, "--questions", questions, "--model", rag, "--retriever", expression, "--json"]
    result = bookwheel("evaluate", *options)
    assert (result.code, result.json["retriever"]) == (0, expression), result.err
    answer = ["answer", QUESTION, "--store", library, "--model", rag, "-k", 3, "--json", "--retriever"]
    fused_reply, exact_reply = bookwheel(*answer, expression).json, bookwheel(*answer, "exact").json
    weights = [
        {passage["id"]: passage["weight"] for passage in reply["answers"][0]["passages"]}
        for reply in (fused_reply, exact_reply)
    ]
    assert weights[0] == pytest.approx(weights[1], abs=1e-4), "both retrieve the same three passages"


def test_retriever_is_read_from_environment(
    library: Path, bookwheel: Bookwheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOOKWHEEL_RETRIEVER", "rrf(hnsw, exact)")
    result = bookwheel("search", QUESTION, "--store", library, "--json")
    assert "legs" in result.json["results"][0]["hits"][0]
    result = bookwheel("search", QUESTION, "--store", library, "--index", "exact", "--json")
    assert "legs" not in result.json["results"][0]["hits"][0], "the option wins over the environment"
    monkeypatch.setenv("BOOKWHEEL_INDEX", "exact")
    result = bookwheel("search", QUESTION, "--store", library)
    assert (result.code, "on the command line or in the settings" in result.complaint) == (2, True)
    monkeypatch.delenv("BOOKWHEEL_RETRIEVER")
    result = bookwheel("search", QUESTION, "--store", library, "--retriever", "rrf(hnsw, exact)", "--json")
    assert (result.code, "legs" in result.json["results"][0]["hits"][0]) == (0, True), result.err


WRONG = [
    ("bm25", "has no index 'bm25': choose one of hnsw, exact"),
    ("rrf(hnsw, bm25)", "invalid at character 11: snapshot"),
    ("fuse(hnsw, exact)", "there is no call 'fuse': choose one of interpolate, maxsim, rerank, rrf, where"),
    ("rrf(hnsw, exact", "the bracket '(' is not closed"),
    ("rrf(hnsw, exact))", "should end here"),
    ("x" * 10_000, "has 10,000 characters"),
    ("rrf(" * 1_000 + "hnsw" + ")" * 1_000, "has 5,004 characters"),
    ("f(" * 200, "nested more than 8 levels deep"),
    ("hnsw:-3", "the depth of 'hnsw' is -3 passages"),
    ("hnsw:3", "k is 5 but hnsw gives 3 passages"),
    ("rrf(hnsw, exact, k=0)", "k of rrf is 0"),
    ("rrf(hnsw, exact, weights=[1, 2, 3])", "weights of rrf is a list of 3 for 2 retrievers"),
    ("rrf(hnsw, hnsw)", "the retriever hnsw is given twice"),
    ("rerank(hnsw, {bi}, 5)", "which does not score pairs: give a cross-encoder"),
    ("rerank(hnsw, model:none, 5)", "none"),
    ("", "the retriever is empty"),
]


@pytest.mark.parametrize(
    ("verb", "expression", "message"),
    [("search", *wrong) for wrong in WRONG] + [(verb, *WRONG[0]) for verb in ("evaluate", "answer")],
    ids=range(len(WRONG) + 2),
)
def test_wrong_retriever_is_refused(
    verb: str,
    expression: str,
    message: str,
    library: Path,
    tiny: Path,
    rag: Path,
    questions: Path,
    bookwheel: Bookwheel,
) -> None:
    options = ["--questions", questions] if verb == "evaluate" else [QUESTION]
    options += ["--model", rag] if verb == "answer" else []
    retriever = expression.replace("{bi}", str(tiny))
    result = bookwheel(verb, *options, "-k", 5, "--store", library, "--retriever", retriever)
    assert result.code == (1 if "rerank" in expression else 2), result.err
    assert message in result.complaint
    assert len(result.complaint) < 400


def test_depth_is_capped_at_number_of_passages(library: Path, bookwheel: Bookwheel) -> None:
    deep_hits, all_hits = (
        bookwheel("search", QUESTION, "--store", library, "--retriever", retriever, "--json").json
        for retriever in ("exact:1000000000", "exact")
    )
    assert deep_hits == all_hits
