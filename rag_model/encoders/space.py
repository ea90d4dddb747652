"""The vector space of an encoder, identified by a digest: only vectors of one space may be
compared.

Question and passage vectors can be compared only if their encoders were trained together. The space
covers everything that determines a passage's vector. Settings of a transformer that cannot be read
from its tensors are covered for the types in `_CHECKED_TYPES`. The space does not cover the
question prompt, because several prompts may be used with one space, nor dtype and device, which
change a vector only by rounding.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from rag_model.digest import digest_file, digest_json
from rag_model.encoders.files import (
    CONFIG,
    TOKENIZER,
    list_tokenizer_files,
    read_dim,
    read_json_object,
    read_optional_json,
)
from rag_model.encoders.spec import (
    ENDPOINT_POOLING,
    PROBES,
    RECORD_FILE,
    EncoderSpec,
    read_endpoint_record,
    read_full_dim,
)
from rag_model.encoders.static_folder import STATIC_POOLINGS, StaticTable, find_static_body
from rag_model.encoders.weights import digest_weights, read_tensor_headers
from rag_model.errors import InputError, RefusedError, UsageError

BAG_POOLING = "bag"  # `pooling` of encoders whose rows are bags of tokens, without weights of a model
# Types of models whose settings are compared with those of published models. Published models of
# other types differ in these settings, so the comparison would change the ids of their spaces.
_CHECKED_TYPES = frozenset(("bert", "camembert", "distilbert", "dpr", "mpnet", "roberta", "xlm-roberta"))
# Types whose position ids begin after the `pad_token_id` of their config.
_TYPES_WITH_PAD_ID = frozenset(("camembert", "roberta", "xlm-roberta"))
# Numbers of attention heads in published models, by hidden size; at other sizes, heads have 64
# dimensions.
_HEADS_BY_SIZE = {256: (4, 8), 312: (12,), 384: (12,)}
_HEAD_DIM, _MIN_HEADS = 64, 2
# Keys of tokenizer.json that are left out of the digest, because the spec overrides them.
_RUNTIME_SETTINGS = {"truncation", "padding", "version"}


@dataclass(frozen=True, slots=True)
class Space:
    """Everything that determines a passage's vector, and its digest."""

    name: str  # display name: the encoder's folder or hub name; not part of the digest
    weights: str  # digest of the canonical tensors
    tokenizer: str  # digest of the tokenizer rules
    pooling: str  # how token states become vectors, as in the spec
    normalize: bool  # whether vectors are normalized
    max_length: int  # maximum tokens of a passage
    layout: str  # how title and text are joined, as in the spec
    passage_prompt: str  # text before every passage
    dim: int  # dimension of a vector
    config: str = ""  # settings of the transformer that differ from those of published models

    @property
    def digest(self) -> str:
        """The id of the space, by which spaces of queries and snapshots are compared."""
        return digest_json({key: value for key, value in self._list_fields().items() if key != "name"})

    def to_json(self) -> dict[str, Any]:
        """Return the fields and the digest as JSON values; an empty `config` is omitted, as in
        older records.
        """
        return {**self._list_fields(), "digest": self.digest}

    def _list_fields(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value or key != "config"}

    def accepts_queries_of(self, query_space: "Space") -> bool:
        """Return whether query vectors of `query_space` may be compared with passage vectors of
        this space.

        Bags of tokens can be searched with the weighted terms of any encoder with the same
        tokenizer.
        """
        if query_space.digest == self.digest:
            return True
        return self.pooling == BAG_POOLING and (query_space.tokenizer, query_space.dim) == (self.tokenizer, self.dim)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Parse the result of `to_json`.

        Raises:
            InputError: a field is missing, or the digest does not match the fields.
        """
        try:
            space = cls(**{field.name: value[field.name] for field in fields(cls) if field.name != "config"})
            space = replace(space, config=value.get("config", ""))
        except KeyError as error:
            raise InputError(
                f"an encoder space has no field {error}: it was written by another version of "
                "bookwheel, so use that version"
            ) from error
        if space.digest != value.get("digest"):
            raise InputError(f"the space of encoder {space.name} is corrupt: its digest does not match its fields")
        return space


def compute_space(folder: Path, spec: EncoderSpec, name: str = "") -> Space:
    """Compute the vector space of the passage encoder in `folder` with the settings `spec`; all
    weights are read once.

    Raises:
        InputError: a file of the encoder is missing or corrupt.
    """
    weights_digest, tokenizer, dim = _compute_content_identity(folder, spec)
    return Space(
        name=name or folder.name,
        weights=weights_digest,
        tokenizer=digest_json({"rules": tokenizer, "end_token": spec.end_token}) if spec.end_token else tokenizer,
        pooling=spec.pooling,
        normalize=spec.normalize,
        max_length=spec.max_length,
        layout=spec.layout,
        passage_prompt=spec.passage_prompt,
        dim=spec.truncate_dim or dim,
        config="" if spec.is_static or spec.is_endpoint else describe_unusual_settings(folder),
    )


def describe_unusual_settings(folder: Path) -> str:
    """Return the settings with which a transformer computes other vectors from the same tensors
    than published models do, such as `num_attention_heads 4`; "" if there are none.

    Raises:
        InputError: the config or a weight file is missing or corrupt.
    """
    config = read_json_object(folder / CONFIG)
    model_type = str(config.get("model_type"))
    if model_type not in _CHECKED_TYPES:
        return ""
    layer_numbers = [int(part) for name in read_tensor_headers(folder) for part in name.split(".") if part.isdecimal()]
    hidden_size = config.get("hidden_size", config.get("dim"))
    head_counts: tuple[int, ...] = ()
    if isinstance(hidden_size, int):
        head_counts = _HEADS_BY_SIZE.get(hidden_size, (max(_MIN_HEADS, hidden_size // _HEAD_DIM),))
    layer_counts = (max(layer_numbers, default=-1) + 1,)
    published_settings: dict[str, tuple[Any, ...]] = {
        **dict.fromkeys(("hidden_act", "activation"), ("gelu",)),
        # The difference between these two values changes a vector only by rounding.
        "layer_norm_eps": (1e-12, 1e-5),
        "is_decoder": (False, None),
        **dict.fromkeys(("num_attention_heads", "n_heads"), head_counts),
        **dict.fromkeys(("num_hidden_layers", "n_layers"), layer_counts),
        **({"pad_token_id": (1, None)} if model_type in _TYPES_WITH_PAD_ID else {}),
    }
    return ", ".join(
        f"{name} {json.dumps(config[name])}"
        for name, published_values in published_settings.items()
        if name in config and config[name] not in published_values
    )


def _compute_content_identity(folder: Path, spec: EncoderSpec) -> tuple[str, str, int]:
    """Return (digest of the weights, digest of the tokenizer, dimension of a vector)."""
    if spec.is_endpoint:  # the model is identified by its name and the vectors of its probe texts
        model = read_endpoint_record(folder)["model"]
        return digest_json({"endpoint": model, "probes": digest_file(folder / PROBES)}), "", read_full_dim(folder, spec)
    body_folder = find_static_body(folder) if spec.is_static else folder
    static_table = StaticTable.open(body_folder) if spec.is_static else None
    tokenizer = digest_tokenizer(body_folder)
    if static_table is None:
        return digest_weights(folder), tokenizer, read_dim(folder)
    return static_table.digest(), tokenizer, static_table.dim


def name_space_by_content(space: Space, folder: Path) -> Space:
    """Name a vector space by its content, such as `BertModel-384-53aa5117`, instead of its folder.

    With folder names, equal models and snapshots that were built in different folders would differ.
    """
    if space.pooling == ENDPOINT_POOLING:
        architecture = read_endpoint_record(folder)["model"].rpartition("/")[2]
    elif space.pooling in STATIC_POOLINGS:
        # Static encoders may have no config, and their two layouts have different configs.
        architecture = "StaticModel"
    else:
        architecture = (read_optional_json(folder / CONFIG).get("architectures") or ["encoder"])[0]
    return replace(space, name=f"{architecture}-{space.dim}-{space.weights.partition(':')[2][:8]}")


def read_declared_space(folder: Path) -> Space | None:
    """Return the vector space that the record in `folder` declares for the encoder's questions, or
    None.

    Raises:
        InputError: the declaration is corrupt.
    """
    declared_space = read_optional_json(folder / RECORD_FILE).get("asks")
    return Space.from_json(declared_space) if declared_space else None


def check_same_space(query_space: Space, passage_space: Space) -> None:
    """Check that query vectors of `query_space` may be compared with passage vectors of
    `passage_space`.

    Raises:
        RefusedError: the vectors must not be compared; the message names both encoders and the
            differences.
    """
    if passage_space.accepts_queries_of(query_space):
        return
    differences = [
        field.name
        for field in fields(Space)
        if field.name != "name" and getattr(query_space, field.name) != getattr(passage_space, field.name)
    ]
    raise RefusedError(
        f"questions of encoder {query_space.name} cannot search a snapshot of encoder "
        f"{passage_space.name}, whose {' and '.join(differences)} differ: use the encoder that the "
        "snapshot contains, or reindex"
    )


def check_same_tokenizer(first: Path, second: Path) -> None:
    """Check that two folders have the same tokenizer.

    Raises:
        InputError: a folder has no tokenizer.
        UsageError: the tokenizers differ.
    """
    if first != second and digest_tokenizer(first) != digest_tokenizer(second):
        raise UsageError(
            f"encoders {first} and {second} have different tokenizers: use two encoders with the same tokenizer"
        )


def digest_tokenizer(folder: Path) -> str:
    """Return the digest of a folder's tokenizer rules, without length limits and padding.

    Raises:
        InputError: the folder has no tokenizer files.
    """
    files = list_tokenizer_files(folder)
    if files[0].name != TOKENIZER:
        return digest_json({path.name: digest_file(path) for path in files})
    tokenizer_rules = read_json_object(folder / TOKENIZER)
    return digest_json({key: rule for key, rule in tokenizer_rules.items() if key not in _RUNTIME_SETTINGS})
