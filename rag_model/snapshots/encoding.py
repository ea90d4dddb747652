"""Store the encoders and the chunker of a build for its workers and for readers of the snapshot."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from rag_model.corpus.chunk import ChunkRecipe
from rag_model.corpus.chunkers.chunker import digest_files, is_single_file, list_setting_files
from rag_model.encoders.architecture import check_is_encoder
from rag_model.encoders.bag import BagSpec, collect_bag_files, compute_bag_space, read_bag_spec
from rag_model.encoders.embed import Dtype
from rag_model.encoders.encoder import collect_question_encoder_files
from rag_model.encoders.files import ENDPOINT_PREFIX, find_hub_name, resolve_folder
from rag_model.encoders.muvera import derive_muvera_space, parse_muvera_settings
from rag_model.encoders.row_formats import RowFormatName
from rag_model.encoders.space import Space, check_same_space, compute_space, name_space_by_content, read_declared_space
from rag_model.encoders.sparse_encoder import (
    SparseSpec,
    collect_sparse_encoder_files,
    compute_sparse_space,
    read_sparse_spec,
)
from rag_model.encoders.spec import MUVERA_KEY as MUVERA
from rag_model.encoders.spec import (
    PROBES,
    RECORD_FILE,
    EncoderSpec,
    TokenSpec,
    find_known_settings,
    read_encoder_spec,
    read_token_spec,
)
from rag_model.encoders.token_encoder import collect_token_encoder_files, compute_token_space
from rag_model.errors import UsageError
from rag_model.process import temporary_folder
from rag_model.retrieve.models import resolve_encoders, resolve_part_folder
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.cache import build_link_tree
from rag_model.store.objects.memo import StageResult
from rag_model.store.store import Store
from rag_model.store.versions.model_manifest import COLBERT

# Maps a hub name as a user gave it to NAME@COMMIT. A build uses its parent's commits, so that new
# commits on a branch do not change the encoder space.
Pins = Mapping[str, str]
COMMITS = "commits"  # the provenance field with the commits of hub names
NO_PINS: Pins = MappingProxyType({})
StoredFiles = tuple[tuple[str, BlobRef], ...]  # (name, blob) pairs; hashable, to be a cache key
SettingFiles = tuple[tuple[str, StoredFiles], ...]  # (setting of the chunker, its files) pairs
_PROBE_STAGE = "probe"  # the memo stage that records the probe vectors of models behind endpoints
RepresentationKindName = Literal["", "vectors", "tokens", "muvera", "sparse", "bag"]


@dataclass(frozen=True, slots=True)
class EncodeRecipe:
    """Settings of the representation `embeddings`."""

    # dtype of the stored vectors; float16 takes half the bytes, and its rounding of 1e-3 does not
    # affect search
    dtype: Dtype = "float16"
    # folder or hub name of the question encoder; if empty, the question encoder of the DPR pair, or
    # the passage encoder itself
    question_encoder: str = ""
    # fields of EncoderSpec that replace those in the encoder's folder
    spec: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RepresentRecipe:
    """Settings of an additional representation."""

    # `vectors`: one vector per passage. `tokens`: one vector per token, from a ColBERT. `muvera`:
    # one vector per passage, computed from its token vectors. `sparse`: weighted terms, from a
    # masked-language model. `bag`: the tokens, from a tokenizer. If empty, the name decides:
    # `tokens` and `sparse` have the kind of that name, all others the kind `vectors`.
    kind: RepresentationKindName = ""
    # folder or hub name of its passage encoder, or `model:NAME`; a build needs one
    encoder: str = ""
    dtype: Dtype = "float16"  # dtype of the stored vectors
    question_encoder: str = ""  # as in `EncodeRecipe`
    spec: Mapping[str, Any] = field(default_factory=dict)  # as in `EncodeRecipe`
    # settings of the kind `muvera`: repetitions, bits, projected, seed
    muvera: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredEncoder:
    """An encoder's files in the store, and its encoder space."""

    name: str  # name that the user gave
    spec: EncoderSpec | TokenSpec | SparseSpec | BagSpec
    space: Space
    # files of the passage encoder; the tuple is hashable, so that a worker loads an encoder once
    passage: StoredFiles
    question: StoredFiles  # files of the question encoder
    # format of a passage's rows: one vector, one vector per token, or weighted terms
    kind: RowFormatName = "vectors"
    scale: int = 0  # for a sparse encoder, the integer that represents a term weight of 1
    # (name as the user gave it, NAME@COMMIT) of each encoder that is from the hub
    commits: tuple[tuple[str, str], ...] = ()

    @property
    def is_static(self) -> bool:
        """Whether no transformer encodes passages: static vectors, or bags of tokens."""
        return isinstance(self.spec, BagSpec) or (isinstance(self.spec, EncoderSpec) and self.spec.is_static)

    @property
    def is_endpoint(self) -> bool:
        """Whether the model is behind an HTTP API."""
        return isinstance(self.spec, EncoderSpec) and self.spec.is_endpoint


def store_encoder(
    store: Store,
    name: str,
    recipe: EncodeRecipe | RepresentRecipe,
    model_store: Store | None = None,
    pins: Pins = NO_PINS,
) -> StoredEncoder:
    """Resolve the encoder `name`, and store the files that workers and readers need.

    A name is a folder, a hub name, `openai:MODEL` of a model behind an endpoint, or `model:NAME` of
    a DPR model in `model_store` (default: `store`). `pins` holds the commits of hub names that
    a parent was built with.

    Raises:
        InputError: the encoder is not found, or one of its files is missing or corrupt.
        RefusedError: the question encoder declares another space.
        StoreError: the store has no such model.
        UsageError: `recipe.spec` names an unknown field, or the model encodes no passages.
    """
    folder, question_folder, commits = _find_encoders(
        model_store or store,
        name,
        recipe.question_encoder,
        "dpr",
        lambda encoder: resolve_encoder_folder(store, encoder, model_store, pins),
    )
    check_is_encoder(folder)
    settings = {**find_known_settings(name), **recipe.spec}
    encoder_spec = read_encoder_spec(folder, settings)
    space = name_space_by_content(compute_space(folder, encoder_spec), folder)

    def collect_files(folder: Path, workdir: Path) -> Mapping[str, Path]:
        return collect_question_encoder_files(folder, read_encoder_spec(folder, settings), space, workdir)

    passage_files, question_files = _store_encoder_pair(store, folder, question_folder, space, collect_files)
    return StoredEncoder(name, encoder_spec, space, passage_files, question_files, commits=commits)


def store_token_encoder(
    store: Store, name: str, recipe: RepresentRecipe, model_store: Store | None = None, pins: Pins = NO_PINS
) -> StoredEncoder:
    """Store a ColBERT as `store_encoder` does; `name` is a folder, a hub name, or `model:NAME` of a
    ColBERT in the store of models.

    Raises:
        InputError: the model is not found or is no ColBERT, or one of its files is missing or
            corrupt.
        StoreError: the store has no such model.
        UsageError: a setting is unknown, there is a question encoder, or the model is no ColBERT.
    """
    if recipe.question_encoder:
        raise UsageError(f"{name} encodes questions and passages alike: leave question_encoder out")
    folder = resolve_part_folder(model_store or store, pins.get(name, name), COLBERT)
    encoder_spec = read_token_spec(folder, recipe.spec)
    space, extra_settings = compute_token_space(folder, encoder_spec), dict[str, Any]()
    if recipe.kind == MUVERA:
        space = derive_muvera_space(space, parse_muvera_settings(recipe.muvera, space.dim))
        extra_settings = {MUVERA: dict(recipe.muvera)}
    elif recipe.muvera:
        raise UsageError(f"muvera settings do not apply to token vectors: set kind = {MUVERA!r}, or leave them out")
    space = name_space_by_content(space, folder)
    with temporary_folder("encoder") as workdir:
        files = _store_files(store, collect_token_encoder_files(folder, encoder_spec, space, workdir, extra_settings))
    kind: RowFormatName = "vectors" if extra_settings else "tokens"
    return StoredEncoder(name, encoder_spec, space, files, files, kind, commits=_list_hub_commits({name: folder}))


def store_sparse_encoder(
    store: Store, name: str, recipe: RepresentRecipe, model_store: Store | None = None, pins: Pins = NO_PINS
) -> StoredEncoder:
    """Store a sparse encoder as `store_encoder` does: a masked-language model, or a SiDR model,
    which may have separate encoders of questions and passages.

    Raises:
        InputError: the model is not found or is no sparse encoder, or one of its files is missing
            or corrupt.
        RefusedError: the question encoder declares another space than the passage encoder's.
        StoreError: the store has no such model.
        UsageError: a setting is unknown or does not apply, or the model encodes no passages.
    """
    folder, question_folder, commits = _find_sparse_pair(model_store or store, name, recipe, pins)
    spec = read_sparse_spec(folder, recipe.spec)
    space = name_space_by_content(compute_sparse_space(folder, spec), folder)

    def collect_files(encoder_folder: Path, workdir: Path) -> Mapping[str, Path]:
        return collect_sparse_encoder_files(
            encoder_folder, read_sparse_spec(encoder_folder, recipe.spec), space, workdir
        )

    passage_files, question_files = _store_encoder_pair(store, folder, question_folder, space, collect_files)
    return StoredEncoder(name, spec, space, passage_files, question_files, "sparse", spec.scale, commits)


def store_bag(
    store: Store, name: str, recipe: RepresentRecipe, model_store: Store | None = None, pins: Pins = NO_PINS
) -> StoredEncoder:
    """Store a tokenizer, which turns passages into bags of tokens, and the sparse encoder of the
    queries.

    Raises:
        InputError: a model is not found, is no sparse encoder, or one of its files is missing or
            corrupt.
        RefusedError: the question encoder has another tokenizer.
        StoreError: the store has no such model.
        UsageError: a setting is unknown or does not apply.
    """
    folder, question_folder, commits = _find_sparse_pair(model_store or store, name, recipe, pins)
    bag_encoder, question_spec = store_bag_tokenizer(store, folder, recipe), read_sparse_spec(question_folder)
    check_same_space(
        read_declared_space(question_folder) or compute_sparse_space(question_folder, question_spec), bag_encoder.space
    )
    with temporary_folder("encoder") as workdir:
        files = collect_sparse_encoder_files(question_folder, question_spec, bag_encoder.space, workdir)
        return replace(bag_encoder, name=name, question=_store_files(store, files), commits=commits)


def store_bag_tokenizer(store: Store, folder: Path, recipe: RepresentRecipe | None = None) -> StoredEncoder:
    """Store the tokenizer in a folder, without an encoder of queries.

    Raises:
        InputError: a file is missing or corrupt.
        UsageError: a setting is unknown.
    """
    spec = read_bag_spec(folder, recipe.spec if recipe else None)
    with temporary_folder("encoder") as workdir:
        passage_files = _store_files(store, collect_bag_files(folder, spec, workdir))
    return StoredEncoder(str(folder), spec, compute_bag_space(folder, spec), passage_files, (), "sparse", scale=1)


def _find_sparse_pair(
    model_store: Store, name: str, recipe: RepresentRecipe, pins: Pins
) -> tuple[Path, Path, tuple[tuple[str, str], ...]]:
    if recipe.muvera:
        raise UsageError(f"muvera settings do not apply to the terms of {name}: leave them out")
    return _find_encoders(
        model_store, name, recipe.question_encoder, "sidr", lambda encoder: _resolve_folder(encoder, pins)
    )


def _find_encoders(
    model_store: Store, name: str, question_encoder: str, objective: str, resolve: Callable[[str], Path]
) -> tuple[Path, Path, tuple[tuple[str, str], ...]]:
    """Return the folders of the passage encoder and the question encoder, which may be the same
    folder, and their commits.

    `objective` is the objective that trains such models; error messages name it.
    """
    encoder_names = resolve_encoders(model_store, name, question_encoder)
    if encoder_names.passage is None:
        raise UsageError(f"{name} encodes only questions: name a model of `finetune {objective}`")
    folder = resolve(encoder_names.passage)
    question_folder = folder if encoder_names.question == encoder_names.passage else resolve(encoder_names.question)
    return (
        folder,
        question_folder,
        _list_hub_commits({encoder_names.passage: folder, encoder_names.question: question_folder}),
    )


@dataclass(frozen=True, slots=True)
class RepresentationKind:
    """A kind of representation that a recipe may name."""

    row_format: RowFormatName
    # function that stores the encoder; its arguments are the store, the encoder's name, the
    # settings, the store of models, and the pins
    store_encoder: Callable[[Store, str, RepresentRecipe, Store | None, Pins], StoredEncoder]


REPRESENTATION_KINDS = {
    "vectors": RepresentationKind("vectors", store_encoder),
    "tokens": RepresentationKind("tokens", store_token_encoder),
    "muvera": RepresentationKind("vectors", store_token_encoder),
    "sparse": RepresentationKind("sparse", store_sparse_encoder),
    "bag": RepresentationKind("sparse", store_bag),
}


def resolve_encoder_folder(store: Store, name: str, model_store: Store | None = None, pins: Pins = NO_PINS) -> Path:
    """Return the folder of a dense encoder; `name` is given as for `store_encoder`.

    For a model behind an endpoint, the vectors of its probe texts are recorded in the store when it
    is first used. These vectors identify the model: later builds keep its vector space if the
    model still returns nearly the same vectors.

    Raises:
        EndpointError: the endpoint failed.
        InputError: the encoder is not found.
        RefusedError: the model behind the endpoint has changed.
    """
    if not name.startswith(ENDPOINT_PREFIX):
        return _resolve_folder(name, pins)
    from rag_model.encoders.endpoint_encoder import (  # noqa: PLC0415 - imports httpx
        PROBES_VERSION,
        EndpointEncoder,
        write_endpoint_folder,
    )

    def produce(workdir: Path) -> StageResult:
        write_endpoint_folder(name, workdir)
        return StageResult({file: workdir / file for file in (RECORD_FILE, PROBES)}, {})

    inputs = {"name": name, "code": PROBES_VERSION}
    record_store, is_new = model_store or store, False
    record = record_store.memo.find(_PROBE_STAGE, record_store.memo.compute_key(inputs))
    if record is None:
        record_store = store
        record, is_new = store.memo.get_or_create(_PROBE_STAGE, inputs, produce)
    folder = build_link_tree({file: record_store.blobs.get_local_path(blob) for file, blob in record.outputs.items()})
    if not is_new:
        EndpointEncoder.load(folder).check_probes()
    return folder


def _resolve_folder(name: str, pins: Pins) -> Path:
    return resolve_folder(pins.get(name, name))


def _list_hub_commits(folders: Mapping[str, Path]) -> tuple[tuple[str, str], ...]:
    """Return (name as the user gave it, NAME@COMMIT) of each folder that is in the hub's cache."""
    return tuple((name, hub_name) for name, folder in folders.items() if (hub_name := find_hub_name(folder)))


def _store_encoder_pair(
    store: Store,
    passage_folder: Path,
    question_folder: Path,
    space: Space,
    collect_files: Callable[[Path, Path], Mapping[str, Path]],
) -> tuple[StoredFiles, StoredFiles]:
    """Store the files of a passage encoder and a question encoder, which may share one folder.

    Raises:
        UsageError: the question encoder declares another space.
    """
    if question_folder != passage_folder and (question_space := read_declared_space(question_folder)) is not None:
        check_same_space(question_space, space)
    with temporary_folder("encoder") as workdir:
        passage_files = _store_files(store, collect_files(passage_folder, workdir))
        if question_folder == passage_folder:
            return passage_files, passage_files
        return passage_files, _store_files(store, collect_files(question_folder, workdir))


def _store_files(store: Store, files: Mapping[str, Path]) -> StoredFiles:
    return tuple((name, store.blobs.put_file(files[name])) for name in sorted(files))


@dataclass(frozen=True, slots=True)
class StoredChunker:
    """A chunk recipe whose file settings are replaced by digests, and the stored files."""

    recipe: ChunkRecipe
    files: SettingFiles = ()


def store_chunker(store: Store, recipe: ChunkRecipe) -> StoredChunker:
    """Store the files that a recipe's settings name, so that later changes do not affect the build.

    Raises:
        InputError: a file is missing.
        StoreError: the store is full or unwritable.
    """
    setting_files = list_setting_files(recipe.create_chunker())
    stored_files_by_setting = {
        setting: {name: store.blobs.put_file(file) for name, file in files.items()}
        for setting, files in setting_files.items()
    }
    digest_by_setting = {
        setting: digest_files({name: blob.id for name, blob in blobs.items()})
        for setting, blobs in stored_files_by_setting.items()
    }
    blobs_by_setting = tuple((setting, tuple(blobs.items())) for setting, blobs in stored_files_by_setting.items())
    return StoredChunker(replace(recipe, settings={**recipe.settings, **digest_by_setting}), blobs_by_setting)


def fetch_setting_files(store: Store, files: SettingFiles) -> dict[str, Path]:
    """Return the local paths of each setting's files; fetch them if needed.

    Raises:
        StoreError: a file is missing or damaged.
    """
    return {setting: _fetch_files(store, dict(blobs)) for setting, blobs in files}


def _fetch_files(store: Store, blobs: Mapping[str, BlobRef]) -> Path:
    paths = {name: store.blobs.get_local_path(blob) for name, blob in blobs.items()}
    return next(iter(paths.values())) if is_single_file(paths) else build_link_tree(paths)
