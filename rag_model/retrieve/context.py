"""The resources that retrievers read, and the context that opens them.

`RetrieverNeeds` lists the indexes, vectors, encoders and models of a retriever before anything is
opened. Planning, serving, pulls and resource estimates use the list. `RetrieverContext` opens each
resource once. Retrievers hold handles (`IndexTokens`, `IndexLinks`, `PassageVectors`,
`QueryEncoder`, `NamedScorer`), which open their resource when they are first used.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from rag_model.encoders.encoder import load_any_encoder
from rag_model.encoders.space import Space, check_same_space
from rag_model.errors import UsageError
from rag_model.index.files.engine import Rows, Vectors
from rag_model.index.files.vectors import RemoteRowFiles, VectorRows, open_vectors
from rag_model.index.graphs.graph_file import GraphFile
from rag_model.retrieve.indexes import (
    get_index_sizes,
    get_representation_type,
    list_row_files,
    open_graph,
    open_index,
)
from rag_model.retrieve.models import HasFolder, PairScorerCache
from rag_model.retrieve.retriever import Queries, QuestionEncoder
from rag_model.store.versions.manifest import EMBEDDINGS, TEXT, Content, question_encoder_path
from rag_model.store.versions.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class RetrieverNeeds:
    """The resources that a retriever and its child retrievers read, in the expression's order."""

    indexes: tuple[str, ...] = ()  # names of indexes that are searched or scored
    graphs: tuple[str, ...] = ()  # names of HNSW indexes whose links are read
    vectors: tuple[str, ...] = ()  # representations whose vectors are read by row
    # representations whose question encoder is used, besides the representations of `indexes`
    encoders: tuple[str, ...] = ()
    models: tuple[str, ...] = ()  # names of cross-encoders

    @classmethod
    def merge(cls, all_needs: Iterable["RetrieverNeeds"]) -> Self:
        """Return the resources of several retrievers, each once."""
        merged_fields: dict[str, dict[str, None]] = {field.name: {} for field in fields(cls)}
        for retriever_needs in all_needs:
            for name, field_values in merged_fields.items():
                field_values.update(dict.fromkeys(getattr(retriever_needs, name)))
        return cls(**{name: tuple(field_values) for name, field_values in merged_fields.items()})

    @property
    def index_names(self) -> tuple[str, ...]:
        """The names of the indexes whose files are read."""
        return tuple(dict.fromkeys([*self.indexes, *self.graphs]))

    def reads_vectors(self, content: Content) -> bool:
        """Return whether passage vectors are read: by row, or by an index that searches or reranks
        with them.
        """
        index_entries = [content.indexes.get(name) for name in self.index_names]
        return bool(self.vectors) or any(entry is None or entry.get("refine") == "vectors" for entry in index_entries)

    def list_encoded_representations(self, snapshot: Snapshot) -> list[str]:
        """Return the representations whose question encoders encode the queries."""
        encoded_indexes = [name for name in self.indexes if get_representation_type(snapshot, name) != TEXT]
        representations = map(snapshot.manifest.content.representation_of, encoded_indexes)
        return list(dict.fromkeys([*representations, *self.encoders]))

    def files(self, snapshot: Snapshot) -> dict[str, int]:
        """Return the size in bytes of each snapshot file that is read, except those of encoders."""
        content = snapshot.manifest.content
        size_by_path = {
            path: n_bytes for name in self.index_names for path, n_bytes in get_index_sizes(snapshot, name).items()
        }
        for representation in self.vectors:
            paths = [content.rows_path(representation, part.name) for part in content.parts]
            size_by_path |= {path: content.files[path].size for path in paths if path in content.files}
        return size_by_path


class RetrieverContext:
    """Opens the indexes, vectors, encoders and models of one snapshot, each once.

    All retrievers that are built with a context share its open resources.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        load_encoder: Callable[[], QuestionEncoder] | None = None,
        scorers: PairScorerCache | None = None,
        *,
        mmap: bool = True,
    ) -> None:
        """Create a context; nothing is opened yet.

        Args:
            snapshot: the snapshot to search.
            load_encoder: loads the question encoder of `embeddings`; None: the snapshot's encoder.
            scorers: the cache that loads cross-encoders.
            mmap: map index files instead of loading them.
        """
        self.snapshot, self.scorers = snapshot, scorers or PairScorerCache()
        self._load_encoder, self._mmap = load_encoder, mmap
        self._encoder: QuestionEncoder | None = None  # question encoder of `embeddings`
        self._other_encoders: dict[str, QuestionEncoder] = {}  # question encoders by representation
        # question encoders by index, after a check that the encoder has the index's space
        self._index_encoders: dict[str, QuestionEncoder | None] = {}
        # Each value is a `VectorIndex`, `TokenIndex`, `SparseIndex` or `TextIndex`, by name.
        self._indexes: dict[str, Any] = {}
        self._graphs: dict[str, GraphFile] = {}  # graphs by name of the index
        self._vectors: dict[str, VectorRows] = {}  # by representation

    @property
    def loaded_encoder(self) -> QuestionEncoder | None:
        """The question encoder of `embeddings`; None if it has not been loaded."""
        return self._encoder

    def open(self, retriever_needs: RetrieverNeeds) -> None:
        """Open everything that a retriever needs, before it is used.

        Raises:
            InputError: an index, an encoder or a model is damaged, or a model is not a
                cross-encoder.
            MissingExtraError: the extra that runs an encoder or a model is not installed.
            RefusedError: the space of an encoder differs from the space of the index.
            StoreError: a file is missing, or the kind of an index is not installed.
        """
        for name in retriever_needs.indexes:
            self.index(name)
        for name in retriever_needs.graphs:
            self.graph(name)
        for representation in retriever_needs.vectors:
            self.vectors(representation)
        for name in retriever_needs.indexes:
            self.index_encoder(name)
        for representation in retriever_needs.encoders:
            self.checked_encoder(representation)
        for name in retriever_needs.models:
            self.scorers.load(name)

    def index(self, name: str) -> Any:
        """Return an index of the snapshot, opening it if necessary; see `open_index`."""
        if name not in self._indexes:
            self._indexes[name] = open_index(self.snapshot, name, mmap=self._mmap)
        return self._indexes[name]

    def graph(self, name: str) -> GraphFile:
        """Return the bottom layer of an HNSW index, mapping it if necessary; see `open_graph`."""
        if name not in self._graphs:
            self._graphs[name] = open_graph(self.snapshot, name)
        return self._graphs[name]

    def vectors(self, representation: str) -> VectorRows:
        """Return the vectors of a representation, mapping them if necessary.

        Raises:
            StoreError: the vectors were not pulled, or are damaged.
        """
        if representation not in self._vectors:
            snapshot = self.snapshot
            row_files: Sequence[Path] = list_row_files(snapshot, representation)
            if not (isinstance(row_files, RemoteRowFiles) and row_files.are_verified):
                row_files = snapshot.row_files(representation)
            self._vectors[representation] = open_vectors(row_files, snapshot.n, snapshot.dim_of(representation))
        return self._vectors[representation]

    def encoder(self, representation: str = EMBEDDINGS) -> QuestionEncoder:
        """Return the question encoder of a representation, loading it if necessary."""
        if representation != EMBEDDINGS:
            if representation not in self._other_encoders:
                self._other_encoders[representation] = load_snapshot_encoder(self.snapshot, representation)
            return self._other_encoders[representation]
        if self._encoder is None:
            self._encoder = (self._load_encoder or partial(load_snapshot_encoder, self.snapshot))()
        return self._encoder

    def checked_encoder(self, representation: str = EMBEDDINGS) -> QuestionEncoder:
        """Return the question encoder of a representation, after checking that its space is the
        snapshot's.

        Raises:
            RefusedError: the encoder encodes into a space other than the snapshot's.
        """
        encoder = self.encoder(representation)
        check_question_encoder(encoder, self.snapshot, representation)
        return encoder

    def index_encoder(self, name: str) -> QuestionEncoder | None:
        """Return the question encoder of an index; None if it is searched by text.

        Raises:
            RefusedError: the encoder's space differs from the space of the index.
        """
        if name not in self._index_encoders:
            representation = self.snapshot.manifest.content.representation_of(name)
            has_encoder = get_representation_type(self.snapshot, name) != TEXT
            self._index_encoders[name] = self.checked_encoder(representation) if has_encoder else None
        return self._index_encoders[name]

    def use_encoder(self, encoder: QuestionEncoder, representations: Sequence[str]) -> None:
        """Use `encoder` for queries of those `representations` (at least one) that are in its space.

        Raises:
            RefusedError: none of the representations is in its space.
        """
        question_space = encoder.space()
        space_by_representation = {name: self.snapshot.manifest.content.space_of(name) for name in representations}
        matching_representations = [
            name
            for name, space in space_by_representation.items()
            if space and Space.from_json(space).accepts_queries_of(question_space)
        ]
        if not matching_representations:
            check_question_encoder(encoder, self.snapshot, representations[0])
        for name in matching_representations:
            if name == EMBEDDINGS:
                self._encoder = encoder
            else:
                self._other_encoders[name] = encoder

    def with_encoder(self, encoder: QuestionEncoder) -> "RetrieverContext":
        """Return a context with the same open resources, but with `encoder` for `embeddings`."""
        context = RetrieverContext(self.snapshot, lambda: encoder, self.scorers, mmap=self._mmap)
        context._indexes, context._graphs, context._vectors = self._indexes, self._graphs, self._vectors
        context._other_encoders = self._other_encoders
        return context

    def close(self) -> None:
        """Release all open resources."""
        for open_resources in (self._indexes, self._graphs, self._vectors, self._other_encoders, self._index_encoders):
            open_resources.clear()
        self._encoder = None


@dataclass(frozen=True, slots=True)
class IndexTokens:
    """A handle of an index over token vectors, which scores passages against a query's token
    vectors.
    """

    context: RetrieverContext
    name: str

    def encode(self, queries: Queries) -> Vectors:
        """Return the (q, l, d) token vectors of the queries."""
        encoder = self.context.index_encoder(self.name)
        assert encoder is not None
        return queries.vectors(encoder)

    def score(self, query: Vectors, rows: Rows) -> Vectors:
        """Return the (m,) float32 scores of `rows`; -inf for passages without tokens."""
        scores: Vectors = self.context.index(self.name).score(query, rows)
        return scores


@dataclass(frozen=True, slots=True)
class IndexLinks:
    """A handle of the bottom layer of an HNSW index; a node is a row."""

    context: RetrieverContext
    name: str

    def read_links(self, nodes: Rows) -> npt.NDArray[np.int32]:
        """Return the (m, w) neighbours of (m,) nodes; -1 where a node has fewer."""
        return self.context.graph(self.name).read_links(nodes)


@dataclass(frozen=True, slots=True)
class PassageVectors:
    """A handle that reads the vectors of a representation by row."""

    context: RetrieverContext
    representation: str

    @property
    def files(self) -> dict[str, int]:
        """The size in bytes of each file of the vectors."""
        return RetrieverNeeds(vectors=(self.representation,)).files(self.context.snapshot)

    def read_rows(self, rows: Rows) -> Vectors:
        """Return the (m, d) float32 vectors of (m,) ascending rows."""
        return self.context.vectors(self.representation).read_rows(rows)


@dataclass(frozen=True, slots=True)
class QueryEncoder:
    """A handle of the question encoder of a representation."""

    context: RetrieverContext
    representation: str

    def encode(self, queries: Queries) -> Vectors:
        """Return the vectors of the queries; each batch is encoded once (see `Queries.vectors`)."""
        return queries.vectors(self.context.encoder(self.representation))


@dataclass(frozen=True, slots=True)
class NamedScorer:
    """A `PairScorer` that loads the cross-encoder of a given name when it is first used."""

    context: RetrieverContext
    name: str

    @property
    def folder(self) -> Path | None:
        """The folder of the model."""
        model = self.context.scorers.load(self.name)
        return model.folder if isinstance(model, HasFolder) else None

    def scores(self, questions: Sequence[str], titles: Sequence[str], texts: Sequence[str]) -> Vectors:
        """Return the (n,) float32 scores of n pairs, in order; finite, larger is better."""
        return self.context.scorers.load(self.name).scores(questions, titles, texts)


def load_snapshot_encoder(snapshot: Snapshot, representation: str = EMBEDDINGS) -> QuestionEncoder:
    """Load the snapshot's question encoder of a representation: dense, sparse, or of token vectors.

    Raises:
        MissingExtraError: the model extra is not installed.
        StoreError: the snapshot has no such encoder.
    """
    return load_any_encoder(snapshot.folder(question_encoder_path(representation)))


def check_question_encoder(encoder: QuestionEncoder, snapshot: Snapshot, representation: str = EMBEDDINGS) -> None:
    """Check that an encoder encodes queries into the space of a representation of a snapshot.

    Raises:
        RefusedError: the spaces differ.
        UsageError: the snapshot has no vectors.
    """
    space = snapshot.manifest.content.space_of(representation)
    if space is None:
        raise UsageError(f"snapshot {snapshot.id[:12]} has no vectors: reindex it with an encoder")
    check_same_space(encoder.space(), Space.from_json(space))
