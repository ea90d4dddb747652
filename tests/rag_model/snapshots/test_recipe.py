"""A recipe file: missing settings have defaults, and each mistake is one sentence that names the setting."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rag_model.corpus.chunk import ChunkRecipe
from rag_model.digest import digest_json
from rag_model.errors import BookwheelError, UsageError
from rag_model.evaluation.gate import QuestionFloor
from rag_model.index.recipe import IndexRecipe
from rag_model.snapshots.encoding import EncodeRecipe
from rag_model.snapshots.recipe import Recipe, check_indexes_and_retrievers, format_recipe, read_recipe

FULL_RECIPE = """
part_bytes = 1_000_000

[chunk]
chunker = "words"
words = 50

[encode]
dtype = "float32"
spec = { max_length = 128, pooling = "cls" }

[index.graph]
factory = "HNSW16"
ef_construction = 200
search = { efSearch = 64 }

[index.codes]
factory = "IVF64,PQ8"
metric = "l2"

[gate]
k = 10
max_passage_loss = 1

[gate.floors.codes]
mean = 0.5
p5 = 0

[gate.questions.dev]
file = "dev.jsonl"
floor = 0.75
measure = "nDCG@10"
judged_by = "passages"
"""


def read_text(folder: Path, text: str) -> Recipe:
    path = folder / "recipe.toml"
    path.write_text(text, encoding="utf-8", newline="\n")
    return read_recipe(path)


def test_recipe_in_the_documentation_is_valid(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "howto" / "build.md").read_text(encoding="utf-8")
    text, *_ = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    recipe = read_text(tmp_path, text)
    assert recipe.encode.spec == {"passage_prompt": "passage: ", "question_prompt": "query: "}
    assert set(recipe.index) == {"hnsw", "ivfpq", "bm25"}


def test_missing_and_empty_file_give_the_default(tmp_path: Path) -> None:
    assert read_recipe(None) == read_text(tmp_path, "") == Recipe()
    assert set(Recipe().index) == {"hnsw", "ivfpq", "bm25"}


def test_every_setting_is_read(tmp_path: Path) -> None:
    recipe = read_text(tmp_path, FULL_RECIPE)
    assert recipe.part_bytes == 1_000_000
    assert (recipe.chunk.chunker, recipe.chunk.words) == ("words", 50)
    assert (recipe.encode.dtype, recipe.encode.spec) == ("float32", {"max_length": 128, "pooling": "cls"})
    assert list(recipe.index) == ["graph", "codes"]
    assert recipe.index["graph"].search == {"efSearch": 64}
    assert recipe.index["codes"].metric == "l2"
    assert recipe.gate.max_passage_loss == 1.0
    assert recipe.gate.floor("codes", "IVF64,PQ8").p5 == 0.0
    assert recipe.gate.questions == {"dev": QuestionFloor("dev.jsonl", 0.75, "nDCG@10", "", "passages")}
    assert recipe.gate.floor("graph", "HNSW16") == Recipe().gate.floor("graph", "HNSW16")


def test_gate_and_encoder_path_do_not_change_the_content(tmp_path: Path) -> None:
    recipe = read_text(tmp_path, "[gate]\nk = 3\n[encode]\nquestion_encoder = 'somewhere'\n")
    assert recipe.content() == Recipe().content()
    assert read_text(tmp_path, "[chunk]\nwords = 99").content() != Recipe().content()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[gates]", "recipe.toml has no setting 'gates': did you mean 'gate'?"),
        ("[chunk]\nxyz = 1", r"recipe.toml, chunk has no setting 'xyz': choose from chunker, words"),
        ("chunk = 3", "recipe.toml, chunk must be a table of settings, not 3"),
        ("part_bytes = 1.5", "part_bytes must be a whole number, not 1.5"),
        ("[chunk]\nwords = true", "chunk, words must be a whole number, not true"),
        ("[index]\nhnsw = 'HNSW32'", "index.hnsw must be a table of settings, not 'HNSW32'"),
        ("retriever = ['bm25', 'hnsw']", r'retriever must be a text, not \["bm25", "hnsw"\]'),
        ("index = 3", "index must be a table, not 3"),
        ("[index.a]\nmetric = 'ip'", "index.a lacks 'factory'"),
        ("[index.a]\nfactory = 'HNSW32'\nmetric = 'cosine'", "index.a, metric is 'cosine': choose one of ip, l2"),
        ("[index.a]\nfactory = 'HNSW32'\nborder = 2", "need 0 <= border <= 1"),
        ("[index.a]\nfactory = 'HNSW32'\nsearch = { nprobe = 3 }", "nprobe"),
        ("[index.a]\nfactory = 'HNSW99999999999'", "is too large"),
        ("[index.'../x']\nfactory = 'Flat'", "cannot name an index"),
        ("[index.exact]\nfactory = 'HNSW32'", "compares every vector"),
        ("[index]", "names no index"),
        ("[chunk]\nwords = 0", "at least 1"),
        ("[chunk]\nchunker = 'topics'", "choose one of words, sections"),
        ("[chunk]\nquarantine_share = 1.5", "quarantine_share must be from 0 to 1"),
        ("[chunk]\nquarantine_share = nan", "quarantine_share is nan: give a finite number"),
        ("[gate.floors.a]\nmean = 1.5\np5 = 0.5", "from 0 to 1"),
        ("part_bytes = 0", "at least 1"),
        ("[gate.floors.a]\nmean = 1", "gate, floors.a lacks 'p5'"),
        ("[gate.questions.a]\nfile = 'q'", "gate, questions.a lacks 'floor'"),
        ("[gate.questions.a]\nfile = 'q'\nfloor = 75", "the floor of Success@20 is 75.0: give a number from 0 to 1"),
        ("[gate.questions.a]\nfile = 'q'\nfloor = 1\njudged_by = 'me'", "choose one of answers, pages, passages"),
    ],
)
def test_mistake_is_explained_in_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        read_text(tmp_path, text)
    assert "\n" not in str(error.value)


def test_unreadable_recipe_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"name = '\xe9'")
    for path in (tmp_path / "absent", tmp_path, tmp_path / "latin"):
        with pytest.raises(UsageError, match="recipe") as error:
            read_recipe(path)
        assert isinstance(error.value, BookwheelError)
        assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("file = '{folder}/none.jsonl'", "the gate.s questions dev cannot be used: .*none.jsonl cannot be read"),
        ("retriever = 'rrf(hnsw, bm52)'", "the gate.s questions dev cannot be used: .* has no index 'bm52'"),
        ("measure = 'nDCG@10'", "'nDCG@10' is not a measure of questions judged by answers"),
        ("judged_by = 'passages'", "question '0' names no passages"),
    ],
)
def test_unmeasurable_floor_is_refused_before_the_build(tmp_path: Path, setting: str, message: str) -> None:
    question_file = tmp_path / "dev.jsonl"
    question_file.write_text('{"question": "Who?", "answers": ["me"]}\n')
    table = {"file": f"'{question_file}'", "floor": "0.5"} | dict([setting.split(" = ")])
    lines = "\n".join(f"{name} = {value}" for name, value in table.items()).replace("{folder}", str(tmp_path))
    with pytest.raises(BookwheelError, match=message):
        check_indexes_and_retrievers(read_text(tmp_path, f"[gate.questions.dev]\n{lines}\n"), {"embeddings": "vectors"})
    check_indexes_and_retrievers(
        read_text(tmp_path, f"[gate.questions.dev]\nfile = '{question_file}'\nfloor = 0.5\n"), {"embeddings": "vectors"}
    )


INDEXES = [
    IndexRecipe("HNSW8", cells=3, search={"efSearch": 50}),
    IndexRecipe("IVF,PQ", metric="l2", recall_target=0.95, train_sample=10),
    IndexRecipe("Flat"),
]
recipes = st.builds(
    Recipe,
    chunk=st.builds(ChunkRecipe, words=st.integers(1, 500), quarantine_share=st.floats(0, 1)),
    encode=st.builds(
        EncodeRecipe,
        spec=st.dictionaries(
            st.text(max_size=9), st.text(st.characters(codec="utf-8"), max_size=20) | st.integers(1, 9)
        ),
    ),
    index=st.dictionaries(st.from_regex("[A-Za-z0-9_-]{1,9}", fullmatch=True), st.sampled_from(INDEXES), min_size=1),
    part_bytes=st.none() | st.integers(1, 1 << 40),
)


@given(recipes)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_written_recipe_is_read_back(tmp_path: Path, recipe: Recipe) -> None:
    assert digest_json(read_text(tmp_path, format_recipe(recipe.content())).content()) == digest_json(recipe.content())


def test_default_recipe_is_written_with_all_its_settings(tmp_path: Path) -> None:
    text = format_recipe(Recipe().content())
    assert read_text(tmp_path, text) == replace(Recipe(), chunk=ChunkRecipe(words=120))
    assert '[index.hnsw]\nfactory = "HNSW"\n' in text
