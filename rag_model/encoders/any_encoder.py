"""Load an encoder of any kind; the record in its folder decides which."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Union

from rag_model.encoders.bag import BagEncoder, is_bag_encoder
from rag_model.encoders.encoder import Encoder, Role
from rag_model.encoders.files import ENDPOINT_PREFIX, read_optional_json, resolve_folder
from rag_model.encoders.muvera import MUVERA_KEY, MuveraEncoder
from rag_model.encoders.sparse_encoder import SparseEncoder
from rag_model.encoders.sparse_spec import is_sparse_encoder
from rag_model.encoders.spec import RECORD_FILE, is_endpoint_encoder
from rag_model.encoders.token_encoder import TokenEncoder
from rag_model.encoders.token_spec import is_token_encoder
from rag_model.errors import UsageError

if TYPE_CHECKING:
    from rag_model.encoders.endpoint_encoder import EndpointEncoder

AnyEncoder = Union[Encoder, "EndpointEncoder", TokenEncoder, MuveraEncoder, SparseEncoder]


def _is_muvera(folder: Path) -> bool:
    return MUVERA_KEY in read_optional_json(folder / RECORD_FILE)


def _load_endpoint_encoder(folder: Path) -> "EndpointEncoder":
    from rag_model.encoders.endpoint_encoder import EndpointEncoder  # noqa: PLC0415 - imports HTTP

    return EndpointEncoder.load(folder)


_LOADERS: tuple[
    tuple[Callable[[Path], bool], Callable[[Path], AnyEncoder]], ...
] = (  # the first whose predicate is true
    (_is_muvera, MuveraEncoder.load),
    (is_endpoint_encoder, _load_endpoint_encoder),
    (is_token_encoder, TokenEncoder.load),
    (is_sparse_encoder, SparseEncoder.load),
)


def load_any_encoder(folder: Path, role: Role = "question") -> AnyEncoder:
    """Load the dense, ColBERT, MUVERA or sparse encoder of a folder.

    Raises:
        InputError: a file is missing or corrupt.
        MissingExtraError: the model extra is not installed.
    """
    load_kind = next((load for matches, load in _LOADERS if matches(folder)), None)
    return Encoder.load(folder, role) if load_kind is None else load_kind(folder)


def load_passage_encoder(folder: Path) -> AnyEncoder | BagEncoder:
    """Load the passage encoder of a folder: an encoder of any kind, or a bag-of-tokens encoder.

    Raises:
        InputError: a file is missing or corrupt.
        MissingExtraError: the model extra is not installed.
    """
    return BagEncoder.load(folder) if is_bag_encoder(folder) else load_any_encoder(folder, "passage")


def load_question_encoder(name: str) -> AnyEncoder:
    """Load a question encoder by name: a folder with an encoder of any kind, or a hub name.

    Raises:
        InputError: it is not found, or a file is missing or corrupt.
        MissingExtraError: the model extra is not installed.
        UsageError: it names a model behind an endpoint, which belongs to its snapshots.
    """
    if name.startswith(ENDPOINT_PREFIX):
        raise UsageError(
            f"{name} is the encoder of the snapshots that were built with it, which need no other one: leave it out"
        )
    folder = resolve_folder(name)
    load_kind = next((load for matches, load in _LOADERS if matches(folder)), None)
    return Encoder.load(name, "question") if load_kind is None else load_kind(folder)
