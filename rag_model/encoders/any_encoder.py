"""Load an encoder of any kind; the record in its folder decides which.

Only the module of that kind is imported.
"""

# ruff: noqa: PLC0415
from pathlib import Path
from typing import TYPE_CHECKING, Union

from rag_model.encoders.encoder import Encoder, Role
from rag_model.encoders.files import ENDPOINT_PREFIX, resolve_folder
from rag_model.encoders.spec import (
    is_bag_encoder,
    is_endpoint_encoder,
    is_muvera_encoder,
    is_sparse_encoder,
    is_token_encoder,
)
from rag_model.errors import UsageError

if TYPE_CHECKING:
    from rag_model.encoders.bag import BagEncoder
    from rag_model.encoders.endpoint_encoder import EndpointEncoder
    from rag_model.encoders.muvera import MuveraEncoder
    from rag_model.encoders.sparse_encoder import SparseEncoder
    from rag_model.encoders.token_encoder import TokenEncoder

AnyEncoder = Union[Encoder, "EndpointEncoder", "TokenEncoder", "MuveraEncoder", "SparseEncoder"]


def load_any_encoder(folder: Path, role: Role = "question", name: str = "") -> AnyEncoder:
    """Load the dense, ColBERT, MUVERA or sparse encoder of a folder.

    A dense encoder gets the `name`, by default that of the folder.

    Raises:
        InputError: a file is missing or corrupt.
        MissingExtraError: the model extra is not installed.
    """
    if is_muvera_encoder(folder):
        from rag_model.encoders.muvera import MuveraEncoder

        return MuveraEncoder.load(folder)
    if is_endpoint_encoder(folder):
        from rag_model.encoders.endpoint_encoder import EndpointEncoder

        return EndpointEncoder.load(folder)
    if is_token_encoder(folder):
        from rag_model.encoders.token_encoder import TokenEncoder

        return TokenEncoder.load(folder)
    if is_sparse_encoder(folder):
        from rag_model.encoders.sparse_encoder import SparseEncoder

        return SparseEncoder.load(folder)
    return Encoder.load(name or folder, role)


def load_passage_encoder(folder: Path) -> Union[AnyEncoder, "BagEncoder"]:
    """Load the passage encoder of a folder: an encoder of any kind, or a bag-of-tokens encoder.

    Raises:
        InputError: a file is missing or corrupt.
        MissingExtraError: the model extra is not installed.
    """
    if is_bag_encoder(folder):
        from rag_model.encoders.bag import BagEncoder

        return BagEncoder.load(folder)
    return load_any_encoder(folder, "passage")


def load_question_encoder(name: str) -> AnyEncoder:
    """Load a question encoder by name: a folder with an encoder of any kind, or a hub name.

    Raises:
        InputError: it is not found, or a file is missing or corrupt.
        MissingExtraError: the model extra is not installed.
        UsageError: `name` is a model behind an endpoint, which snapshots record themselves.
    """
    if name.startswith(ENDPOINT_PREFIX):
        raise UsageError(f"{name} cannot be given here: snapshots that were built with it record it; leave it out")
    return load_any_encoder(resolve_folder(name), name=name)
