"""Import existing passages and vectors as the parts of a build.

The user names the encoder of the vectors, and the import checks it by encoding some passages again:
with the wrong encoder every search result would be wrong without any error.
"""

import json
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from io import BytesIO
from itertools import accumulate, chain, islice, pairwise, repeat
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rag_model.corpus.chunk import LENGTH_BIN, ChunkStats
from rag_model.corpus.dump_formats.dump_format import describe_formats
from rag_model.corpus.dump_formats.parquet import FORMAT as PARQUET
from rag_model.corpus.dump_formats.parquet import Parquet, build_record_columns
from rag_model.corpus.dump_formats.record_format import Record, find_record_format
from rag_model.corpus.passages import ROW_GROUP, PassageFile, PassageWriter, build_passage_table
from rag_model.corpus.records import MAX_PASSAGE, Part, Plan, Siteinfo
from rag_model.corpus.source import expand_pattern, get_size
from rag_model.digest import digest_chunks
from rag_model.encoders.encoder import Encoder
from rag_model.errors import InputError, RefusedError, UsageError
from rag_model.extras import get_versions
from rag_model.index.files.intake import (
    PART_BYTES,
    VectorInput,
    digest_files,
    inspect_vectors,
    iter_finite_rows,
)
from rag_model.process import temporary_folder
from rag_model.snapshots.content import BuiltIndex, assemble_content
from rag_model.snapshots.encoding import StoredEncoder
from rag_model.snapshots.recipe import Recipe
from rag_model.snapshots.stage_results import ChunkResult, EmbedResult
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.cache import build_link_tree
from rag_model.store.objects.memo import StageResult
from rag_model.store.recorded_tasks import PartTask, compute_once
from rag_model.store.store import Store
from rag_model.store.versions.manifest import EMBEDDINGS, Content
from rag_model.toml import from_table

# corpus kind of an imported snapshot: it has no dump, and later builds do not reuse its parts
KIND = "imported"
CODE = 2  # increase it with each change that alters the bytes of imported parts
_CHECKED_PASSAGES = 8  # number of passages that are encoded again to check the encoder
_DIGESTS_PER_RANGE = 1 << 18  # mean number of id digests that are compared at once
# Minimum mean cosine of imported vectors with those that the named encoder computes. bf16 and fp32
# reach .999; another pooling, prompt or model gives much less.
_MIN_COSINE = 0.98
FileRange = tuple[str, int, int]  # (file, first row, row after the last)


@dataclass(frozen=True, slots=True)
class ImportedParts:
    """Imported passages and vectors: one result per part, as the chunk and embed jobs return."""

    passages: tuple[ChunkResult, ...]
    embeddings: tuple[EmbedResult, ...]
    dtype: str  # numpy name of the vectors' dtype


@dataclass(frozen=True, slots=True)
class ImportTask:
    """A part to import: its rows in the files of passages and in the files of vectors."""

    first: int  # row number of the part's first passage, counted over all files
    # ranges of Parquet files; if there are none, the passages are given to `import_part`
    passages: tuple[FileRange, ...]
    vectors: tuple[FileRange, ...]
    dim: int
    dtype: str  # numpy name of the dtype of the part's vectors
    sources: Any  # JSON values that identify the content of all files
    total: int  # number of vectors in all parts, for error messages
    removed_pages: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """The number of rows, including those that a takedown removes."""
        return sum(end_row - first_row for _, first_row, end_row in self.vectors)

    def inputs(self) -> dict[str, Any]:
        """Return all inputs that determine the part, as JSON values."""
        ranges = [[first_row, end_row] for _, first_row, end_row in (*self.passages, *self.vectors)]
        inputs = {"sources": self.sources, "first": self.first, "ranges": ranges, "dtype": self.dtype, "code": CODE}
        # `column` stays in the inputs, so that records of earlier versions are found.
        return inputs | {"column": None, "removed": self.removed_pages, "libraries": get_versions("pyarrow")}


def list_urls(passages: str) -> list[str]:
    """Return the URLs, or for local files the paths, that match a pattern, in natural order.

    Raises:
        InputError: no file matches, or the source cannot be reached.
        UsageError: the pattern is empty, or a URL that may contain a secret.
    """
    return [url.removeprefix("file://") for url in expand_pattern(passages)]


def plan_import(store: Store, passages: str, vectors: VectorInput, part_bytes: int = PART_BYTES) -> list[ImportTask]:
    """Return a task for each part. If the passages are Parquet, their rows are counted first.

    Args:
        store: the destination.
        passages: path, URL or glob of passages or documents, in a dump format with records.
        vectors: (n, d) vectors; row i is the vector of passage i.
        part_bytes: bytes of float32 vectors per part.

    Raises:
        InputError: the numbers of passages and vectors differ, or a file is damaged.
        UsageError: the file type of the passages is unknown.
    """
    urls = list_urls(passages)
    for url in urls:
        if find_record_format(url) is None:
            raise UsageError(f"{url} is not a file of passages: give {describe_formats('documents', 'passages')}")
    has_ranges = all(isinstance(find_record_format(url), Parquet) and Path(url).is_file() for url in urls)
    row_counts = [_count_rows(url) for url in urls] if has_ranges else []
    if has_ranges and sum(row_counts) != vectors.n:
        raise _create_count_error(passages, str(sum(row_counts)), vectors.n)
    removed_pages = tuple(sorted(store.takedowns.list_pages("")))
    # The inputs do not contain paths, so memo records are found even after the files are moved.
    vector_identities = vectors.identify_files()
    passage_identities = _identify_passage_files(urls, vector_identities)
    part_rows, tasks = vectors.count_part_rows(part_bytes), []
    for first_row in range(0, vectors.n, part_rows):
        end_row = min(first_row + part_rows, vectors.n)
        file_ranges = tuple(_split_rows(urls, row_counts, first_row, end_row)) if has_ranges else ()
        part_vectors = list(vectors.split_rows(first_row, end_row))
        source_identities = [
            [passage_identities[url] for url in ([url for url, _, _ in file_ranges] if has_ranges else urls)],
            [vector_identities[path] for path in dict.fromkeys(file.path for file, _, _ in part_vectors)],
        ]
        tasks.append(
            ImportTask(
                first_row,
                file_ranges,
                tuple((str(file.path), start, end) for file, start, end in part_vectors),
                vectors.d,
                vectors.dtype.name,
                source_identities,
                vectors.n,
                removed_pages,
            )
        )
    return tasks


def import_part(task: ImportTask, store: Store, passages: Iterator[Record] | None = None) -> dict[str, Any]:
    """Store a part, leaving out pages that were taken down; if the part is recorded, reuse it.

    Return the results of its passages and vectors as JSON values. Only a block of the vectors is in
    memory at a time.

    `passages` begins with the passages of the task, and is read up to the end of the part.

    Raises:
        InputError: there are too few passages, one is too long, a vector has another id than its
            passage or is not finite, or a file is damaged.
    """
    has_read_passages = False

    def produce(workdir: Path) -> StageResult:
        nonlocal has_read_passages
        has_read_passages = True
        vectors = inspect_vectors([Path(path) for path, _, _ in dict.fromkeys(task.vectors)])
        is_live = np.ones(task.rows, np.bool_)
        passages_path, vectors_path = workdir / "passages.parquet", workdir / "embeddings.npy"
        stats = _write_passages(_iter_tables(task, passages), task, vectors, is_live, passages_path)
        with vectors_path.open("wb") as vector_file:
            digest = digest_chunks(_write_vectors(task, vectors, is_live, vector_file))
        outputs = {"passages": passages_path, "embeddings": vectors_path}
        return StageResult(outputs, asdict(stats), {"embeddings": digest})

    record, is_new = store.memo.get_or_create("import", task.inputs(), produce)
    if passages is not None and not has_read_passages:
        n_skipped = sum(1 for _ in islice(passages, task.rows))
        if n_skipped < task.rows:
            raise _create_count_error("the input", str(task.first + n_skipped), task.total)
    chunk_result = ChunkResult.from_record(record, is_new=is_new)
    embed_result = EmbedResult(record.outputs["embeddings"], chunk_result.rows, is_new=is_new)
    report = {"passages": asdict(chunk_result), "vectors": asdict(embed_result)}
    return {**report, **compute_once(IdDigestTask(chunk_result.passages), store)}


def import_in_sequence(store: Store, passages: str, tasks: Sequence[ImportTask]) -> Iterator[dict[str, Any]]:
    """Yield the reports of `import_part`, whose passages are read once and in order.

    Raises:
        InputError: for the same reasons as `import_part`, or there are more passages than vectors.
    """
    passage_iterator = iter_passages(passages)
    for task in tasks:
        yield import_part(task, store, passage_iterator)
    if next(passage_iterator, None) is not None:
        raise _create_count_error(passages, f"more than {tasks[-1].total}", tasks[-1].total)


def collect_parts(store: Store, passages: str, reports: Sequence[Mapping[str, Any]], dtype: str) -> ImportedParts:
    """Return the parts that have passages.

    Raises:
        InputError: all pages were taken down, or passages of two parts have the same id.
    """
    check_part_ids(store, reports)
    results = [(_read_passages_report(report), _read_vectors_report(report)) for report in reports]
    live_results = [(chunk_result, embed_result) for chunk_result, embed_result in results if chunk_result.rows]
    if not live_results:
        raise InputError(f"all pages of {passages} were taken down in {store.url}: there is nothing to import")
    chunk_results, embed_results = zip(*live_results, strict=True)
    return ImportedParts(chunk_results, embed_results, dtype)


def _count_rows(url: str) -> int:
    try:
        return int(pq.read_metadata(url).num_rows)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{url} is not a complete Parquet file: copy it again") from error


def _split_rows(urls: Sequence[str], row_counts: Sequence[int], first_row: int, end_row: int) -> Iterator[FileRange]:
    """Yield each file that has rows of [first_row, end_row), and their range within the file."""
    for url, (start, end) in zip(urls, pairwise([0, *accumulate(row_counts)]), strict=True):
        if first_row < end and start < end_row:
            yield url, max(first_row - start, 0), min(end_row, end) - start


def _identify_passage_files(urls: Sequence[str], vector_identities: Mapping[Path, list[Any]]) -> dict[str, list[Any]]:
    """Return, for each file of passages, JSON values that change when the file changes."""
    path_by_url = {url: Path(url) for url in urls if Path(url).is_file()}
    digest_by_path = {path: file_identity[0] for path, file_identity in vector_identities.items()}
    digest_by_path |= digest_files([path for path in path_by_url.values() if path not in digest_by_path])
    return {url: [digest_by_path[path_by_url[url]]] if url in path_by_url else [url, get_size(url)] for url in urls}


def _iter_tables(task: ImportTask, records: Iterator[Record] | None) -> Iterator[pa.Table]:
    """Yield the passages of a part as tables, from its records or from its Parquet files."""
    if records is None:
        columns: Iterator[tuple[pa.Array, ...]] = chain.from_iterable(
            PARQUET.read_columns(*file_range) for file_range in task.passages
        )
    else:
        checked_records = map(_check_text_length, islice(records, task.rows))
        columns = map(build_record_columns, iter(lambda: [*islice(checked_records, ROW_GROUP)], []))
    for ids, titles, texts, dates, page_ids in columns:
        if (pc.max(pc.binary_length(texts)).as_py() or 0) > MAX_PASSAGE:  # characters <= bytes
            for passage_id, text in zip(ids.to_pylist(), texts.to_pylist(), strict=True):
                _check_text_length((passage_id, "", text, None))
        yield build_passage_table(ids, titles, texts, dates, page_ids)


def _iter_vector_ids(task: ImportTask, vectors: VectorInput) -> Iterator[tuple[str, int, str | None]]:
    """Yield the file, the row and the id of each vector; the id is None if the file has no ids."""
    source_by_path = {str(file.path): file for file in vectors.files}
    for path, first_row, end_row in task.vectors:
        ids: Iterator[str | None] = source_by_path[path].iter_ids(first_row, end_row) or repeat(None)
        for row, vector_id in zip(range(first_row, end_row), ids, strict=False):
            yield path, row, vector_id


def _write_passages(
    tables: Iterator[pa.Table], task: ImportTask, vectors: VectorInput, is_live: npt.NDArray[np.bool_], path: Path
) -> ChunkStats:
    """Write the passages of pages that were not taken down; set `is_live` to False for others.

    Raises:
        InputError: there are too few passages, one is too long, or the vector of a row has another
            id.
    """
    length_counts, page_ids, removed_pages, n_read = Counter[int](), set[str](), set(task.removed_pages), 0
    ids = list[pa.Array]()
    vector_ids = None if task.passages == task.vectors else _iter_vector_ids(task, vectors)
    with PassageWriter(path) as writer:
        for table in tables:
            if vector_ids is not None:
                _compare_ids(table["id"].to_pylist(), vector_ids)
            end_row = n_read + table.num_rows
            if removed_pages:
                is_live[n_read:end_row] = [page_id not in removed_pages for page_id in table["page_id"].to_pylist()]
            live_rows = table if is_live[n_read:end_row].all() else table.filter(pa.array(is_live[n_read:end_row]))
            page_ids.update(live_rows["page_id"].unique().to_pylist())
            writer.write_table(live_rows)
            ids.extend(live_rows["id"].chunks)
            n_read = end_row
        if n_read < task.rows:
            raise _create_count_error("the input", str(task.first + n_read), task.total)
    _check_distinct_ids(pa.chunked_array(ids, pa.string()))
    for n_words, n_passages in writer.lengths.items():
        length_counts[n_words // LENGTH_BIN * LENGTH_BIN] += n_passages
    n_removed = int((~is_live).sum())
    return ChunkStats(
        rows=writer.rows,
        articles=len(page_ids),
        dropped={"taken_down": n_removed} if n_removed else {},
        lengths={str(length): n_passages for length, n_passages in sorted(length_counts.items())},
    )


def _check_distinct_ids(ids: pa.ChunkedArray) -> None:
    """Check that no passages have the same id."""
    if len(ids) > pc.count_distinct(ids).as_py():
        value_counts = ids.value_counts()
        repeated_id = value_counts.filter(pc.greater(pc.struct_field(value_counts, "counts"), 1))[0]["values"].as_py()
        raise InputError(f"the id {repeated_id!r:.60} occurs twice in the corpus: give every passage its own id")


@dataclass(frozen=True, slots=True)
class IdDigestTask(PartTask):
    """Computes the digests of a part's ids: 8 bytes each, sorted, in base64. `gc` keeps them as
    long as the part's passages.
    """

    stage: ClassVar[str] = "import-ids"
    output: ClassVar[str] = "ids"
    code: ClassVar[int] = 1

    @property
    def target(self) -> BlobRef:
        """The passages of the part."""
        return self.file

    def compute(self, store: Store) -> str:
        """Return the digests."""
        return b64encode(np.sort(digest_ids(_read_ids(store, self.file))).tobytes()).decode()


def digest_ids(ids: pa.ChunkedArray) -> npt.NDArray[np.uint64]:
    """Return a digest of 64 bits for each id. Ids that are numbers of at most 18 digits never
    collide.
    """
    is_number = pc.match_substring_regex(ids, r"^(0|[1-9][0-9]{0,17})$")
    integer_ids = pc.if_else(is_number, ids, "0").cast(pa.int64()).to_numpy().astype(np.uint64)
    # Multiplication by an odd number is one-to-one modulo 2**64, and spreads small ids over all
    # values.
    digests: npt.NDArray[np.uint64] = integer_ids * np.uint64(0x9E3779B97F4A7C15)
    texts = ids.filter(pc.invert(is_number)).cast(pa.binary()).to_pylist()
    text_digests = b"".join([blake2b(text, digest_size=8).digest() for text in texts])
    digests[~is_number.to_numpy()] = np.frombuffer(text_digests, ">u8")
    return digests


def check_part_ids(store: Store, reports: Sequence[Mapping[str, Any]]) -> None:
    """Check by digests that no two parts have a passage with the same id.

    All digests are written to one file. Those of each part are sorted, so that one range of values
    at a time can be read into memory and compared.

    Raises:
        InputError: an id is in two parts.
    """
    with temporary_folder("ids") as folder:
        path, part_digest_ends = folder / "digests", list[int]()
        with path.open("wb") as file:
            for report in reports:
                file.write(b64decode(json.loads(store.blobs.read(BlobRef.from_json(report[IdDigestTask.output])))))
                part_digest_ends.append(file.tell() // 8)
        if not path.stat().st_size:
            return
        n_ranges = 1 + part_digest_ends[-1] // _DIGESTS_PER_RANGE
        bounds = np.arange(1, n_ranges, dtype=np.uint64) * np.uint64(((1 << 64) - 1) // n_ranges)
        part_digests = np.split(np.asarray(np.memmap(path, np.uint64, "r")), part_digest_ends[:-1])
        ranges_of_parts = [np.split(digests, np.searchsorted(digests, bounds)) for digests in part_digests]
        for range_digests in zip(*ranges_of_parts, strict=True):
            (digests := np.concatenate(range_digests)).sort()
            repeated_digests = digests[1:][digests[1:] == digests[:-1]]
            if len(repeated_digests):
                _check_same_digests(store, reports, repeated_digests)


def _check_same_digests(store: Store, reports: Sequence[Mapping[str, Any]], digests: npt.NDArray[np.uint64]) -> None:
    """Check the ids whose digests occur twice: different ids may share a digest."""
    ids_to_compare = list[pa.Array]()
    for report in reports:
        ids = _read_ids(store, _read_passages_report(report).passages)
        ids_to_compare += ids.filter(pa.array(np.isin(digest_ids(ids), digests))).chunks
    _check_distinct_ids(pa.chunked_array(ids_to_compare, pa.string()))


def _read_passages_report(report: Mapping[str, Any]) -> ChunkResult:
    return from_table(ChunkResult, report["passages"], "a report of the import job")


def _read_vectors_report(report: Mapping[str, Any]) -> EmbedResult:
    return from_table(EmbedResult, report["vectors"], "a report of the import job")


def _read_ids(store: Store, passages: BlobRef) -> pa.ChunkedArray:
    with PassageFile(store.blobs.get_local_path(passages), ["id"]) as file:
        return pa.chunked_array([batch["id"] for batch in file.iter_batches(["id"])], pa.string())


def _check_text_length(record: Record) -> Record:
    passage_id, _, body, *_ = record
    length = len(body) if isinstance(body, str) else sum(len(text) + 1 for _, text in body) - 1
    if length > MAX_PASSAGE:
        raise InputError(
            f"passage {passage_id} has {length:,} characters, but at most {MAX_PASSAGE:,} are allowed: shorten it"
        )
    return record


def _compare_ids(ids: Sequence[str], vector_ids: Iterator[tuple[str, int, str | None]]) -> None:
    for passage_id, (vector_file, row, vector_id) in zip(ids, vector_ids, strict=False):
        if vector_id not in {None, passage_id}:
            raise InputError(
                f"the vector in row {row:,} of {vector_file} is of passage {vector_id!r:.60}, but the passage there is "
                f"{passage_id!r:.60}: give the passages in the order of the vectors"
            )


def _write_vectors(
    task: ImportTask, vectors: VectorInput, is_live: npt.NDArray[np.bool_], out: IO[bytes]
) -> Iterator[bytes | memoryview]:
    """Write the live rows to a `.npy` file; yield each block after writing it."""
    dtype, n_read = np.dtype(task.dtype), 0
    source_by_path = {str(file.path): file for file in vectors.files}
    if any(file.d != task.dim for file in vectors.files):
        raise InputError(f"the vectors of {task.vectors[0][0]} have changed: run the command again")
    npy_header, shape = BytesIO(), (int(is_live.sum()), task.dim)
    header_fields = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(npy_header, header_fields)
    out.write(npy_header.getvalue())
    yield npy_header.getvalue()
    for file_path, first_row, end_row in task.vectors:
        vector_input = VectorInput((source_by_path[file_path],))
        error_advice = "correct it, or remove the passage and its vector"
        for _, block in iter_finite_rows(vector_input, "refuse", first_row, end_row, error_advice):
            mask = is_live[n_read : n_read + len(block)]
            live_block = np.ascontiguousarray(block if mask.all() else block[mask], dtype)
            out.write(live_block.data)
            yield live_block.data
            n_read += len(block)


def check_encoder(store: Store, imported_parts: ImportedParts, encoder: StoredEncoder) -> None:
    """Check that `encoder` made the vectors: encode a few passages again and compare.

    Raises:
        RefusedError: another encoder made the vectors.
    """
    first_vectors = np.load(
        store.blobs.get_local_path(imported_parts.embeddings[0].vectors), mmap_mode="r", allow_pickle=False
    )
    if first_vectors.shape[1] != encoder.space.dim:
        raise _create_encoder_error(
            encoder, f"they have {first_vectors.shape[1]} dimensions instead of {encoder.space.dim}"
        )
    checked_rows = np.unique(np.linspace(0, len(first_vectors) - 1, _CHECKED_PASSAGES, dtype=np.int64)).tolist()
    with PassageFile(store.blobs.get_local_path(imported_parts.passages[0].passages)) as file:
        passages = file.read_rows(checked_rows)
    model = Encoder.load(build_link_tree({name: store.blobs.get_local_path(blob) for name, blob in encoder.passage}))
    encoded_vectors = model.encode_passages(
        [passage.title for passage in passages], [passage.text for passage in passages]
    )
    imported_vectors = first_vectors[checked_rows].astype(np.float32)
    norms = np.linalg.norm(encoded_vectors, axis=1) * np.linalg.norm(imported_vectors, axis=1)
    # (m, d), (m, d) -> (m,) -> scalar
    mean_cosine = float(np.mean((encoded_vectors * imported_vectors).sum(axis=1) / np.maximum(norms, 1e-12)))
    if mean_cosine < _MIN_COSINE:
        raise _create_encoder_error(
            encoder, f"the mean cosine of {len(checked_rows)} passages that it encoded again is {mean_cosine:.2f}"
        )


def build_imported_content(
    imported_parts: ImportedParts, recipe: Recipe, encoder: StoredEncoder, indexes: Sequence[BuiltIndex]
) -> Content:
    """Return the content of an imported snapshot, which has no dump and no chunker."""
    parts = tuple(Part(f"part-{i:05d}", "passages", i, i, ()) for i in range(len(imported_parts.passages)))
    stored_recipe = replace(recipe, encode=replace(recipe.encode, dtype=imported_parts.dtype))  # type: ignore[arg-type]
    plan = Plan("passages", Siteinfo("", "", ""), parts)
    embeddings = {EMBEDDINGS: imported_parts.embeddings}
    content = assemble_content(plan, stored_recipe, {EMBEDDINGS: encoder}, imported_parts.passages, embeddings, indexes)
    import_recipe = {name: setting for name, setting in content.recipe.items() if name not in {"chunk", "part_bytes"}}
    return replace(content, corpus={**content.corpus, "kind": KIND}, recipe=import_recipe)


def iter_passages(source: str) -> Iterator[Record]:
    """Yield the passages of all files of a pattern, in order, as records."""
    for url in list_urls(source):
        record_format = find_record_format(url)
        assert record_format is not None  # checked by `plan_import`
        yield from record_format.iter_records(url)


def _create_count_error(source: str, n_passages: str, n_vectors: int) -> InputError:
    return InputError(f"{source} holds {n_passages} passages for {n_vectors} vectors: give one vector per passage")


def _create_encoder_error(encoder: StoredEncoder, reason: str) -> RefusedError:
    return RefusedError(
        f"the vectors were not made by encoder {encoder.name}: {reason}; name the encoder that made them"
    )
