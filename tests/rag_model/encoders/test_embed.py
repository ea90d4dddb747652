from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rag_model.corpus.records import Passage
from rag_model.encoders.embed import EmbedStats, VectorFormat
from rag_model.encoders.encoder import Encoder
from rag_model.errors import InputError
from tests.fixtures.tiny import embed_part
from tests.fixtures.tiny_static import save_static_embedding

Texts = tuple[list[str], list[str]]


def write_passages(path: Path, texts: Texts) -> Path:
    hashes = [Passage.hash_of(title, text) for title, text in zip(*texts, strict=True)]
    table = pa.table({"id": [str(i) for i in range(len(hashes))], "title": texts[0], "text": texts[1], "hash": hashes})
    pq.write_table(table, path, row_group_size=7)
    return path


@pytest.fixture(scope="module")
def encoder(tiny_bert: Path) -> Encoder:
    return Encoder.load(tiny_bert, dtype="float32")


def test_row_i_is_the_vector_of_passage_i(tmp_path: Path, encoder: Encoder, texts: Texts) -> None:
    stats = embed_part(write_passages(tmp_path / "p.parquet", texts), tmp_path / "v.npy", encoder, "float32")
    vectors = np.load(tmp_path / "v.npy", allow_pickle=False, mmap_mode="r")
    assert (vectors.shape, vectors.dtype, vectors.flags.c_contiguous) == ((30, 32), np.float32, True)
    for row, (title, text) in enumerate(zip(*texts, strict=True)):
        np.testing.assert_allclose(vectors[row], encoder.encode_passages([title], [text])[0], atol=1e-5)
    assert stats == EmbedStats(30, 32, 30, stats.tokens, "cpu", "float32")
    assert stats.tokens == sum(
        len(encoder.tokenizer.encode(f"{a} {b}".strip()).ids) for a, b in zip(*texts, strict=True)
    )


def test_windows_give_equal_vectors(
    tmp_path: Path, encoder: Encoder, texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_passages(tmp_path / "p.parquet", texts)
    embed_part(source, tmp_path / "whole.npy", encoder, "float32")
    monkeypatch.setattr("rag_model.encoders.encoder._WINDOW", 4)
    embed_part(source, tmp_path / "windows.npy", encoder, "float32")
    np.testing.assert_allclose(np.load(tmp_path / "windows.npy"), np.load(tmp_path / "whole.npy"), atol=1e-5)


def test_half_precision_is_the_default(tmp_path: Path, encoder: Encoder, texts: Texts) -> None:
    embed_part(write_passages(tmp_path / "p.parquet", texts), tmp_path / "v.npy", encoder)
    vectors = np.load(tmp_path / "v.npy")
    assert vectors.dtype == np.float16
    np.testing.assert_allclose(vectors, encoder.encode_passages(*texts), atol=1e-3)


def test_the_same_part_gives_the_same_bytes(tmp_path: Path, encoder: Encoder, texts: Texts) -> None:
    source = write_passages(tmp_path / "p.parquet", texts)
    for name in ("a.npy", "b.npy"):
        embed_part(source, tmp_path / name, encoder)
    assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()


def test_an_empty_part_has_no_rows(tmp_path: Path, encoder: Encoder) -> None:
    embed_part(write_passages(tmp_path / "p.parquet", (["x"], ["y"])), tmp_path / "v.npy", encoder)
    schema = pa.schema({"title": pa.string(), "text": pa.string()})
    pq.write_table(schema.empty_table(), tmp_path / "empty.parquet")
    assert embed_part(tmp_path / "empty.parquet", tmp_path / "v.npy", encoder).rows == 0
    assert np.load(tmp_path / "v.npy").shape == (0, 32)


def test_a_corrupt_part_is_named(tmp_path: Path, encoder: Encoder, texts: Texts) -> None:
    source = write_passages(tmp_path / "p.parquet", texts)
    data = bytearray(source.read_bytes())
    (tmp_path / "cut.parquet").write_bytes(data[:-20])
    with pytest.raises(InputError, match=r"cut\.parquet is not a readable passage file"):
        embed_part(tmp_path / "cut.parquet", tmp_path / "v.npy", encoder)
    with pytest.raises(InputError, match=r"none\.parquet is not a readable passage file"):
        embed_part(tmp_path / "none.parquet", tmp_path / "v.npy", encoder)
    pq.write_table(pa.table({"title": ["x"]}), tmp_path / "other.parquet")
    with pytest.raises(InputError, match=r"other\.parquet lacks the columns text of a passage file"):
        embed_part(tmp_path / "other.parquet", tmp_path / "v.npy", encoder)


def test_known_passages_keep_their_vectors_in_any_row(
    tmp_path: Path, encoder: Encoder, texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of two known parts are mixed with new rows, of which there are more than fit into a window."""
    monkeypatch.setattr("rag_model.encoders.encoder._WINDOW", 4)
    known_parts = []
    for name, rows in (("a", slice(0, 8)), ("b", slice(8, 14))):
        part = write_passages(tmp_path / f"{name}.parquet", (texts[0][rows], texts[1][rows]))
        marked_vectors = (
            np.full((rows.stop - rows.start, 32), ord(name), np.float16) + np.arange(rows.start, rows.stop)[:, None]
        )
        np.save(tmp_path / f"{name}.npy", marked_vectors.astype(np.float16))
        known_parts.append((part, tmp_path / f"{name}.npy"))
    order = [*range(20, 24), 3, 25, 12, 0, 1, 26, 9, *range(27, 30)]
    new_rows = [row for row in order if row >= 14]
    source = write_passages(tmp_path / "now.parquet", tuple([column[row] for row in order] for column in texts))
    stats = VectorFormat(32, "float16").embed(source, tmp_path / "now.npy", lambda: encoder, known_parts)
    assert (stats.rows, stats.encoded) == (len(order), len(new_rows))
    assert VectorFormat(32, "float16").count_reusable(source, known_parts) == len(order) - len(new_rows)
    embed_part(source, tmp_path / "full.npy", encoder)
    vectors, full = np.load(tmp_path / "now.npy"), np.load(tmp_path / "full.npy")
    for position, row in enumerate(order):
        expected = full[position] if row in new_rows else np.full(32, (97 if row < 8 else 98) + row)
        np.testing.assert_allclose(vectors[position], expected, atol=1e-3)


def test_encoder_is_not_loaded_if_all_passages_are_known(tmp_path: Path, encoder: Encoder, texts: Texts) -> None:
    source = write_passages(tmp_path / "p.parquet", texts)
    embed_part(source, tmp_path / "v.npy", encoder)

    def refuse() -> Encoder:
        raise AssertionError("an encoder is loaded")

    stats = VectorFormat(32, "float16").embed(source, tmp_path / "w.npy", refuse, [(source, tmp_path / "v.npy")])
    assert (stats.rows, stats.encoded, stats.device) == (30, 0, "")
    assert (tmp_path / "w.npy").read_bytes() == (tmp_path / "v.npy").read_bytes()


def test_vectors_of_another_dtype_or_length_are_not_reused(tmp_path: Path, encoder: Encoder, texts: Texts) -> None:
    source = write_passages(tmp_path / "p.parquet", texts)
    embed_part(source, tmp_path / "v.npy", encoder, "float32")
    np.save(tmp_path / "short.npy", np.zeros((30, 16), np.float16))
    for file_name in ("v.npy", "short.npy"):
        stats = VectorFormat(32, "float16").embed(
            source, tmp_path / "w.npy", lambda: encoder, [(source, tmp_path / file_name)]
        )
        assert stats.encoded == 30


LENGTHS = [1, 22, 23, 61, 62, 63, 400]  # words of one token each; two tokens are special


@pytest.mark.parametrize("layout", ["joined", "pair"])
def test_truncated_passages_are_counted(tmp_path: Path, tiny_bert: Path, layout: str) -> None:
    encoder = Encoder.load(tiny_bert, overrides={"max_length": 24, "layout": layout}, dtype="float32")
    for title, longest in (("", 22), ("king", 21 if layout == "joined" else 20)):
        texts = [title] * len(LENGTHS), ["river " * words for words in LENGTHS]
        stats = embed_part(write_passages(tmp_path / "p.parquet", texts), tmp_path / "v.npy", encoder)
        assert stats.truncated == sum(words > longest for words in LENGTHS)
    part = tmp_path / "p.parquet", tmp_path / "v.npy"
    stats = VectorFormat(32, "float16").embed(part[0], tmp_path / "again.npy", lambda: encoder, [part])
    assert (stats.encoded, stats.truncated) == (0, 0)


def test_truncated_texts_of_static_encoders_are_counted(tmp_path: Path) -> None:
    texts = [""] * len(LENGTHS), ["river " * words for words in LENGTHS]
    limited = Encoder.load(save_static_embedding(tmp_path / "limited", truncate=22))
    assert embed_part(write_passages(tmp_path / "p.parquet", texts), tmp_path / "v.npy", limited).truncated == 5
    unlimited = Encoder.load(save_static_embedding(tmp_path / "unlimited"))
    assert embed_part(write_passages(tmp_path / "p.parquet", texts), tmp_path / "v.npy", unlimited).truncated == 0
