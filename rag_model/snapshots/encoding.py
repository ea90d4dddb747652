"""The encoder of a build in the store: workers load it from there, and readers encode questions with it."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rag_model.encoders.architecture import check_kind
from rag_model.encoders.bag import BagSpec, bag_files, bag_space, read_bag_spec
from rag_model.encoders.embed import Dtype
from rag_model.encoders.forms import FormName
from rag_model.encoders.muvera import RECORDED as MUVERA
from rag_model.encoders.muvera import muvera_of, muvera_space
from rag_model.encoders.resolve import question_files, resolve_folder
from rag_model.encoders.space import Space, asked_space, check_same_space, named_by_content, space_of
from rag_model.encoders.sparse_encoder import sparse_files, sparse_space
from rag_model.encoders.sparse_spec import SparseSpec, read_sparse_spec
from rag_model.encoders.spec import EncoderSpec, known_prompts, read_spec
from rag_model.encoders.token_encoder import token_files, token_space
from rag_model.encoders.token_spec import TokenSpec, read_token_spec
from rag_model.errors import UsageError
from rag_model.retrieve.named import colbert_folder, encoder_names
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.store import Store


@dataclass(frozen=True, slots=True)
class EncodeRecipe:
    """How passages become vectors."""

    dtype: Dtype = "float16"  # as stored: half the bytes; its rounding of 1e-3 does not affect search
    question_encoder: str = ""  # folder or hub name of a pair's other half; empty: DPR's sibling, or the same encoder
    spec: Mapping[str, Any] = field(default_factory=dict)  # fields of EncoderSpec that replace those of the folder


Kind = Literal["", "vectors", "tokens", "muvera", "sparse", "bag"]


@dataclass(frozen=True, slots=True)
class RepresentRecipe:
    """How passages become vectors of an additional representation."""

    kind: Kind = ""  # one vector a passage; `tokens`: many, by a ColBERT; `muvera`: one made of many; `sparse`:
    # weighted terms, by a masked-language model; `bag`: the tokens, by a tokenizer; empty: `tokens` and `sparse` by the
    # name of the representation
    encoder: str = ""  # folder or hub name of its passage encoder, or `model:NAME`; a build needs one
    dtype: Dtype = "float16"  # as stored
    question_encoder: str = ""  # as of `EncodeRecipe`
    spec: Mapping[str, Any] = field(default_factory=dict)  # as of `EncodeRecipe`
    muvera: Mapping[str, Any] = field(default_factory=dict)  # of the kind `muvera`: repetitions, bits, projected, seed

    @property
    def encode(self) -> EncodeRecipe:
        """The same settings in the form of the representation `embeddings`."""
        return EncodeRecipe(self.dtype, self.question_encoder, self.spec)


@dataclass(frozen=True, slots=True)
class StoredEncoder:
    """An encoder's files in the store, and the space of their vectors."""

    name: str  # as the user gave it
    spec: EncoderSpec | TokenSpec | SparseSpec | BagSpec
    space: Space
    passage: tuple[tuple[str, BlobRef], ...]  # (file name, blob), hashable: a worker loads equal encoders once
    question: tuple[tuple[str, BlobRef], ...]
    kind: FormName = "vectors"  # what it makes of a passage: one vector, many, or weighted terms
    scale: int = 0  # units of a term's weight of 1


def store_encoder(store: Store, name: str, recipe: EncodeRecipe, models: Store | None = None) -> StoredEncoder:
    """Resolve the encoder `name`, and put the files that workers and readers need into the store.

    A name is a folder, a hub name, or `model:NAME` of a DPR model, which is looked up in `models`, else in `store`.

    Raises:
        InputError: it is not found, or a file of it is missing or corrupt.
        RefusedError: the question encoder declares another space.
        StoreError: the store has no such model.
        UsageError: `recipe.spec` names an unknown field, or the model encodes no passages.
    """
    names = encoder_names(models or store, name)
    if names.passage is None:
        raise UsageError(f"{name} encodes only questions: name a model of `finetune dpr`")
    folder = resolve_folder(names.passage)
    check_kind(folder)
    settings = {**known_prompts(name), **recipe.spec}
    spec = read_spec(folder, settings)
    space = named_by_content(space_of(folder, spec), folder)
    asking = resolve_folder(recipe.question_encoder or names.question)
    if asking != folder and (asked := asked_space(asking)) is not None:
        check_same_space(asked, space)
    with tempfile.TemporaryDirectory(prefix="bookwheel-") as workdir:
        passage = question = _put(store, question_files(folder, spec, space, Path(workdir)))
        if asking != folder:
            question = _put(store, question_files(asking, read_spec(asking, settings), space, Path(workdir)))
    return StoredEncoder(name, spec, space, passage, question)


def store_token_encoder(store: Store, name: str, recipe: RepresentRecipe, models: Store | None = None) -> StoredEncoder:
    """Do as `store_encoder` with a ColBERT: a folder, a hub name, or `model:NAME` of one that was trained here.

    Raises:
        InputError: it is not found, it is no ColBERT, or a file of it is missing or corrupt.
        StoreError: the store has no such model.
        UsageError: a setting is unknown, there is a question encoder, or the model is no ColBERT.
    """
    if recipe.question_encoder:
        raise UsageError(f"{name} encodes questions and passages alike: leave question_encoder out")
    folder = colbert_folder(models or store, name)
    spec = read_token_spec(folder, recipe.spec)
    space, more = token_space(folder, spec), dict[str, Any]()
    if recipe.kind == MUVERA:
        space = muvera_space(space, muvera_of(recipe.muvera, space.dim))
        more = {MUVERA: dict(recipe.muvera)}
    elif recipe.muvera:
        raise UsageError(f"muvera settings do not apply to token vectors: say kind = {MUVERA!r}, or leave them out")
    space = named_by_content(space, folder)
    with tempfile.TemporaryDirectory(prefix="bookwheel-") as workdir:
        files = _put(store, token_files(folder, spec, space, Path(workdir), more))
    return StoredEncoder(name, spec, space, files, files, "vectors" if more else "tokens")


def store_sparse_encoder(
    store: Store, name: str, recipe: RepresentRecipe, models: Store | None = None
) -> StoredEncoder:
    """Do as `store_encoder` with a sparse encoder: a masked-language model, or a SiDR, which may be a pair.

    Raises:
        InputError: it is not found, it is no sparse encoder, or a file of it is missing or corrupt.
        RefusedError: the question encoder declares another space.
        StoreError: the store has no such model.
        UsageError: a setting is unknown or does not apply, or the model encodes no passages.
    """
    folder, asking = _sparse_pair(store, name, recipe, models)
    spec = read_sparse_spec(folder, recipe.spec)
    space = named_by_content(sparse_space(folder, spec), folder)
    if asking != folder and (asked := asked_space(asking)) is not None:
        check_same_space(asked, space)
    with tempfile.TemporaryDirectory(prefix="bookwheel-") as workdir:
        passage = question = _put(store, sparse_files(folder, spec, space, Path(workdir)))
        if asking != folder:
            question = _put(store, sparse_files(asking, read_sparse_spec(asking), space, Path(workdir)))
    return StoredEncoder(name, spec, space, passage, question, "sparse", spec.scale)


def store_bag(store: Store, name: str, recipe: RepresentRecipe, models: Store | None = None) -> StoredEncoder:
    """Put a tokenizer, which makes bags of passages, and the sparse encoder that asks them into the store.

    Raises:
        InputError: it is not found, it is no sparse encoder, or a file of it is missing or corrupt.
        RefusedError: the question encoder has another tokenizer.
        StoreError: the store has no such model.
        UsageError: a setting is unknown or does not apply.
    """
    folder, asking = _sparse_pair(store, name, recipe, models)
    spec, weighing = read_bag_spec(folder, recipe.spec), read_sparse_spec(asking)
    space = bag_space(folder, spec)
    check_same_space(asked_space(asking) or sparse_space(asking, weighing), space)
    with tempfile.TemporaryDirectory(prefix="bookwheel-") as workdir:
        passage = _put(store, bag_files(folder, spec, Path(workdir)))
        question = _put(store, sparse_files(asking, weighing, space, Path(workdir)))
    return StoredEncoder(name, spec, space, passage, question, "sparse", scale=1)


def _sparse_pair(store: Store, name: str, recipe: RepresentRecipe, models: Store | None) -> tuple[Path, Path]:
    """Return the folders of the passage encoder and of the question encoder; one encoder may be both."""
    if recipe.muvera:
        raise UsageError(f"{name} makes weighted terms: leave muvera out")
    names = encoder_names(models or store, name)
    if names.passage is None:
        raise UsageError(f"{name} encodes only questions: name a model of `finetune sidr`")
    return resolve_folder(names.passage), resolve_folder(recipe.question_encoder or names.question)


def _put(store: Store, files: Mapping[str, Path]) -> tuple[tuple[str, BlobRef], ...]:
    return tuple((name, store.blobs.put_file(files[name])) for name in sorted(files))
