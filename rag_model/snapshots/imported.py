"""Import existing passages and vectors as the parts of a build.

The user names the encoder of the vectors, and the import checks it by encoding some passages again:
with the wrong encoder every search result would be wrong without any error.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from rag_model.corpus.chunk import LENGTH_BIN, ChunkStats
from rag_model.corpus.dump_formats.dump_format import describe_formats
from rag_model.corpus.dump_formats.record_format import Record, find_record_format
from rag_model.corpus.passages import PassageFile, PassageWriter
from rag_model.corpus.records import MAX_PASSAGE, Part, Passage, Plan, Siteinfo
from rag_model.corpus.source import expand_pattern
from rag_model.encoders.encoder import Encoder
from rag_model.errors import InputError, RefusedError, UsageError
from rag_model.index.files.intake import PART_BYTES, Block, VectorInput, split_into_parts
from rag_model.process import temporary_folder
from rag_model.snapshots.content import BuiltIndex, assemble_content
from rag_model.snapshots.encoding import StoredEncoder
from rag_model.snapshots.recipe import Recipe
from rag_model.snapshots.stage_results import ChunkResult, EmbedResult
from rag_model.store.objects.cache import build_link_tree
from rag_model.store.store import Store
from rag_model.store.versions.manifest import EMBEDDINGS, Content

# corpus kind of an import: it has no dump, and later builds do not reuse its parts
KIND = "imported"
_CHECKED_PASSAGES = 8  # number of passages that are encoded again to check the encoder
_MIN_COSINE = 0.98  # bf16 against fp32 gives .999; another pooling, prompt or model gives much less


@dataclass(frozen=True, slots=True)
class ImportedParts:
    """Imported passages and vectors: one result per part, like those of the chunk and embed
    jobs.
    """

    passages: tuple[ChunkResult, ...]
    embeddings: tuple[EmbedResult, ...]
    dtype: str  # numpy name of the vectors' dtype


def import_parts(store: Store, passages: str, vectors: VectorInput, part_bytes: int = PART_BYTES) -> ImportedParts:
    """Store passages and their vectors as parts, without pages that were taken down.

    Holds one part in memory.

    Args:
        store: the destination.
        passages: path, URL or glob of passages or documents, in a dump format with records.
        vectors: (n, d), row i of passage i.
        part_bytes: bytes of float32 vectors per part.

    Raises:
        InputError: the numbers of passages and vectors differ, a vector is not finite, or a file is
            damaged.
        UsageError: the file type of the passages is unknown.
    """
    passage_iterator = _read_passages(passages)
    chunk_results: list[ChunkResult] = []
    embed_results: list[EmbedResult] = []

    removed_pages, passage_count = store.takedowns.list_pages(""), 0

    def store_part(block: Block) -> None:
        nonlocal passage_count
        block_passages = list(islice(passage_iterator, len(block)))
        passage_count += len(block_passages)
        if len(block_passages) < len(block):
            raise _count_mismatch(passages, str(passage_count), vectors)
        kept_rows = [row for row, passage in enumerate(block_passages) if passage.page_id not in removed_pages]
        if not kept_rows:
            return
        with temporary_folder("import") as name:
            removed_count = len(block) - len(kept_rows)
            chunk_results.append(
                _store_passages(
                    store, (block_passages[row] for row in kept_rows), removed_count, name / "passages.parquet"
                )
            )
            is_complete = len(kept_rows) == len(block)
            np.save(file := name / "vectors.npy", block if is_complete else block[kept_rows], allow_pickle=False)
            ref = store.blobs.put_file(file)
        embed_results.append(EmbedResult(ref, len(kept_rows), is_new=True))

    split_into_parts(vectors, store_part, "refuse", part_bytes)
    if next(passage_iterator, None) is not None:
        raise _count_mismatch(passages, f"more than {vectors.n}", vectors)
    if not chunk_results:
        raise InputError(f"all pages of {passages} were taken down in {store.url}: there is nothing to import")
    return ImportedParts(tuple(chunk_results), tuple(embed_results), vectors.dtype.name)


def check_encoder(store: Store, imported: ImportedParts, encoding: StoredEncoder) -> None:
    """Check that the vectors come from an encoder: encode a few passages again and compare.

    Raises:
        RefusedError: another encoder made the vectors.
    """
    first_vectors = np.load(
        store.blobs.get_local_path(imported.embeddings[0].vectors), mmap_mode="r", allow_pickle=False
    )
    if first_vectors.shape[1] != encoding.space.dim:
        raise _wrong_encoder(
            encoding, f"they have {first_vectors.shape[1]} dimensions and its own {encoding.space.dim}"
        )
    rows = np.unique(np.linspace(0, len(first_vectors) - 1, _CHECKED_PASSAGES, dtype=np.int64)).tolist()
    with PassageFile(store.blobs.get_local_path(imported.passages[0].passages)) as file:
        passages = file.read_rows(rows)
    encoder = Encoder.load(build_link_tree({name: store.blobs.get_local_path(ref) for name, ref in encoding.passage}))
    encoded_vectors = encoder.encode_passages(
        [passage.title for passage in passages], [passage.text for passage in passages]
    )
    imported_vectors = first_vectors[rows].astype(np.float32)
    norms = np.linalg.norm(encoded_vectors, axis=1) * np.linalg.norm(imported_vectors, axis=1)
    # (m, d), (m, d) -> (m,) -> scalar
    cosine = float(np.mean((encoded_vectors * imported_vectors).sum(axis=1) / np.maximum(norms, 1e-12)))
    if cosine < _MIN_COSINE:
        raise _wrong_encoder(encoding, f"of {len(rows)} passages that it encoded again the mean cosine is {cosine:.2f}")


def build_imported_content(
    imported: ImportedParts, recipe: Recipe, encoding: StoredEncoder, indexes: Sequence[BuiltIndex]
) -> Content:
    """Return the content of an imported snapshot: that of a build, without dump and chunker."""
    parts = tuple(Part(f"part-{i:05d}", "passages", i, i, ()) for i in range(len(imported.passages)))
    stored_recipe = replace(recipe, encode=replace(recipe.encode, dtype=imported.dtype))  # type: ignore[arg-type]
    plan = Plan("passages", Siteinfo("", "", ""), parts)
    embeddings = {EMBEDDINGS: imported.embeddings}
    content = assemble_content(plan, stored_recipe, {EMBEDDINGS: encoding}, imported.passages, embeddings, indexes)
    import_recipe = {name: value for name, value in content.recipe.items() if name not in {"chunk", "part_bytes"}}
    return replace(content, corpus={**content.corpus, "kind": KIND}, recipe=import_recipe)


def _read_passages(source: str) -> Iterator[Passage]:
    for url in expand_pattern(source):
        record_format = find_record_format(url)
        if record_format is None:
            raise UsageError(f"{url} is not a file of passages: give {describe_formats('documents', 'passages')}")
        yield from map(_to_passage, record_format.iter_records(url))


def _to_passage(record: Record) -> Passage:
    passage_id, title, body, revised = record
    text = body if isinstance(body, str) else " ".join(text for _, text in body)
    if len(text) > MAX_PASSAGE:
        raise InputError(
            f"passage {passage_id} has {len(text):,} characters, and at most {MAX_PASSAGE:,} are possible: cut it"
        )
    return Passage(
        passage_id, title or passage_id, 0, title, "", text, 0, len(text.split()), Passage.hash_of(title, text), revised
    )


def _store_passages(store: Store, passages: Iterator[Passage], removed_count: int, path: Path) -> ChunkResult:
    lengths: Counter[int] = Counter()
    page_ids: set[str] = set()
    with PassageWriter(path) as writer:
        for passage in passages:
            lengths[passage.n_words // LENGTH_BIN * LENGTH_BIN] += 1
            page_ids.add(passage.page_id)
            writer.write(passage)
    stats = ChunkStats(
        rows=writer.rows,
        articles=len(page_ids),
        dropped={"taken_down": removed_count} if removed_count else {},
        lengths={str(length): count for length, count in sorted(lengths.items())},
    )
    return ChunkResult(store.blobs.put_file(path), stats, is_new=True)


def _count_mismatch(passages: str, count: str, vectors: VectorInput) -> InputError:
    return InputError(f"{passages} holds {count} passages for {vectors.n} vectors: give one vector per passage")


def _wrong_encoder(encoding: StoredEncoder, reason: str) -> RefusedError:
    return RefusedError(
        f"the vectors are not those of encoder {encoding.name}: {reason}; name the encoder that made them"
    )
