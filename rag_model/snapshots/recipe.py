"""The recipe of a snapshot: one frozen record per stage, read from a TOML file; the defaults are a
working recipe.

```toml
[chunk]
chunker = "recursive"

[encode]
dtype = "float16"
spec = { max_length = 256 }

[index.hnsw]
factory = "HNSW32"

[gate]
max_passage_loss = 0.1
```
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from rag_model.corpus.chunk import ChunkRecipe
from rag_model.corpus.records import SiteSettings
from rag_model.encoders.embed import Dtype
from rag_model.errors import BookwheelError, UsageError
from rag_model.evaluation.gate import GateRecipe, QuestionFloor
from rag_model.evaluation.questions import read_questions
from rag_model.evaluation.retrieval.judging import RetrievalJudge
from rag_model.index.kind import RepresentationType, get_kind_for_factory
from rag_model.index.recipe import IndexRecipe, representation_of
from rag_model.retrieve.factory import CALLS, plan_retriever
from rag_model.snapshots.encoding import REPRESENTATION_KINDS, EncodeRecipe, RepresentRecipe
from rag_model.store.versions.manifest import EMBEDDINGS, EXACT, SPARSE, TEXT, TOKENS, Content, Manifest
from rag_model.store.versions.snapshot import Snapshot
from rag_model.toml import from_table, read_toml

_INDEX_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
# Types of the representations whose recipe states no kind.
_DEFAULT_TYPES: dict[str, RepresentationType] = {TOKENS: "tokens", SPARSE: "sparse"}
_REPRESENTATION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_MAX_LICENCE = 100  # maximum characters of a licence, because every hit repeats it


def create_default_indexes() -> dict[str, IndexRecipe]:
    """Return the default indexes of a recipe: a graph for fast search, codes for little memory, and
    BM25.

    The codes retrieve candidates, which the snapshot's vectors rank. This loses less than half a
    point of Success@20 against exact search; codes alone lost 3 to 7 points (2,562 and 21,581
    passages). The index file has one byte for 4 dimensions and an id, which is 104 bytes per
    passage at 384 dimensions; a search keeps nothing else in memory. The store does not grow,
    because it has the vectors anyway. Readers of the snapshot need the vectors on their disk: 2
    bytes per dimension, 768 bytes per passage. `IVF,PQ` and `IVF,SQ8` search without the vectors,
    with more loss or 4 times the memory.
    """
    return {
        "hnsw": IndexRecipe("HNSW"),
        "ivfpq": IndexRecipe("IVF,PQ,Refine(vectors)"),
        "bm25": IndexRecipe("BM25"),
    }


@dataclass(frozen=True, slots=True)
class Recipe:
    """All settings of a build except its dump and its encoder."""

    chunk: ChunkRecipe = field(default_factory=ChunkRecipe)
    # settings of the representation `embeddings`
    encode: EncodeRecipe = field(default_factory=EncodeRecipe)
    # settings of further representations, by name
    represent: Mapping[str, RepresentRecipe] = field(default_factory=dict)
    index: Mapping[str, IndexRecipe] = field(default_factory=create_default_indexes)  # by name
    gate: GateRecipe = field(default_factory=GateRecipe)
    # bytes of compressed dump per part; the default depends on the dump's size
    part_bytes: int | None = None
    retriever: str = ""  # the default retriever; if empty, the first index
    # licence of the text; if empty, it is known for Wikimedia's wikis and unknown for others
    licence: str = ""
    # which pages of a MediaWiki site are read, and how
    site: SiteSettings = field(default_factory=SiteSettings)

    def __post_init__(self) -> None:
        if self.part_bytes is not None and self.part_bytes < 1:
            raise UsageError(f"part_bytes must be at least 1, not {self.part_bytes}")
        if len(self.licence) > _MAX_LICENCE or not self.licence.isprintable():
            raise UsageError(
                f"the licence {self.licence[:40]!r} is not a name of at most {_MAX_LICENCE} "
                "characters: give one such as 'CC BY-SA 3.0'"
            )
        for name in self.represent:
            _check_name(name, "a representation", _REPRESENTATION_NAME)
            if name in (EMBEDDINGS, TEXT):
                raise UsageError(f"every snapshot has a representation {name}: give [represent.{name}] another name")
        for name, index in self.index.items():
            _check_name(name, "an index", _INDEX_NAME)
            if name in CALLS.list_names():
                raise UsageError(
                    f"{name} is the name of a retriever function, as in {name}(…): give the index another name"
                )
            if name == EXACT and index.factory != "Flat":
                raise UsageError(f"an index named {EXACT} compares every vector: give {index.factory} another name")

    @property
    def default_retriever(self) -> str:
        """The retriever that the manifest records as its default."""
        return self.retriever or next(iter(self.index), EXACT)

    def dtype_of(self, representation: str) -> Dtype:
        """Return the dtype in which a representation's vectors are stored."""
        return self.encode.dtype if representation == EMBEDDINGS else self.represent[representation].dtype

    def list_representations(self) -> dict[str, RepresentationType]:
        """Return the row type of each encoded representation: one vector, token vectors, or
        weighted terms.
        """
        kind_by_representation: dict[str, RepresentationType] = {EMBEDDINGS: "vectors"}
        for name, representation in self.represent.items():
            kind_by_representation[name] = (
                REPRESENTATION_KINDS[representation.kind].row_format
                if representation.kind
                else _DEFAULT_TYPES.get(name, "vectors")
            )
        return kind_by_representation

    def content(self) -> dict[str, Any]:
        """Return the settings that belong to a snapshot's identity.

        The gate is left out, because it judges a snapshot without changing it. The encoders, the
        retriever and the licence are left out, because the content has them in other fields. A file
        that a chunker's setting names is replaced by its digest.
        """
        settings = asdict(self)
        del settings["gate"], settings["retriever"], settings["licence"], settings["encode"]["question_encoder"]
        for representation in settings["represent"].values():
            del representation["encoder"], representation["question_encoder"]
            for setting in ("kind", "muvera"):
                if not representation[setting]:
                    del representation[setting]
        if self.site == SiteSettings():
            del settings["site"]  # so that ids stay the same as in versions without this setting
        return {**settings, "chunk": self.chunk.to_json()}


def _check_name(name: str, noun: str, pattern: re.Pattern[str]) -> None:
    if not pattern.fullmatch(name):
        raise UsageError(f"{name!r} cannot name {noun}, because it becomes a file name: use letters, digits, _ and -")


def check_indexes_and_retrievers(
    recipe: Recipe,
    representations: Mapping[str, RepresentationType],
    existing_indexes: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Check that each index has its representation, and that the retrievers of the recipe and its
    gate can be opened.

    Args:
        recipe: the recipe of the build.
        representations: the row types of the encoded representations of the new snapshot.
        existing_indexes: manifest entries of the snapshot's existing indexes, by name.

    Raises:
        InputError: questions of the gate cannot be read.
        UsageError: a name is unknown, a model of the retriever is a folder, which other machines do
            not have, or the gate's questions cannot be judged as the gate specifies.
    """
    for name, index in recipe.index.items():
        representation, required_type = representation_of(index), get_kind_for_factory(index.factory).represents
        choices = [over for over, kind in {TEXT: TEXT, **representations}.items() if kind == required_type]
        if representation not in choices:
            raise UsageError(
                f"index {name} is over {representation!r}, but {index.factory} takes "
                f"{required_type}: "
                + (
                    f"choose from {', '.join(choices)}"
                    if choices
                    else f"add [represent.{required_type}] with an encoder"
                )
            )
    draft = draft_snapshot(recipe, existing_indexes)
    if recipe.retriever:
        _check_retriever(draft, recipe.retriever)
    for name, floor in recipe.gate.questions.items():
        _check_question_floor(draft, name, floor)


def draft_snapshot(recipe: Recipe, existing_indexes: Mapping[str, Mapping[str, Any]] | None = None) -> Snapshot:
    """Return a snapshot that has a recipe's indexes but no files, to check retrievers with."""
    planned_indexes = {
        name: {"factory": index.factory, "over": representation_of(index)} for name, index in recipe.index.items()
    }
    return Snapshot(
        Manifest(Content({}, (), {}, indexes={**(existing_indexes or {}), **planned_indexes})), Path, Path, "the recipe"
    )


def _check_retriever(draft: Snapshot, expression: str) -> None:
    try:
        models = plan_retriever(draft, expression).models
    except UsageError as error:
        raise UsageError(f"the recipe's retriever {expression!r} does not fit its indexes: {error}") from error
    for model in models:
        if model.startswith(("/", ".", "~")) or Path(model).exists():
            raise UsageError(
                f"the recipe's retriever {expression!r} names the folder {model}, which other "
                "machines do not have: put the model into the store, and name it as model:NAME"
            )


def _check_question_floor(draft: Snapshot, name: str, floor: QuestionFloor) -> None:
    """Check before hours of work that the gate's questions can be read and judged, and that the
    retriever fits the indexes.
    """
    try:
        if floor.retriever:
            plan_retriever(draft, floor.retriever)
        RetrievalJudge.for_questions(read_questions(floor.file), floor.judged_by, patterns=floor.patterns).get_cutoff(
            floor.measure
        )
    except BookwheelError as error:
        raise type(error)(f"the gate's questions {name} cannot be used: {error}") from error


def read_recipe(path: Path | None) -> Recipe:
    """Read a recipe file; without one, return the default recipe.

    Raises:
        InputError: the file is missing or is not TOML.
        UsageError: a setting is unknown or has an invalid value; the message names it.
    """
    if path is None:
        return Recipe()
    recipe = from_table(Recipe, read_toml(path), str(path))
    if not recipe.index:
        raise UsageError(f"the recipe {path} names no index: give at least one, such as [index.hnsw]")
    return recipe


def format_recipe(recipe: Mapping[str, Any]) -> str:
    """Return the recipe section of a manifest's content as TOML.

    >>> print(format_recipe({"part_bytes": None, "chunk": {"words": 100}, "index": {"a": {"factory": "HNSW8"}}}))
    [chunk]
    words = 100
    <BLANKLINE>
    [index.a]
    factory = "HNSW8"
    <BLANKLINE>
    """
    return tomli_w.dumps(drop_none(recipe))


def drop_none(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe without None values, also in nested tables: TOML has no None, and None is the
    default.
    """
    return {
        name: drop_none(setting) if isinstance(setting, Mapping) else setting
        for name, setting in recipe.items()
        if setting is not None
    }
