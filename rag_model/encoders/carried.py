"""The encoder of a folder in a store or a snapshot, of whichever kind its record says."""

from collections.abc import Callable
from pathlib import Path

from rag_model.encoders.bag import BagEncoder, is_bag
from rag_model.encoders.encoder import Encoder, Role
from rag_model.encoders.files import optional_object
from rag_model.encoders.muvera import RECORDED, MuveraEncoder
from rag_model.encoders.resolve import resolve_folder
from rag_model.encoders.sparse_encoder import SparseEncoder
from rag_model.encoders.sparse_spec import is_sparse_encoder
from rag_model.encoders.spec import RECORD_FILE
from rag_model.encoders.token_encoder import TokenEncoder
from rag_model.encoders.token_spec import is_token_encoder

Carried = Encoder | TokenEncoder | MuveraEncoder | SparseEncoder


def _is_muvera(folder: Path) -> bool:
    return RECORDED in optional_object(folder / RECORD_FILE)


_OTHERS: tuple[tuple[Callable[[Path], bool], Callable[[Path], Carried]], ...] = (  # the first that fits
    (_is_muvera, MuveraEncoder.load),
    (is_token_encoder, TokenEncoder.load),
    (is_sparse_encoder, SparseEncoder.load),
)


def load_carried(folder: Path, role: Role = "question") -> Carried:
    """Load the encoder of a folder: of one vector a text, of many, of many that become one, or of weighted terms.

    Raises:
        InputError: a file is missing or corrupt.
        MissingExtraError: the model extra is not installed.
    """
    found = next((load for fits, load in _OTHERS if fits(folder)), None)
    return Encoder.load(folder, role) if found is None else found(folder)


def load_reading(folder: Path) -> Carried | BagEncoder:
    """Load what encodes passages: an encoder of any kind, or a tokenizer that makes bags.

    Raises:
        InputError: a file is missing or corrupt.
        MissingExtraError: the model extra is not installed.
    """
    return BagEncoder.load(folder) if is_bag(folder) else load_carried(folder, "passage")


def load_asking(name: str) -> Carried:
    """Load the encoder of questions that is named: a folder of any kind, or a hub name.

    Raises:
        InputError: it is not found, or a file is missing or corrupt.
        MissingExtraError: the model extra is not installed.
    """
    folder = resolve_folder(name)
    found = next((load for fits, load in _OTHERS if fits(folder)), None)
    return Encoder.load(name, "question") if found is None else found(folder)
