"""`--retriever`: one expression for search, evaluate and answer, and one sentence for each that is wrong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.tiny import save_cross_encoder
from tests.fixtures.tiny_rag import save_tiny_rag

ASKED = "Who wrote What is Property?"
QUESTIONS = [
    {"id": "p", "question": ASKED, "answers": ["Proudhon"]},
    {"id": "a", "question": "What is autism?", "answers": ["disorder", "developmental"]},
]
Bookwheel = Callable[..., Any]


@pytest.fixture(scope="module")
def rag(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_rag(tmp_path_factory.mktemp("rag"), tiny)


def test_a_snapshot_without_a_graph_answers_where_no_index_is_named(
    lists_only: Path, rag: Path, questions: Path, bookwheel: Bookwheel
) -> None:
    plain, named = (
        bookwheel("search", ASKED, "--store", lists_only, "--json", *words) for words in ([], ["--index", "ivfpq"])
    )
    assert (plain.code, plain.json) == (0, named.json), plain.err
    measured = bookwheel("evaluate", "--store", lists_only, "--questions", questions, "--json")
    assert (measured.code, measured.json["retriever"], measured.json["index"]) == (0, "ivfpq", "ivfpq"), measured.err
    answered = bookwheel("answer", ASKED, "--store", lists_only, "--model", rag, "--json")
    assert answered.code == 0, answered.err
    examined = bookwheel("evaluate", "--store", lists_only, "--questions", questions, "--model", rag, "--json")
    assert (examined.code, examined.json["retriever"]) == (0, "ivfpq"), examined.err


def test_search_shows_where_each_leg_found_a_hit(library: Path, bookwheel: Bookwheel, tmp_path: Path) -> None:
    def hits(*words: object) -> list[dict[str, Any]]:
        result = bookwheel("search", ASKED, "--store", library, "-k", 4, "--json", *words)
        assert result.code == 0, result.err
        found: list[dict[str, Any]] = result.json["results"][0]["hits"]
        return found

    assert hits("--retriever", "hnsw") == hits("--index", "hnsw") == hits("--index", "hnsw", "--retriever", " hnsw")
    assert not any("legs" in hit for hit in hits())
    for hit in hits("--retriever", "rrf(hnsw:50, exact:50, k=60)"):
        ranks = {leg["leg"]: leg["rank"] for leg in hit["legs"]}
        assert set(ranks) <= {"hnsw", "exact"}
        assert hit["score"] == pytest.approx(sum(1 / (60 + rank) for rank in ranks.values()))
    output = bookwheel("search", ASKED, "--store", library, "--retriever", "rrf(hnsw, exact)").out
    assert "(hnsw 1, exact 1)" in output, "people read the ranks of the legs"
    cross = save_cross_encoder(tmp_path / "cross")
    for hit in hits("--retriever", f"rerank(rrf(hnsw, exact), {cross}, 9)"):
        assert [leg["leg"] for leg in hit["legs"]][-1] == "rrf(hnsw, exact)"
        assert 1 <= hit["legs"][-1]["rank"] <= 9


def test_a_fused_retriever_is_measured_and_answered_from(
    library: Path, rag: Path, questions: Path, bookwheel: Bookwheel
) -> None:
    named = "rrf(hnsw, exact:30)"
    result = bookwheel("evaluate", "--store", library, "--questions", questions, "--retriever", named, "--json")
    assert (result.code, result.json["retriever"], result.json["n"]) == (0, named, 2), result.err
    assert list(result.json["metrics"]) == ["Success@1", "Success@5", "Success@20"]
    given = ["--store", library, "--questions", questions, "--model", rag, "--retriever", named, "--json"]
    result = bookwheel("evaluate", *given)
    assert (result.code, result.json["retriever"]) == (0, named), result.err
    fused, plain = (
        bookwheel("answer", ASKED, "--store", library, "--model", rag, "-k", 3, "--retriever", one, "--json").json
        for one in (named, "exact")
    )
    weights = [{one["id"]: one["weight"] for one in told["answers"][0]["passages"]} for told in (fused, plain)]
    assert weights[0] == pytest.approx(weights[1], abs=1e-4), "both find the same three, weighed alike"


def test_a_retriever_may_stand_in_the_settings(
    library: Path, bookwheel: Bookwheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOOKWHEEL_RETRIEVER", "rrf(hnsw, exact)")
    result = bookwheel("search", ASKED, "--store", library, "--json")
    assert "legs" in result.json["results"][0]["hits"][0]
    result = bookwheel("search", ASKED, "--store", library, "--index", "exact", "--json")
    assert (result.code, "legs" in result.json["results"][0]["hits"][0]) == (0, False), "a flag goes before a setting"
    monkeypatch.setenv("BOOKWHEEL_INDEX", "exact")
    result = bookwheel("search", ASKED, "--store", library)
    assert (result.code, "on the command line or in the settings" in result.complaint) == (2, True)
    monkeypatch.delenv("BOOKWHEEL_RETRIEVER")
    result = bookwheel("search", ASKED, "--store", library, "--retriever", "rrf(hnsw, exact)", "--json")
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
    ("verb", "expression", "says"),
    [("search", *wrong) for wrong in WRONG] + [(verb, *WRONG[0]) for verb in ("evaluate", "answer")],
    ids=range(len(WRONG) + 2),
)
def test_a_wrong_retriever_is_one_sentence(
    verb: str, expression: str, says: str, library: Path, tiny: Path, rag: Path, questions: Path, bookwheel: Bookwheel
) -> None:
    words = {"search": [ASKED, "-k", 5], "evaluate": ["--questions", questions, "-k", 5]}.get(verb, [ASKED, "-k", 5])
    words += ["--model", rag] if verb == "answer" else []
    result = bookwheel(verb, *words, "--store", library, "--retriever", expression.replace("{bi}", str(tiny)))
    assert result.code == (1 if "rerank" in expression else 2), result.err
    assert says in result.complaint
    assert len(result.complaint) < 400


def test_a_depth_above_the_number_of_passages_is_all_of_them(library: Path, bookwheel: Bookwheel) -> None:
    deep, plain = (
        bookwheel("search", ASKED, "--store", library, "--retriever", named, "--json").json
        for named in ("exact:1000000000", "exact")
    )
    assert deep == plain
