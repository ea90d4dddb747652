"""Adopt existing passages and vectors: cut them into parts like those of a build, from which a build can continue.

The user names the vectors' encoder, and it is verified by encoding some passages again: with another encoder's vectors
every search result would be wrong without any error.
"""

import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from rag_model.corpus.chunk import BUCKET, ChunkFacts
from rag_model.corpus.passages import PassageFile, PassageWriter
from rag_model.corpus.records import MAX_PASSAGE, Part, Passage, Plan, Siteinfo
from rag_model.corpus.rows import READERS, Record
from rag_model.corpus.source import expand
from rag_model.encoders.encoder import Encoder
from rag_model.errors import InputError, RefusedError, UsageError
from rag_model.index.files.arrays import Block
from rag_model.index.files.intake import PART_BYTES, Intake, cut
from rag_model.snapshots.content import BuiltIndex, assemble
from rag_model.snapshots.cut_part import CutPart
from rag_model.snapshots.encoded_part import EncodedPart
from rag_model.snapshots.encoding import StoredEncoder
from rag_model.snapshots.recipe import Recipe
from rag_model.store.objects.trees import linked_tree
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content
from rag_model.store.versions.paths import EMBEDDINGS

KIND = "imported"  # of such a corpus: it has no dump, and later builds do not inherit its parts
_SUFFIX = re.compile(r"\.(jsonl|ndjson|parquet|tsv)(\.gz|\.bz2)?$", re.IGNORECASE)
_TRIED = 8  # passages that are encoded again to check the encoder
_LEAST_COSINE = 0.98  # bf16 against fp32 gives .999; another pooling, prompt or model much less


@dataclass(frozen=True, slots=True)
class Adopted:
    """Passages and vectors in the store: one report per part each, like those of the chunk and embed jobs."""

    passages: tuple[CutPart, ...]
    embeddings: tuple[EncodedPart, ...]
    dtype: str  # of the vectors


def adopt(store: Store, passages: str, vectors: Intake, part_bytes: int = PART_BYTES) -> Adopted:
    """Put passages and, row for row, their vectors into the store as parts, without pages that were taken down. Holds
    one part in memory.

    Args:
        store: the destination.
        passages: path, URL or glob of `psgs_w100.tsv`, JSONL or Parquet with `id`, `title` and `text`.
        vectors: (n, d), row i of passage i.
        part_bytes: bytes of float32 vectors per part.

    Raises:
        InputError: their numbers differ, a vector is not finite, or a file is damaged.
        UsageError: the passages are of an unknown kind.
    """
    rows = _ready(passages)
    cuts: list[CutPart] = []
    embeddings: list[EncodedPart] = []

    gone, seen = store.takedowns.pages(""), 0

    def put(block: Block) -> None:
        nonlocal seen
        taken = list(islice(rows, len(block)))
        seen += len(taken)
        if len(taken) < len(block):
            raise _unequal(passages, str(seen), vectors)
        kept = [row for row, passage in enumerate(taken) if passage.page_id not in gone]
        if not kept:
            return
        with tempfile.TemporaryDirectory(prefix="bookwheel-import-") as name:
            gone_now = len(block) - len(kept)
            cuts.append(_put_passages(store, (taken[row] for row in kept), gone_now, Path(name) / "passages.parquet"))
            whole = len(kept) == len(block)
            np.save(file := Path(name) / "vectors.npy", block if whole else block[kept], allow_pickle=False)
            ref = store.blobs.put_file(file)
        embeddings.append(EncodedPart(ref, len(kept), made=True))

    cut(vectors, put, "refuse", part_bytes)
    if next(rows, None) is not None:
        raise _unequal(passages, f"more than {vectors.n}", vectors)
    if not cuts:
        raise InputError(f"all pages of {passages} were taken down in {store.url}: there is nothing to import")
    return Adopted(tuple(cuts), tuple(embeddings), vectors.dtype.name)


def check_encoder(store: Store, adopted: Adopted, encoding: StoredEncoder) -> None:
    """Check an encoder: encode a few passages again and compare.

    Raises:
        RefusedError: the vectors were made by another encoder.
    """
    first = np.load(store.blobs.local(adopted.embeddings[0].vectors), mmap_mode="r", allow_pickle=False)
    if first.shape[1] != encoding.space.dim:
        raise _foreign(encoding, f"they have {first.shape[1]} dimensions and its own {encoding.space.dim}")
    rows = np.unique(np.linspace(0, len(first) - 1, _TRIED, dtype=np.int64)).tolist()
    with PassageFile(store.blobs.local(adopted.passages[0].passages)) as file:
        tried = file.rows(rows)
    encoder = Encoder.load(linked_tree({name: store.blobs.local(ref) for name, ref in encoding.passage}))
    again = encoder.encode_passages([one.title for one in tried], [one.text for one in tried])
    given = first[rows].astype(np.float32)
    lengths = np.linalg.norm(again, axis=1) * np.linalg.norm(given, axis=1)
    # (m, d), (m, d) -> (m,) -> scalar
    cosine = float(np.mean((again * given).sum(axis=1) / np.maximum(lengths, 1e-12)))
    if cosine < _LEAST_COSINE:
        raise _foreign(encoding, f"of {len(rows)} passages that it encoded again the mean cosine is {cosine:.2f}")


def content_of(adopted: Adopted, recipe: Recipe, encoding: StoredEncoder, indexes: Sequence[BuiltIndex]) -> Content:
    """Return the content of the snapshot, as in a build, but without dump and chunker."""
    parts = tuple(Part(f"part-{i:05d}", "passages", i, i, ()) for i in range(len(adopted.passages)))
    kept = replace(recipe, encode=replace(recipe.encode, dtype=adopted.dtype))  # type: ignore[arg-type]
    plan = Plan("passages", Siteinfo("", "", ""), parts)
    embeddings = {EMBEDDINGS: adopted.embeddings}
    content = assemble(plan, kept, {EMBEDDINGS: encoding}, adopted.passages, embeddings, indexes)
    made_by = {name: value for name, value in content.recipe.items() if name not in {"chunk", "part_bytes"}}
    return replace(content, corpus={**content.corpus, "kind": KIND}, recipe=made_by)


def _ready(source: str) -> Iterator[Passage]:
    for url in expand(source):
        found = _SUFFIX.search(url)
        if found is None:
            raise UsageError(f"{url} is not a file of passages: give psgs_w100.tsv, .jsonl or .parquet")
        yield from map(_passage, READERS[found[1].lower()](url))


def _passage(record: Record) -> Passage:
    own, title, body, revised = record
    text = body if isinstance(body, str) else " ".join(text for _, text in body)
    if len(text) > MAX_PASSAGE:
        raise InputError(
            f"passage {own} has {len(text):,} characters, and at most {MAX_PASSAGE:,} are possible: cut it"
        )
    return Passage(own, title or own, 0, title, "", text, 0, len(text.split()), Passage.hash_of(title, text), revised)


def _put_passages(store: Store, rows: Iterator[Passage], gone: int, path: Path) -> CutPart:
    lengths: Counter[int] = Counter()
    titles: set[str] = set()
    with PassageWriter(path) as writer:
        for passage in rows:
            lengths[passage.n_words // BUCKET * BUCKET] += 1
            titles.add(passage.page_id)
            writer.write(passage)
    facts = ChunkFacts(
        rows=writer.rows,
        articles=len(titles),
        dropped={"taken_down": gone} if gone else {},
        lengths={str(length): count for length, count in sorted(lengths.items())},
    )
    return CutPart(store.blobs.put_file(path), facts, made=True)


def _unequal(passages: str, count: str, vectors: Intake) -> InputError:
    return InputError(f"{passages} holds {count} passages for {vectors.n} vectors: give one vector per passage")


def _foreign(encoding: StoredEncoder, why: str) -> RefusedError:
    return RefusedError(f"the vectors are not those of encoder {encoding.name}: {why}; name the encoder that made them")
