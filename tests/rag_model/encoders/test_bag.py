"""Bags of tokens: the terms of a passage, their space, and the encoders that may query them."""

import json
from pathlib import Path

import pytest

from rag_model.encoders.bag import BagEncoder, BagSpec, collect_bag_files, compute_bag_space, read_bag_spec
from rag_model.encoders.encoder import load_passage_encoder
from rag_model.encoders.space import check_same_space
from rag_model.encoders.sparse_encoder import SparseEncoder
from rag_model.encoders.tokens import load_tokenizer
from rag_model.errors import InputError, RefusedError, UsageError
from tests.fixtures.tiny_colbert import save_marked_bert
from tests.fixtures.tiny_sidr import save_sidr

TEXTS = ["the king was born, the king was in the city", "", "music"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sidr(tmp_path_factory.mktemp("sidr") / "sidr")


def collect_files(folder: Path, work: Path, spec: BagSpec | None = None) -> Path:
    """Write the files that workers get, which contain no weights."""
    work.mkdir()
    files = collect_bag_files(folder, spec or read_bag_spec(folder), work)
    for name, path in files.items():
        (work / name).write_bytes(path.read_bytes())
    return work


def test_a_bag_has_each_term_once_and_needs_no_weights(folder: Path, tmp_path: Path) -> None:
    work = collect_files(folder, tmp_path / "bag")
    assert {path.name for path in work.iterdir()} == {"bookwheel.json", "config.json", "tokenizer.json"}
    encoder = load_passage_encoder(work)
    assert isinstance(encoder, BagEncoder)
    rows = encoder.encode_passages(["of", "", "music"], TEXTS)
    words = load_tokenizer(folder, 48).get_vocab()
    terms_by_row = [rows.terms[a:b].tolist() for a, b in zip(rows.offsets[:-1], rows.offsets[1:], strict=True)]
    assert terms_by_row[0] == sorted(words[word] for word in ("of", "the", "king", "was", "born", ",", "in", "city"))
    assert terms_by_row[1:] == [[], [words["music"]]]
    assert set(rows.weights) == {1}


def test_long_passage_is_truncated(folder: Path, tmp_path: Path) -> None:
    work = collect_files(folder, tmp_path / "short", BagSpec(max_length=4))
    rows = BagEncoder.load(work).encode_passages([""], ["king of music"])
    words = load_tokenizer(folder, 48).get_vocab()
    assert rows.terms.tolist() == sorted([words["king"], words["of"]])


def test_space_depends_on_the_tokenizer_and_not_on_weights(folder: Path, tmp_path: Path) -> None:
    trained = save_sidr(tmp_path / "trained", seed=10)
    space = compute_bag_space(folder, read_bag_spec(folder))
    assert compute_bag_space(trained, read_bag_spec(trained)).digest == space.digest
    assert compute_bag_space(folder, BagSpec(max_length=9)).digest != space.digest
    for encoder_folder in (folder, trained):
        query_space = SparseEncoder.load(encoder_folder, device="cpu").space()
        check_same_space(query_space, space)
        assert not query_space.accepts_queries_of(space), "a bag is not a passage of this encoder"
    marked = save_marked_bert(tmp_path / "marked")
    with pytest.raises(RefusedError, match="tokenizer"):
        check_same_space(compute_bag_space(marked, read_bag_spec(marked)), space)


def test_wrong_settings_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'scale' is not a setting of a bag"):
        read_bag_spec(folder, {"scale": 3})
    with pytest.raises(UsageError, match="max_length 2 of a bag leaves no room"):
        read_bag_spec(folder, {"max_length": 2})
    with pytest.raises(UsageError, match="max_length of a bag is 'x'"):
        read_bag_spec(folder, {"max_length": "x"})
    for number, record in enumerate(({"bag": 3}, {"bag": {"max_length": "x"}})):
        damaged = collect_files(folder, tmp_path / f"damaged{number}")
        (damaged / "bookwheel.json").write_text(json.dumps(record))
        with pytest.raises(InputError, match=r"the record of encoder .* is corrupt"):
            BagEncoder.load(damaged)
    bare = collect_files(folder, tmp_path / "bare")
    (bare / "config.json").unlink()
    with pytest.raises(InputError):
        BagEncoder.load(bare)
