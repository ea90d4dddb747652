"""Read the sizes of a transformer from its config and its weight files' headers, without tensors.

The header of a GGUF file is checked before a library builds a model from it. Libraries that read
GGUF trust the header: they loop over its arrays in Python, build as many layers as it says, and
dequantise every tensor, even if all of them share the same bytes. This module checks every length
against the size of the file, and the numbers in the header against the limits that also apply to
safetensors folders (`pretrained.check_config`).
"""

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rag_model.encoders.files import CONFIG, MODULES, find_onnx_file, read_json_object
from rag_model.encoders.spec import (
    RECORD_FILE,
    is_endpoint_encoder,
    is_sparse_encoder,
    is_static_encoder,
    is_token_encoder,
    read_endpoint_record,
)
from rag_model.encoders.static_folder import StaticTable, find_static_body
from rag_model.encoders.weights import WEIGHTS, read_tensor_headers
from rag_model.errors import InputError
from rag_model.extras import require

# Config keys of one size in different model families. Encoder and decoder layers are added up.
_LAYER_KEYS = ("encoder_layers", "num_layers", "num_hidden_layers", "n_layer", "n_layers")
_DECODER_LAYER_KEYS = ("decoder_layers", "num_decoder_layers")
_HIDDEN_KEYS = ("hidden_size", "d_model", "n_embd", "dim")
_HEAD_KEYS = ("num_attention_heads", "n_head", "encoder_attention_heads", "num_heads", "n_heads")
_VOCABULARY_KEYS = ("vocab_size",)
_FLOAT_BYTES = 4  # bytes per float32
# Attribute of each DPR class that holds its encoder.
DPR_ENCODERS = {"DPRContextEncoder": "ctx_encoder", "DPRQuestionEncoder": "question_encoder"}
_LM_SUFFIXES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_TASK_SUFFIXES = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
# The header of a GGUF file.
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_STRING, _ARRAY = 8, 9  # types of values; the other types are numbers, with these struct formats
_NUMBER_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_ENTRIES = 100_000  # maximum number of keys, and maximum number of tensors
_MAX_TEXT_BYTES = 1 << 24  # maximum bytes of a text; the longest one is a chat template
_MAX_ITEMS = 1 << 23  # maximum items of all arrays together; a vocabulary of 256,000 needs 768,000
# maximum sum of squared token lengths, because libraries split each token at every position
_MAX_SQUARED_LENGTHS = 1 << 31
_MAX_DIMENSIONS = 8
_MAX_COUNT = 10_000  # maximum number of heads, experts or groups, each of which becomes an object
_MAX_SIZE = 1 << 24  # maximum dimension, context length or vocabulary size
# maximum tensor values per byte of a file; the densest quantization has 5.1 (1.56 bits per value)
_MAX_VALUES_PER_BYTE = 6
_GGUF_LAYER_KEYS = re.compile(r"(block|layer)s?(_count)?$")
_GGUF_COUNT_KEYS = re.compile(r"(head|expert|group|label)\w*count\w*$")
_GGUF_SIZE_KEYS = re.compile(r"(length|size|rank)$")


def check_gguf_file(path: Path) -> None:
    """Check the header of a GGUF file; reads no tensor.

    Raises:
        InputError: the file is corrupt, or describes more layers, heads, tokens or values than it
            can hold.
    """
    try:
        with path.open("rb") as file:
            _GgufHeader(file, path.stat().st_size).check_counts()
    except (OSError, ValueError, struct.error, RecursionError) as error:
        raise InputError(f"model file {path} is corrupt ({error}): fetch it again") from error


class _GgufHeader:
    """Parser that checks every length in the header of a GGUF file."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size
        self._n_items = self._squared_lengths = 0

    def check_counts(self) -> None:
        if self._read_bytes(4) != _MAGIC or self._read_number("I") not in _VERSIONS:
            raise ValueError("it is not a GGUF file of version 2 or 3")
        n_tensors, n_keys = self._read_number("Q"), self._read_number("Q")
        if max(n_tensors, n_keys) > _MAX_ENTRIES:
            raise ValueError(f"it lists {n_tensors:,} tensors and {n_keys:,} keys, more than possible")
        _check_config_values({self._read_text(): self._read_value() for _ in range(n_keys)}, n_tensors)
        n_values = sum(self._read_tensor() for _ in range(n_tensors))
        if n_values > _MAX_VALUES_PER_BYTE * self._size:
            raise ValueError(f"its tensors have {n_values:,} values in {self._size:,} bytes")

    def _read_tensor(self) -> int:
        """Return the number of values of the next tensor."""
        self._read_text()
        n_dimensions, n_values = self._read_number("I"), 1
        if n_dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"a tensor has {n_dimensions:,} dimensions, more than {_MAX_DIMENSIONS}")
        for _ in range(n_dimensions):
            n_values *= self._read_number("Q")
        self._read_bytes(12)  # type and offset
        return n_values

    def _read_value(self) -> Any:
        """Return the next value; None for an array."""
        value_type = self._read_number("I")
        if value_type == _STRING:
            return self._read_text()
        if value_type != _ARRAY:
            return self._read_number(_find_struct_format(value_type))
        item_type, n_items = self._read_number("I"), self._read_number("Q")
        self._n_items += n_items
        if self._n_items > _MAX_ITEMS:
            raise ValueError(f"its arrays have more than {_MAX_ITEMS:,} items")
        if item_type == _STRING:
            for _ in range(n_items):
                self._squared_lengths += len(self._read_text()) ** 2
            if self._squared_lengths > _MAX_SQUARED_LENGTHS:
                raise ValueError("its tokens are too long")
        else:
            self._read_bytes(n_items * struct.calcsize(_find_struct_format(item_type)))
        return None

    def _read_text(self) -> str:
        n_text_bytes = self._read_number("Q")
        if n_text_bytes > _MAX_TEXT_BYTES:
            raise ValueError(f"a text has {n_text_bytes:,} bytes, more than {_MAX_TEXT_BYTES:,}")
        return self._read_bytes(n_text_bytes).decode("utf-8", "replace")

    def _read_number(self, number_format: str) -> Any:
        packed_number = self._read_bytes(struct.calcsize(f"<{number_format}"))
        return struct.unpack(f"<{number_format}", packed_number)[0]

    def _read_bytes(self, length: int) -> bytes:
        if length > self._size - self._file.tell():
            raise ValueError("it ends inside its header")
        return self._file.read(length)


def _find_struct_format(value_type: int) -> str:
    if value_type not in _NUMBER_FORMATS:
        raise ValueError(f"a value has the unknown type {value_type}")
    return _NUMBER_FORMATS[value_type]


def _check_config_values(config_values: Mapping[str, Any], n_tensors: int) -> None:
    pattern_limits = ((_GGUF_LAYER_KEYS, n_tensors), (_GGUF_COUNT_KEYS, _MAX_COUNT), (_GGUF_SIZE_KEYS, _MAX_SIZE))
    for name, value in config_values.items():
        limit = next((limit for pattern, limit in pattern_limits if pattern.search(name)), None)
        if limit is not None and isinstance(value, int) and value > limit:
            raise ValueError(f"its {ascii(name)[:60]} is {value:,}; at most {limit:,} are possible")


@dataclass(frozen=True, slots=True)
class Architecture:
    """The sizes of a model, which determine how much memory and time it needs."""

    parameters: int  # number of weights
    layers: int  # number of encoder and decoder layers; 0 for a static encoder
    hidden: int  # hidden size
    heads: int  # number of attention heads
    vocabulary: int  # number of tokens in the vocabulary

    @property
    def operations_per_token(self) -> float:
        """Floating-point operations per token: two per weight, except for embeddings, which are
        only looked up.
        """
        return 2.0 * max(0, self.parameters - self.vocabulary * self.hidden)

    def estimate_activation_bytes(self, n_texts: int, n_tokens: int) -> int:
        """Estimate the activation bytes of a float32 backward pass over `n_texts` texts of
        `n_tokens` tokens.

        For b texts of s tokens, a 16-bit layer with a heads keeps s b h (34 + 5 a s / h) bytes
        (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models",
        equation 2). For 32-bit layers, three times that number, plus one layer for temporary
        gradients, is an upper bound: the measured layers keep 156 to 203 s b h bytes for MiniLM,
        and 75 s b h bytes for SmolLM2, which has no dropout. A process holds 1.3 to 1.7 times the
        bytes of its tensors, because malloc keeps freed blocks.
        """
        bytes_per_hidden_value = 3 * (34 + 5 * self.heads * n_tokens / self.hidden)
        return math.ceil(n_texts * n_tokens * self.hidden * (self.layers + 1) * bytes_per_hidden_value)


def read_architecture(folder: Path, part: str | None = None) -> Architecture:
    """Read the sizes of the model in a folder: safetensors or an ONNX graph with a config, or one
    GGUF file.

    For a RAG model in transformers' layout, which has two models in one file, `part` is
    `question_encoder` or `generator`.

    Raises:
        InputError: a file is missing or corrupt, or a size is missing in the config.
        MissingExtraError: the folder holds a GGUF file, and the package `gguf` is not installed.
    """
    files = sorted(folder.glob("*.gguf"))
    if files and not (folder / CONFIG).is_file():
        return _read_gguf_architecture(files[0])
    if part is None and is_endpoint_encoder(folder):
        # The server behind the API computes the vectors, so the folder has no layers.
        return Architecture(0, layers=0, hidden=read_endpoint_record(folder)["dim"], heads=1, vocabulary=0)
    if part is None and is_static_encoder(folder):
        n_tokens, dim = StaticTable.open(find_static_body(folder)).embeddings.shape
        return Architecture(n_tokens * dim, layers=0, hidden=dim, heads=1, vocabulary=n_tokens)
    config = read_json_object(folder / CONFIG)
    sub_config = config.get(part) if part else config
    return _parse_config(sub_config if isinstance(sub_config, dict) else {}, _count_parameters(folder, part), folder)


def _count_parameters(folder: Path, part: str | None) -> int:
    onnx_path = find_onnx_file(folder)
    if onnx_path is not None and not (folder / WEIGHTS).is_file():
        return onnx_path.stat().st_size // _FLOAT_BYTES
    tensors = read_tensor_headers(folder).items()
    return sum(math.prod(tensor.shape) for name, tensor in tensors if part is None or part in name.split("."))


def _parse_config(config: dict[str, Any], n_parameters: int, folder: Path) -> Architecture:
    n_layers = _get_positive_integer(config, _LAYER_KEYS, folder)
    if config.get("is_encoder_decoder"):
        n_layers += next((config[name] for name in _DECODER_LAYER_KEYS if isinstance(config.get(name), int)), n_layers)
    return Architecture(
        n_parameters,
        n_layers,
        hidden=_get_positive_integer(config, _HIDDEN_KEYS, folder),
        heads=_get_positive_integer(config, _HEAD_KEYS, folder),
        vocabulary=_get_positive_integer(config, _VOCABULARY_KEYS, folder),
    )


def _get_positive_integer(config: dict[str, Any], names: tuple[str, ...], folder: Path) -> int:
    for name in names:
        if isinstance(value := config.get(name), int) and value > 0:
            return value
    raise InputError(f"model file {folder / CONFIG} has no {names[0]}: give the folder of a Hugging Face transformer")


def _read_gguf_architecture(path: Path) -> Architecture:
    gguf = require("gguf", "train")
    check_gguf_file(path)
    try:
        reader = gguf.GGUFReader(path)
        architecture_name = reader.fields["general.architecture"].contents()

        def read_field(name: str) -> int:
            return int(reader.fields[f"{architecture_name}.{name}"].contents())

        hidden = read_field("embedding_length")
        token_table = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
        return Architecture(
            parameters=sum(int(tensor.n_elements) for tensor in reader.tensors),
            layers=read_field("block_count"),
            hidden=hidden,
            heads=read_field("attention.head_count"),
            vocabulary=int(token_table.n_elements) // hidden,
        )
    except Exception as error:  # a corrupt file may raise any exception of its reader
        raise InputError(f"model file {path} is corrupt ({error}): fetch it again") from error


def check_is_encoder(folder: Path) -> None:
    """Check in the config that `folder` contains an encoder with one dense vector per text.

    Raises:
        InputError: the folder contains a generator, a classifier, a ColBERT, a sparse encoder, or a
            model for another task.
    """
    if is_static_encoder(folder) or is_endpoint_encoder(folder):
        return
    config = read_json_object(folder / CONFIG)
    if is_token_encoder(folder):
        raise InputError(
            f"encoder {folder} is a ColBERT, which computes many vectors per text: name it in "
            "[represent.tokens] of a recipe"
        )
    if is_sparse_encoder(folder):
        raise InputError(
            f"encoder {folder} is a sparse encoder, which computes weighted terms: name it in "
            "[represent.sparse] of a recipe"
        )
    architecture = next(iter(config.get("architectures") or [""]))
    has_encoder_record = (folder / RECORD_FILE).is_file() or (folder / MODULES).is_file()
    is_generative = config.get("is_encoder_decoder") or (architecture.endswith(_LM_SUFFIXES) and not has_encoder_record)
    is_unsupported_dpr = config.get("model_type") == "dpr" and architecture not in DPR_ENCODERS
    if is_generative or is_unsupported_dpr or architecture.endswith(_TASK_SUFFIXES):
        raise InputError(
            f"encoder {folder} is a {architecture or config.get('model_type')}, which computes no "
            "vectors for search: give a bi-encoder such as BERT, MPNet, DPR, E5 or BGE"
        )
