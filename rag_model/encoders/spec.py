"""Settings of encoders, which are read from the files of their folders.

**Dense encoders** (`EncoderSpec`): the settings say how a text becomes an input, and how hidden
states become one vector. They come from the first of these files in the folder:

1. `bookwheel.json`
2. `modules.json` (sentence-transformers), or the tensors of a static encoder
3. DPR's `config.json`

Other Hugging Face folders get the defaults.

**ColBERT** (`TokenSpec`): the settings are marker tokens, lengths, masks and skipped tokens
(Khattab and Zaharia 2020, section 3.2). Three folder layouts are read: bookwheel's record, Stanford's
(`artifact.metadata`, with `linear.weight` among the transformer's tensors) and PyLate's
(`modules.json` with a Dense module in a separate folder).
"""

import re
import string
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

from rag_model.digest import digest_json
from rag_model.encoders.files import (
    CONFIG,
    MODULES,
    has_splade_pooling,
    list_modules,
    read_dim,
    read_json_object,
    read_max_tokens,
    read_missing_end_token,
    read_optional_json,
    read_position_limit,
    read_prompts,
    read_sentence_transformers,
    write_json,
)
from rag_model.encoders.static_folder import (
    STATIC_POOLINGS,
    StaticTable,
    find_static_body,
    has_static_layout,
    read_static_settings,
)
from rag_model.errors import InputError, UsageError

if TYPE_CHECKING:
    from rag_model.encoders.space import Space

RECORD_FILE = "bookwheel.json"
# Keys in bookwheel.json; each contains the settings of one kind of encoder.
BAG_KEY, MUVERA_KEY, SPARSE_KEY, TOKENS_KEY = "bag", "muvera", "sparse", "tokens"
Pooling = Literal["cls", "mean", "last", "static", "static-known", "endpoint"]
ENDPOINT_POOLING: Pooling = "endpoint"  # pooling of a model behind an HTTP API, which pools itself
ENDPOINT_KEY = "endpoint"  # key in bookwheel.json of an endpoint's model name and dimension
PROBES = "probes.npy"  # file with the vectors of the probe texts of a model behind an HTTP API
Layout = Literal["joined", "pair", "text"]
JOINED: Layout = "joined"  # the text of a passage is `title text`
TextInput = str | tuple[str, str]  # tokenizer input: one text, or a pair
# maximum tokens of DPR's inputs; `sequence_length` in github.com/facebookresearch/DPR
DPR_MAX_LENGTH = 256
_NEWER_FIELDS = ("truncate_dim", "end_token")  # fields that older versions of bookwheel lack
_MIN_TOKENS = 3  # minimum of max_length: two special tokens and one token of text
_BGE_QUESTION = "Represent this sentence for searching relevant passages: "
# Settings that are missing in the folders of some models, by patterns of hub names: prompts from
# the model cards, and dot-product similarity for models that were saved before a folder could
# declare it.
_KNOWN_SETTINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        r"intfloat/(multilingual-)?e5-(small|base|large)(-v2)?",
        {"passage_prompt": "passage: ", "question_prompt": "query: "},
    ),
    (r"BAAI/bge-(small|base|large)-en(-v1\.5)?", {"question_prompt": _BGE_QUESTION}),
    # These models use inner products of means that are not normalized (Izacard et al. 2022, section
    # 3).
    (r"facebook/(m)?contriever(-msmarco)?", {"normalize": False}),
    (
        r"sentence-transformers/(.+-dot-(prod-)?v\d|msmarco-.+-(tas-b|ance-firstp|co-condensor)|facebook-dpr-.+)",
        {"normalize": False},
    ),
)
STANFORD_METADATA = "artifact.metadata"  # file with the settings in Stanford's layout, as JSON
PYLATE_CONFIG = "config_sentence_transformers.json"
DIM = 128  # dimension of a token vector: ColBERT, section 4.1
_MAX_POOL = 8  # maximum tokens per vector; the quality falls beyond 6 (Clavié et al. 2024)
# minimum tokens of an input: [CLS], the marker token, one token of text, [SEP] and one [MASK]
_MIN_MARKED_TOKENS = 5
_PROMPT_FIELDS = ("question_prompt", "passage_prompt")  # fields of `TokenSpec`
# Keys in the settings files of Stanford and PyLate, and the corresponding fields of `TokenSpec`.
_STANFORD_FIELDS = {
    "query_token_id": "question_mark",
    "doc_token_id": "passage_mark",
    "query_maxlen": "question_length",
    "doc_maxlen": "passage_length",
    "attend_to_mask_tokens": "attend_to_masks",
    # Only bookwheel reads and writes prompts in this file.
    **{name: name for name in _PROMPT_FIELDS},
}
_PYLATE_FIELDS = {
    "query_prefix": "question_mark",
    "document_prefix": "passage_mark",
    "query_length": "question_length",
    "document_length": "passage_length",
    "attend_to_expansion_tokens": "attend_to_masks",
    "skiplist_words": "skipped",
}


class EncoderSettings:
    """Settings of a kind of encoder; subclasses are frozen dataclasses with default values."""

    __slots__ = ()
    noun: ClassVar[str]  # the kind of encoder, for messages
    question_prompt: str  # text before every question

    def check(self) -> None:
        """Check that each setting has the type of its default, that tuple items are strings, and
        that a `Literal` setting has one of the allowed values.

        Raises:
            UsageError: a setting has a wrong type, or is not one of the allowed values.
        """
        for field in fields(self):  # type: ignore[arg-type]
            value, expected_type = getattr(self, field.name), type(field.default)
            items = value if isinstance(value, tuple) else ()
            if type(value) is not expected_type or not all(isinstance(item, str) for item in items):
                raise UsageError(
                    f"{field.name} of {self.noun} is {value!r}: give a value of type {expected_type.__name__}"
                )
        check_choices(self, self.noun)

    def with_fields(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with these fields replaced; lists become tuples.

        Raises:
            UsageError: a field is unknown or its value is invalid.
        """
        field_names = [field.name for field in fields(self)]  # type: ignore[arg-type]
        for name in values:
            if name not in field_names:
                raise UsageError(f"{name!r} is not a setting of {self.noun}: use one of {', '.join(field_names)}")
        field_values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        return replace(self, **field_values)  # type: ignore[type-var]

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    def format_question(self, question: str) -> str:
        """Return the tokenizer input for a question."""
        return self.question_prompt + question


def write_encoder_record(folder: Path, settings: Mapping[str, Any], declared_space: "Space | None" = None) -> Path:
    """Write the record `bookwheel.json` of an encoder into `folder`; return its path."""
    record_path = folder / RECORD_FILE
    write_json(record_path, {**settings, **({"asks": declared_space.to_json()} if declared_space else {})})
    return record_path


def check_choices(settings: object, owner: str) -> None:
    """Check that each `Literal` setting has one of the allowed values.

    Raises:
        UsageError: a setting has another value; the message calls it a setting of `owner`.
    """
    for name, annotation in get_type_hints(type(settings)).items():
        choices = get_args(annotation)
        if get_origin(annotation) is Literal and (value := getattr(settings, name)) not in choices:
            raise UsageError(f"{name} {value!r} of {owner} is unknown: use one of {', '.join(choices)}")


@dataclass(frozen=True, slots=True)
class EncoderSpec(EncoderSettings):
    """Settings of a dense encoder; all fields except `question_prompt` are part of its vector
    space.
    """

    noun: ClassVar[str] = "an encoder"
    # `cls`, `mean` and `last` pool the last hidden states by first token, mean or last token.
    # `static` is the mean of the token vectors of a static encoder, `static-known` the mean without
    # unknown tokens, and `endpoint` a model behind an HTTP API.
    pooling: Pooling = "mean"
    # whether vectors have unit length, so that the inner product is the cosine
    normalize: bool = True
    max_length: int = 256  # tokens per input, special tokens included; longer inputs are truncated
    # Input for a passage: `title text`, `[CLS] title [SEP] text [SEP]`, or only the text.
    layout: Layout = JOINED
    passage_prompt: str = ""  # text before every passage, such as E5's `passage: `
    question_prompt: str = ""  # text before every question, such as E5's `query: `
    # Number of dimensions to which the vectors of a Matryoshka model are truncated before they are
    # normalized; 0 keeps all dimensions
    truncate_dim: int = 0
    # token that is appended to every input, if the tokenizer does not add it; empty for no token
    end_token: str = ""

    def __post_init__(self) -> None:
        self.check()
        if self.max_length < _MIN_TOKENS:
            raise UsageError(f"max_length {self.max_length} leaves no room for text: use {_MIN_TOKENS} or more")
        if self.truncate_dim < 0:
            raise UsageError(f"truncate_dim {self.truncate_dim} is negative: use 0 for all dimensions, or 1 or more")

    @property
    def is_static(self) -> bool:
        """Whether the encoder is static: it has one vector per vocabulary token and no
        transformer.
        """
        return self.pooling in STATIC_POOLINGS

    @property
    def is_endpoint(self) -> bool:
        """Whether the model is behind an HTTP API."""
        return self.pooling == ENDPOINT_POOLING

    def to_json(self) -> dict[str, Any]:
        """Return the spec as JSON values; newer fields are omitted if they are empty or 0.

        If such fields were written, the ids of models and snapshots from older versions would
        change.
        """
        return {name: setting for name, setting in asdict(self).items() if setting or name not in _NEWER_FIELDS}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Parse the result of `to_json`.

        Raises:
            UsageError: a field is unknown, or its value is not one of the choices.
        """
        return cls().with_fields(value)

    def format_passage(self, title: str, text: str) -> TextInput:
        """Return the tokenizer input for a passage: one string, or a pair."""
        if not title or self.layout == "text":
            return self.passage_prompt + text
        if self.layout == "pair":
            return self.passage_prompt + title, text
        return f"{self.passage_prompt}{title} {text}"


def read_encoder_spec(folder: Path, overrides: Mapping[str, Any] | None = None) -> EncoderSpec:
    """Read the settings of the encoder in `folder`; `overrides` replace single fields.

    Raises:
        InputError: a file is missing or corrupt, or the model has an unsupported part.
        UsageError: an override is not a field of the spec, or `max_length` exceeds the model's
            limit.
    """
    folder_spec = _read_folder_spec(folder)
    spec = folder_spec.with_fields(overrides or {})
    overrides_fixed_length = folder_spec.is_endpoint and "max_length" in (overrides or {})
    if overrides_fixed_length or (spec.is_static, spec.is_endpoint) != (folder_spec.is_static, folder_spec.is_endpoint):
        name, setting = ("max_length", spec.max_length) if overrides_fixed_length else ("pooling", spec.pooling)
        raise UsageError(f"{name} {setting!r} does not apply to encoder {folder}: omit it")
    if spec.truncate_dim:
        full_dim = read_full_dim(folder, spec)
        if spec.truncate_dim > full_dim:
            raise UsageError(
                f"truncate_dim {spec.truncate_dim} is more than the {full_dim} dimensions of "
                f"encoder {folder}: use {full_dim} or less"
            )
    if spec.is_static or spec.is_endpoint:
        return spec
    # Last-token pooling needs the end token. A recorded spec is not changed.
    if spec.pooling == "last" and not spec.end_token and not read_optional_json(folder / RECORD_FILE).get("spec"):
        spec = replace(spec, end_token=read_missing_end_token(folder))
    # A recorded length may slightly exceed the number of positions, because the tokenizer truncates
    # inputs to that number.
    has_length_override = "max_length" in (overrides or {})
    limit = (
        read_position_limit(folder)
        if has_length_override
        else read_json_object(folder / CONFIG).get("max_position_embeddings")
    )
    if limit and spec.max_length > limit:
        raise UsageError(f"max_length {spec.max_length} is more than encoder {folder} reads: use {limit} or less")
    return spec


def read_full_dim(folder: Path, spec: EncoderSpec) -> int:
    """Return the dimension of the vectors before truncation.

    Raises:
        InputError: the folder does not declare the dimension.
    """
    if spec.is_endpoint:
        return int(read_endpoint_record(folder)["dim"])
    return StaticTable.open(find_static_body(folder)).dim if spec.is_static else read_dim(folder)


def is_endpoint_encoder(folder: Path) -> bool:
    """Return whether a folder contains the record of a model behind an endpoint."""
    return ENDPOINT_KEY in read_optional_json(folder / RECORD_FILE)


def read_endpoint_record(folder: Path) -> dict[str, Any]:
    """Return the model's name (`model`) and the dimension (`dim`) of an encoder behind an endpoint.

    Raises:
        InputError: the folder has no such record.
    """
    record = read_json_object(folder / RECORD_FILE).get(ENDPOINT_KEY)
    if not isinstance(record, dict) or type(record.get("dim")) is not int or not isinstance(record.get("model"), str):
        raise InputError(f"the record of encoder {folder} does not name an endpoint's model: reindex with the encoder")
    return record


def is_static_encoder(folder: Path) -> bool:
    """Return whether a folder contains a static encoder, by its record, its modules or its tensors.

    Raises:
        InputError: a file is corrupt.
    """
    recorded_settings = read_optional_json(folder / RECORD_FILE).get("spec")
    if isinstance(recorded_settings, dict) and "pooling" in recorded_settings:
        return recorded_settings["pooling"] in STATIC_POOLINGS
    return has_static_layout(folder)


def find_known_settings(name: str) -> dict[str, Any]:
    """Return the settings that are missing in the files of the hub model `name`; may be empty.

    >>> find_known_settings("intfloat/e5-small-v2")["question_prompt"]
    'query: '
    """
    repository = name.partition("@")[0]
    return next((dict(settings) for family, settings in _KNOWN_SETTINGS if re.fullmatch(family, repository)), {})


def _read_folder_spec(folder: Path) -> EncoderSpec:
    if recorded_settings := read_optional_json(folder / RECORD_FILE).get("spec"):
        return EncoderSpec.from_json(recorded_settings)
    if has_static_layout(folder):
        return EncoderSpec(**read_static_settings(folder))
    if (folder / MODULES).is_file():
        return EncoderSpec(**read_sentence_transformers(folder))
    if read_json_object(folder / CONFIG).get("model_type") == "dpr":
        max_length = min(DPR_MAX_LENGTH, read_max_tokens(folder))
        return EncoderSpec(pooling="cls", normalize=False, max_length=max_length, layout="pair")
    return EncoderSpec(max_length=read_max_tokens(folder))


@dataclass(frozen=True, slots=True)
class TokenSpec(EncoderSettings):
    """Settings of a ColBERT; the fields that concern passages are part of its vector space."""

    noun: ClassVar[str] = "a ColBERT"
    # Second token of every question, [Q] in the paper.
    question_mark: str = "[unused0]"
    passage_mark: str = "[unused1]"  # second token of every passage, [D] in the paper
    # Tokens per question, including special tokens; shorter questions are padded with [MASK].
    question_length: int = 32
    passage_length: int = 180  # maximum tokens per passage, including special tokens
    # Whether question tokens attend to [MASK]s; masks always attend to tokens.
    attend_to_masks: bool = False
    # Passage tokens that the model reads but that get no vector.
    skipped: tuple[str, ...] = tuple(string.punctuation)
    # Average number of passage tokens per vector; 2 halves the size (`token_encoder.pool_tokens`).
    pool: int = 1
    question_prompt: str = ""  # text between the mark and every question
    passage_prompt: str = ""  # text between the mark and every passage

    def __post_init__(self) -> None:
        self.check()
        for name in ("question_length", "passage_length"):
            if getattr(self, name) < _MIN_MARKED_TOKENS:
                raise UsageError(
                    f"{name} {getattr(self, name)} leaves no room for text: use {_MIN_MARKED_TOKENS} or more"
                )
        if not 1 <= self.pool <= _MAX_POOL:
            raise UsageError(
                f"pool of a ColBERT is {self.pool}: use 1 to {_MAX_POOL}, for example 2 to halve the number of vectors"
            )

    @property
    def space_pooling(self) -> str:
        """The `pooling` of the vector space: it names the tokens per vector and the skipped
        tokens.
        """
        drops_punctuation = self.skipped == tuple(string.punctuation)
        token_label = "tokens" if drops_punctuation else f"tokens without {digest_json(list(self.skipped))[-8:]}"
        return token_label if self.pool == 1 else f"{token_label}, pooled by {self.pool}"

    def format_passage(self, title: str, text: str) -> str:
        """Return the tokenizer input for a passage, without its mark."""
        return self.passage_prompt + f"{title} {text}".strip()

    def to_json(self) -> dict[str, Any]:
        """Return the spec as JSON values; `pool` and the prompts are omitted if they have their
        defaults, as in older records.
        """
        json_fields = {**asdict(self), "skipped": list(self.skipped)}
        omitted_values = {"pool": 1, "question_prompt": "", "passage_prompt": ""}
        return {name: setting for name, setting in json_fields.items() if setting != omitted_values.get(name)}

    def to_stanford_metadata(self, dim: int) -> dict[str, Any]:
        """Return the settings in the format of Stanford's `artifact.metadata`."""
        return {
            "query_token_id": self.question_mark,
            "doc_token_id": self.passage_mark,
            "query_token": "[Q]",
            "doc_token": "[D]",
            "query_maxlen": self.question_length,
            "doc_maxlen": self.passage_length,
            "attend_to_mask_tokens": self.attend_to_masks,
            "mask_punctuation": bool(self.skipped),
            "similarity": "cosine",
            "dim": dim,
            **{name: prompt for name in _PROMPT_FIELDS if (prompt := getattr(self, name))},
        }


def is_token_encoder(folder: Path) -> bool:
    """Return whether a folder contains a ColBERT."""
    if TOKENS_KEY in read_optional_json(folder / RECORD_FILE) or (folder / STANFORD_METADATA).is_file():
        return True
    return find_dense_folder(folder) is not None and "query_length" in read_optional_json(folder / PYLATE_CONFIG)


def find_dense_folder(folder: Path) -> Path | None:
    """Return the folder of PyLate's projection; None for other layouts.

    Raises:
        InputError: `modules.json` is damaged.
    """
    if not (folder / MODULES).is_file():
        return None
    dense_paths = [path for name, path in list_modules(folder) if name == "Dense"]
    if len(dense_paths) > 1 or any("/" in dense_path or dense_path.startswith(".") for dense_path in dense_paths):
        raise InputError(f"encoder {folder} has several projections: use a ColBERT with one")
    return folder / dense_paths[0] if dense_paths else None


def read_token_spec(folder: Path, overrides: Mapping[str, Any] | None = None) -> TokenSpec:
    """Read the settings of the ColBERT in `folder`; `overrides` replace single fields.

    Raises:
        InputError: the folder contains no ColBERT, or a file is missing or corrupt.
        UsageError: an override is unknown or invalid, or a length exceeds the model's limit.
    """
    if not is_token_encoder(folder):
        raise InputError(
            f"{folder} is not a ColBERT (it has no {STANFORD_METADATA} and no Dense module): give the "
            "folder of a ColBERT, or train one with `finetune colbert`"
        )
    spec = TokenSpec().with_fields(_read_token_settings(folder)).with_fields(overrides or {})
    limit = min(read_max_tokens(folder), read_json_object(folder / CONFIG).get("max_position_embeddings") or 1 << 30)
    if max(spec.question_length, spec.passage_length) > limit:
        raise UsageError(
            f"encoder {folder} reads at most {limit} tokens: use at most that many for questions and passages"
        )
    return spec


def _read_token_settings(folder: Path) -> dict[str, Any]:
    recorded_settings = read_optional_json(folder / RECORD_FILE).get(TOKENS_KEY)
    if isinstance(recorded_settings, dict):
        return recorded_settings
    if (folder / STANFORD_METADATA).is_file():
        stanford_settings = read_json_object(folder / STANFORD_METADATA)
        skipped_setting = {} if stanford_settings.get("mask_punctuation", True) else {"skipped": ()}
        return _rename_keys(stanford_settings, _STANFORD_FIELDS) | skipped_setting
    pylate_settings = read_optional_json(folder / PYLATE_CONFIG)
    if pylate_settings.get("do_query_expansion") is False:
        raise InputError(
            f"encoder {folder} does not pad its questions with [MASK], which is not supported: use a ColBERT that does"
        )
    return _rename_keys(pylate_settings, _PYLATE_FIELDS) | _read_pylate_prompts(folder, pylate_settings)


def _read_pylate_prompts(folder: Path, pylate_settings: Mapping[str, Any]) -> dict[str, str]:
    """Read the prompts of a folder, without a mark at their beginning, as in sentence-transformers."""
    prompts = read_prompts(folder)
    mark_keys = {"question_prompt": "query_prefix", "passage_prompt": "document_prefix"}
    return {name: prompt.removeprefix(pylate_settings.get(mark_keys[name]) or "") for name, prompt in prompts.items()}


def _rename_keys(settings: Mapping[str, Any], field_by_key: Mapping[str, str]) -> dict[str, Any]:
    return {field_name: settings[key] for key, field_name in field_by_key.items() if settings.get(key) is not None}


def is_sparse_encoder(folder: Path) -> bool:
    """Return whether a folder declares a sparse encoder, by its record or by sentence-transformers'
    modules.

    A plain folder of a masked language model does not declare its purpose.
    """
    return SPARSE_KEY in read_optional_json(folder / RECORD_FILE) or has_splade_pooling(folder)


def is_bag_encoder(folder: Path) -> bool:
    """Return whether a folder contains a bag encoder."""
    return BAG_KEY in read_optional_json(folder / RECORD_FILE)


def is_muvera_encoder(folder: Path) -> bool:
    """Return whether a folder contains a MUVERA encoder, a ColBERT whose vectors become one
    vector.
    """
    return MUVERA_KEY in read_optional_json(folder / RECORD_FILE)
