"""The encoders of a build, one per representation."""

from collections.abc import Callable

from rag_model.errors import UsageError
from rag_model.snapshots.encoding import (
    RepresentRecipe,
    StoredEncoder,
    store_bag,
    store_encoder,
    store_sparse_encoder,
    store_token_encoder,
)
from rag_model.snapshots.recipe import Recipe
from rag_model.store.store import Store
from rag_model.store.versions.paths import EMBEDDINGS


def store_encoders(store: Store, encoder: str, recipe: Recipe, models: Store | None = None) -> dict[str, StoredEncoder]:
    """Put the encoder of each representation into the store; return them by representation, `embeddings` first.

    Raises:
        UsageError: a representation of the recipe names no encoder.
        BookwheelError: as `store_encoder`.
    """
    for name, its in recipe.represent.items():
        if not its.encoder:
            raise UsageError(f"[represent.{name}] of the recipe names no encoder: add encoder = FOLDER or model:NAME")
    found = {EMBEDDINGS: store_encoder(store, encoder, recipe.encode, models)}
    for name, its in recipe.represent.items():
        found[name] = _STORING[its.kind or recipe.represented()[name]](store, its.encoder, its, models)
    return found


def _store_encoder(store: Store, name: str, recipe: RepresentRecipe, models: Store | None) -> StoredEncoder:
    return store_encoder(store, name, recipe.encode, models)


_STORING: dict[str, Callable[[Store, str, RepresentRecipe, Store | None], StoredEncoder]] = {
    "vectors": _store_encoder,
    "tokens": store_token_encoder,
    "muvera": store_token_encoder,
    "sparse": store_sparse_encoder,
    "bag": store_bag,
}
