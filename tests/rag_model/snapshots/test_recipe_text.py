"""Reading a written recipe gives the same recipe."""

from dataclasses import replace
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rag_model.corpus.chunk import ChunkRecipe
from rag_model.digest import digest_json
from rag_model.index.recipe import IndexRecipe
from rag_model.snapshots.encoding import EncodeRecipe
from rag_model.snapshots.recipe import Recipe, format_recipe, read_recipe

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


def write_and_read(recipe: Recipe, folder: Path) -> Recipe:
    (folder / "recipe.toml").write_text(format_recipe(recipe.content()), encoding="utf-8", newline="\n")
    return read_recipe(folder / "recipe.toml")


@given(recipes)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_written_recipe_is_read_back(tmp_path: Path, recipe: Recipe) -> None:
    assert digest_json(write_and_read(recipe, tmp_path).content()) == digest_json(recipe.content())


def test_the_default_recipe_is_written_with_all_its_settings(tmp_path: Path) -> None:
    assert write_and_read(Recipe(), tmp_path) == replace(Recipe(), chunk=ChunkRecipe(words=120))
    assert '[index.hnsw]\nfactory = "HNSW"\n' in format_recipe(Recipe().content())
