"""The encoder of a folder in a store or a snapshot, of whichever kind its record says."""

from pathlib import Path

from rag_model.encoders.encoder import Encoder, Role
from rag_model.encoders.files import optional_object
from rag_model.encoders.muvera import RECORDED, MuveraEncoder
from rag_model.encoders.spec import RECORD_FILE
from rag_model.encoders.token_encoder import TokenEncoder
from rag_model.encoders.token_spec import is_token_encoder


def load_carried(folder: Path, role: Role = "question") -> Encoder | TokenEncoder | MuveraEncoder:
    """Load the encoder of a folder: of one vector a text, of many, or of many that become one.

    Raises:
        InputError: a file is missing or corrupt.
        MissingExtraError: the model extra is not installed.
    """
    if RECORDED in optional_object(folder / RECORD_FILE):
        return MuveraEncoder.load(folder)
    return TokenEncoder.load(folder) if is_token_encoder(folder) else Encoder.load(folder, role)
