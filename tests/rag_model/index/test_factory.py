import pytest

from rag_model.errors import UsageError
from rag_model.index.factory import (
    check_dimensions,
    find_largest_divisor,
    get_structure,
    parse_factory,
    without_vector_refinement,
)
from rag_model.index.files.engine import faiss


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Flat", "exact"),
        ("HNSW32", "hnsw"),
        ("HNSW", "hnsw"),
        ("HNSW32_SQ8", "hnsw"),
        ("HNSW16_SQfp16", "hnsw"),
        ("HNSW16_SQ4,Refine(vectors)", "hnsw"),
        ("IVF1024,PQ48np", "ivf"),
        ("IVF1024,PQ48x4np", "ivf"),
        ("IVF,PQ", "ivf"),
        ("IVF4096,SQ8", "ivf"),
        ("IVF64,Flat", "ivf"),
        ("IVF65536_HNSW32,RaBitQ4", "ivf"),
        ("OPQ48_192,IVF65536_HNSW32,PQ48np", "ivf"),
        ("PCA64,IVF1024,PQ16np", "ivf"),
    ],
)
def test_factory_has_a_structure(text: str, kind: str) -> None:
    assert get_structure(text) == kind


@pytest.mark.parametrize(
    "text",
    [
        "HNSW16",
        "HNSW32_SQ8",
        "IVF64,PQ16np",
        "OPQ16_64,IVF64_HNSW32,PQ16np",
        "PCA64,IVF64,SQ8",
        "RR64,IVF9,RaBitQ4",
        "HNSW8_SQ4",
        "HNSW8_SQ6",
        "OPQ16_64,IVF64,PQ16np,Refine(SQfp16)",
        "IVF64,PQ16np,Refine(Flat)",
        "IVF64,RaBitQ,Refine(SQ8)",
    ],
)
def test_factory_is_formatted_as_parsed_and_faiss_accepts_it(text: str) -> None:
    assert str(parse_factory(text)) == text
    assert faiss.index_factory(128, text).d == 128


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "nothing"),
        ("HNSW32,PQ8", "HNSW32_SQ8"),
        ("HNSW1", "at least 2"),
        ("HNSW0", "a 0"),
        ("IVF1024", "does not say how"),
        ("IVF1024,", "unknown"),
        ("IVF1024,QP48", "'QP48' is unknown"),
        ("IVF1024,PQ48np,Refine(PQ8)", "Refine(SQfp16)"),
        ("IVF1024,PQ48np,RFlat", "Refine(Flat)"),
        ("IVF1024,PQ48np,Refine(Flat),Refine(Flat)", "unknown"),
        ("HNSW32,Refine(Flat)", "HNSW<M> may be followed by"),
        ("PQ48", "where IVF<lists> belongs"),
        ("OPQ48", "where IVF<lists> belongs"),
        ("IVF0,Flat", "a 0"),
        ("IVF64,PQ8x16", "at most 8"),
        ("ivf64,Flat", "'ivf64'"),
    ],
)
def test_invalid_factory_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_factory(text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "suggestion"),
    [("IVF64,PQ50np", "PQ48 can"), ("OPQ50,IVF64,PQ48np", "OPQ48 can"), ("OPQ48_100,IVF64,PQ48", "PQ25 can")],
)
def test_indivisible_pieces_suggest_a_divisor(text: str, suggestion: str) -> None:
    with pytest.raises(UsageError, match=suggestion):
        check_dimensions(parse_factory(text), 384)


def test_pca_cannot_add_dimensions() -> None:
    with pytest.raises(UsageError, match="use at most 32"):
        check_dimensions(parse_factory("PCA64,IVF64,Flat"), 32)


def test_vector_refinement_is_removed_for_faiss() -> None:
    factory = parse_factory("IVF64,PQ16np,Refine(vectors)")
    assert str(factory) == "IVF64,PQ16np,Refine(vectors)"
    assert str(without_vector_refinement(factory)) == "IVF64,PQ16np"
    for text in ("IVF64,PQ16np,Refine(SQ8)", "HNSW32", "Flat"):
        assert str(without_vector_refinement(parse_factory(text))) == text


def test_divisor_of_a_prime_is_one() -> None:
    assert find_largest_divisor(97, 24) == 1
    assert find_largest_divisor(4, 100) == 4
