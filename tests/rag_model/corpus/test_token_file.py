"""Token vectors of a part in one file: rows of any length, read in blocks or by row; damage is refused."""

from pathlib import Path

import numpy as np
import pytest

from rag_model.corpus.ragged_file import ROWS, offsets_of
from rag_model.corpus.token_file import TokenFile, TokenVectors, TokenWriter, is_token_file
from rag_model.errors import InputError


def tokens(rows: int, seed: int = 0) -> TokenVectors:
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 9, rows)
    return TokenVectors(random.normal(size=(lengths.sum(), 8)).astype(np.float16), offsets_of(lengths))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of several record batches."""
    path = tmp_path / "part.arrow"
    with TokenWriter(path, 8, "float16") as writer:
        writer.write(tokens(2 * ROWS + 5))
    return path


def test_rows_are_read_back_in_blocks_and_by_row(file: Path) -> None:
    own, read = tokens(2 * ROWS + 5), TokenFile(file)
    assert (read.n, read.tokens, read.dim, read.dtype) == (2 * ROWS + 5, len(own.vectors), 8, np.float16)
    every = TokenVectors.joined(list(read.blocks()))
    assert (every.vectors == own.vectors).all()
    assert (every.offsets == own.offsets).all()
    rows = np.array([0, ROWS - 1, ROWS, 2 * ROWS + 4])
    some = read.take(rows)
    assert (some.vectors == own.take(rows).vectors).all()
    assert read.take(np.empty(0, np.int64)).offsets.tolist() == [0]
    assert is_token_file(file)


def test_a_part_without_passages_is_a_file_without_rows(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "none", 8, "float16"):
        pass
    assert (TokenFile(tmp_path / "none").n, list(TokenFile(tmp_path / "none").blocks())) == (0, [])


def test_damage_is_refused(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    np.save(tmp_path / "other.npy", np.ones((2, 2)))
    for broken in (b"", whole[:-100], whole[: len(whole) // 2], (tmp_path / "other.npy").read_bytes()):
        (tmp_path / "broken").write_bytes(broken)
        with pytest.raises(InputError, match="no complete file of token vectors"):
            TokenFile(tmp_path / "broken")
    with pytest.raises(InputError):
        TokenFile(tmp_path / "missing")
    with TokenWriter(tmp_path / "nan", 8, "float32") as writer:
        writer.write(TokenVectors(np.full((2, 8), np.nan, np.float32), np.array([0, 1, 2])))
    with pytest.raises(InputError, match="NaN"):
        list(TokenFile(tmp_path / "nan").blocks())
