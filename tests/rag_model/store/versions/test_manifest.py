"""The id of a manifest depends on its content only, and hostile manifests are refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_model.errors import StoreError
from rag_model.store import BlobRef, Content, Manifest, PartEntry
from rag_model.store.objects.files import encode_json
from rag_model.store.versions.manifest import embeddings_in_space
from tests.fixtures.store_files import replace_value

blobs = st.builds(
    BlobRef,
    id=st.text("0123456789abcdef", min_size=64, max_size=64).map("sha256:{}".format),
    size=st.integers(0, 1 << 50),
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 53), 1 << 53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3),
    max_leaves=5,
)
objects = st.dictionaries(st.text("abcxyz", min_size=1), values, max_size=3)
segments = st.from_regex(r"[a-z0-9_][a-z0-9._-]{0,8}", fullmatch=True)
paths = st.tuples(st.sampled_from(["passages", "embeddings", "index"]), segments).map("/".join)
parts = st.lists(
    st.builds(
        PartEntry,
        name=st.integers(0, 99_999).map("part-{:05d}".format),
        first_page=st.integers(0, 1 << 40),
        last_page=st.integers(0, 1 << 40),
        rows=st.integers(0, 1 << 30),
    ),
    unique_by=lambda part: part.name,
    max_size=4,
).map(tuple)
contents = st.builds(
    Content,
    corpus=objects,
    parts=parts,
    files=st.dictionaries(paths, blobs, max_size=4),
    recipe=objects,
    representations=(st.none() | objects).map(embeddings_in_space),
    indexes=st.dictionaries(segments, objects, max_size=2),
)
representations = st.dictionaries(
    segments.filter(lambda name: not name.startswith("_")),
    st.fixed_dictionaries({"kind": st.sampled_from(["vectors", "tokens"]), "space": st.none() | objects}),
    max_size=2,
)
full_contents = st.builds(
    replace, contents, representations=representations, retriever=st.text("abc(), :0", max_size=9)
)
manifests = st.builds(
    Manifest,
    content=contents,
    format=st.sampled_from([1, 2]),
    metrics=objects,
    parents=st.lists(st.text("0123456789abcdef", min_size=64, max_size=64), max_size=2).map(tuple),
    provenance=objects,
)

GOOD = Manifest(
    Content(
        corpus={"kind": "wiki"},
        parts=(PartEntry("part-00000", 1, 9, 3),),
        files={"passages/part-00000.parquet": BlobRef("sha256:" + "a" * 64, 10)},
    )
)


@settings(max_examples=40)
@given(manifests)
def test_manifest_round_trips_through_json(manifest: Manifest) -> None:
    data = encode_json(manifest.to_json())
    reread = Manifest.from_bytes(data)
    assert reread == manifest
    assert reread.id == manifest.id
    assert encode_json(reread.to_json()) == data


@settings(max_examples=40)
@given(full_contents)
def test_representations_and_retriever_round_trip_through_json(content: Content) -> None:
    reread = Manifest.from_bytes(encode_json(Manifest(content).to_json())).content
    assert reread == content
    assert reread.default_retriever


@settings(max_examples=40)
@given(manifests, objects, objects)
def test_id_depends_on_content_only(manifest: Manifest, metrics: Any, provenance: Any) -> None:
    other_fields = {"metrics": metrics, "provenance": provenance, "format": manifest.format}
    assert Manifest(manifest.content, **other_fields).id == manifest.id


@settings(max_examples=40)
@given(full_contents, full_contents)
def test_other_content_has_another_id(first: Content, second: Content) -> None:
    assert (Manifest(first).id == Manifest(second).id) == (first.to_json() == second.to_json())


def test_id_does_not_depend_on_the_order_of_files() -> None:
    files = {"b": BlobRef("sha256:" + "b" * 64, 1), "a": BlobRef("sha256:" + "a" * 64, 1)}
    reversed_files = dict(reversed(files.items()))
    assert Manifest(Content({}, (), files)).id == Manifest(Content({}, (), reversed_files)).id


def test_id_depends_on_the_order_of_parts() -> None:
    parts = (PartEntry("part-00000", 1, 9, 3), PartEntry("part-00001", 10, 19, 3))
    assert Manifest(Content({}, parts, {})).id != Manifest(Content({}, parts[::-1], {})).id


@given(st.text() | st.lists(segments | st.sampled_from(["..", ".", "", "~", "C:", "\\", "\0"])).map("/".join))
def test_path_is_inside_the_folder_or_refused(path: str) -> None:
    try:
        Content({}, (), {path: BlobRef("sha256:" + "a" * 64, 1)})
    except StoreError:
        return
    root = Path("/srv/dest/snapshot")
    assert root in (root / path).parents
    assert Path(path).as_posix() == path
    assert ".." not in Path(path).parts


@pytest.mark.parametrize(
    "path",
    [
        "../up", "a/../../up", "/etc/passwd", "a//b", "a/./b", "a/", "", ".", "..", "~/x", "C:/x", "a\\..\\b",
        "a\0b", "a\nb", ".hidden", "a/.hidden", "manifest.json", "passages/\ud800", "x" * 300,
        "/".join("a" * 20),
    ],
)  # fmt: skip
def test_hostile_paths_are_refused(path: str) -> None:
    files = {path: {"id": "sha256:" + "a" * 64, "size": 1}}
    with pytest.raises(StoreError, match="bad file path"):
        Manifest.from_json(replace_value(GOOD.to_json(), ("content", "files"), files))


def test_file_cannot_be_a_folder_as_well() -> None:
    blob = BlobRef("sha256:" + "a" * 64, 1)
    with pytest.raises(StoreError, match="folder as well"):
        Content({}, (), {"index": blob, "index-2": blob, "index/hnsw.faiss": blob})


@pytest.mark.parametrize(
    ("field_path", "value"),
    [
        (("format",), 0),
        (("format",), "1"),
        (("format",), True),
        (("id",), "0" * 64),
        (("metrics",), []),
        (("parents",), ["../x"]),
        (("parents",), "ab" * 32),
        (("content",), []),
        (("content", "corpus"), None),
        (("content", "representations"), 3),
        (("content", "recipe"), {"a": float("nan")}),
        (("content", "indexes"), {"hnsw": 1}),
        (("content", "parts"), {}),
        (("content", "parts", 0), {}),
        (("content", "parts", 0, "rows"), -1),
        (("content", "parts", 0, "rows"), 1 << 60),
        (("content", "parts", 0, "rows"), 1.0),
        (("content", "parts", 0, "rows"), True),
        (("content", "parts", 0, "name"), "../part"),
        (("content", "parts", 0, "first_page"), 1 << 70),
        (("content", "files", "passages/part-00000.parquet"), "sha256:" + "a" * 64),
        (("content", "files", "passages/part-00000.parquet", "id"), "md5:" + "a" * 32),
        (("content", "files", "passages/part-00000.parquet", "id"), "sha256:../../../../etc/passwd"),
        (("content", "files", "passages/part-00000.parquet", "size"), -1),
        (("content", "files", "passages/part-00000.parquet", "size"), 1 << 60),
        (("content", "files", "passages/part-00000.parquet", "size"), "10"),
        (("content", "retriever"), 5),
        (("content", "representations"), []),
        (("content", "representations"), {"a": []}),
        (("content", "representations"), {"a": {"space": {}}}),
        (("content", "representations"), {"../a": {"kind": "vectors", "space": None}}),
        (("content", "representations"), {"a": {"kind": "vectors", "space": 5}}),
        (("content", "indexes"), {"a": {"kind": 5}}),
        (("content", "indexes"), {"a": {"file": []}}),
        (("content", "indexes"), {"a": {"file": {}}}),
        (("content", "indexes"), {"a": {"over": None}}),
        (("content", "indexes"), {"a": {"file": "../../etc/passwd"}}),
        (("content", "space"), None),
        (("unknown",), 1),
        (("content", "unknown"), 1),
    ],
)
def test_damaged_or_hostile_manifest_is_refused(field_path: tuple[Any, ...], value: Any) -> None:
    with pytest.raises(StoreError):
        Manifest.from_json(replace_value(GOOD.to_json(), field_path, value))


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"null", b"{", b"\xff", b"[" * 100_000, b'{"format": ' + b"9" * 5000 + b"}"]
)
def test_other_data_is_refused(data: bytes) -> None:
    with pytest.raises(StoreError):
        Manifest.from_bytes(data)


def test_newer_format_is_refused() -> None:
    with pytest.raises(StoreError, match=r"format 3, .* reads up to 2: upgrade bookwheel"):
        Manifest.from_json({"format": 3, "shape": "unknown to this version"})


def test_duplicate_parts_are_refused() -> None:
    part = PartEntry("part-00000", 1, 9, 3)
    with pytest.raises(StoreError, match="twice"):
        Content({}, (part, part), {})


@pytest.mark.parametrize(
    ("field_path", "value", "message"),
    [
        (("content", "parts", 0), {"name": "part-00000"}, r"bad parts\[0\], which lacks first_page, last_page, rows"),
        (("content", "parts", 0), 5, r"bad parts\[0\], which is not an object"),
        (("content", "unknown"), 1, "bad content, which has the unknown field 'unknown'"),
        (
            ("content", "files", "passages/part-00000.parquet"),
            {},
            "bad file 'passages/part-00000.parquet': .* not a blob",
        ),
    ],
)
def test_error_names_the_field(field_path: tuple[Any, ...], value: Any, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        Manifest.from_json(replace_value(GOOD.to_json(), field_path, value))
