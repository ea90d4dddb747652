"""The encoders of a build, one per representation."""

from rag_model.encoders.muvera import RECORDED as MUVERA
from rag_model.errors import UsageError
from rag_model.snapshots.encoding import StoredEncoder, store_encoder, store_token_encoder
from rag_model.snapshots.recipe import Recipe
from rag_model.store.store import Store
from rag_model.store.versions.paths import EMBEDDINGS, TOKENS


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
        if recipe.represented()[name] == TOKENS or its.kind == MUVERA:
            found[name] = store_token_encoder(store, its.encoder, its, models)
        else:
            found[name] = store_encoder(store, its.encoder, its.encode, models)
    return found
