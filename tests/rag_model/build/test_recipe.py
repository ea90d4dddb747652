import re
from pathlib import Path

import pytest

from rag_model.build.recipe import Recipe, read_recipe
from rag_model.errors import BookwheelError, InputError, UsageError

README = Path(__file__).parents[3] / "README.md"


@pytest.fixture
def read(tmp_path: Path):
    def read(text: str) -> Recipe:
        path = tmp_path / "recipe.toml"
        path.write_text(text)
        return read_recipe(path)

    return read


def test_an_empty_file_is_the_default_recipe(read) -> None:
    assert read("") == Recipe() == read_recipe(None)


def test_the_recipe_of_the_readme_is_a_recipe(read) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", README.read_text(), re.DOTALL)
    recipe = read(text)
    assert recipe.encode.spec == {"passage_prompt": "passage: ", "question_prompt": "query: "}
    assert set(recipe.index) == {"hnsw", "ivfpq"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[chunks]\nwords = 1", "did you mean 'chunk'"),
        ("[chunk]\nwords = 1.5", "must be a whole number"),
        ("[chunk]\nwords = true", "must be a whole number"),
        ("[chunk]\nwords = 0", "at least 1"),
        ('[chunk]\nchunker = "tokens"', "choose one of words, sections"),
        ("[chunk]\nquarantine_share = nan", "share from 0 to 1"),
        ('chunk = "x"', "must be a table"),
        ('[encode]\ndtype = "int8"', "choose one of float16, float32"),
        ("[index]", "names no index"),
        ('[index.a]\nmetric = "ip"', "lacks 'factory'"),
        ('[index.a]\nfactory = "HNSW99999999999"', "more than any index holds"),
        ('[index."../x"]\nfactory = "Flat"', "is not a name for an index"),
        ('[index.exact]\nfactory = "HNSW32"', "compares with every vector"),
        ("part_bytes = 0", "at least 1"),
        ("[gate]\nmax_passage_loss = -1", "share from 0 to 1"),
    ],
)
def test_a_wrong_setting_is_one_sentence_before_any_work(read, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)) as caught:
        read(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[[[", "\0", "a = "])
def test_what_is_not_toml_is_refused(read, text: str) -> None:
    with pytest.raises(InputError, match="not TOML"):
        read(text)


def test_a_recipe_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BookwheelError, match=r"none\.toml"):
        read_recipe(tmp_path / "none.toml")
