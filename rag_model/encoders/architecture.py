"""Read the sizes of a transformer from its config and the headers of its weights, without
tensors.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rag_model.encoders.cross_encoder import find_onnx_file
from rag_model.encoders.files import CONFIG, MODULES, read_json_object
from rag_model.encoders.gguf_file import check_gguf_file
from rag_model.encoders.sparse_spec import is_sparse_encoder
from rag_model.encoders.spec import RECORD_FILE, is_endpoint_encoder, is_static_encoder, read_endpoint_record
from rag_model.encoders.static_folder import StaticTable, find_static_body
from rag_model.encoders.token_spec import is_token_encoder
from rag_model.encoders.weights import WEIGHTS, read_tensor_headers
from rag_model.errors import InputError
from rag_model.extras import require

# Config keys of one size in different model families; encoder and decoder layers are added.
_LAYERS = ("encoder_layers", "num_layers", "num_hidden_layers", "n_layer", "n_layers")
_DECODER_LAYERS = ("decoder_layers", "num_decoder_layers")
_HIDDEN = ("hidden_size", "d_model", "n_embd", "dim")
_HEADS = ("num_attention_heads", "n_head", "encoder_attention_heads", "num_heads", "n_heads")
_VOCABULARY = ("vocab_size",)
_FLOAT = 4  # bytes per float32
DPR_ENCODERS = {"DPRContextEncoder": "ctx_encoder", "DPRQuestionEncoder": "question_encoder"}
_GENERATORS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_OTHER_TASKS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


@dataclass(frozen=True, slots=True)
class Architecture:
    """The sizes of a model that determine its memory and time."""

    parameters: int  # number of weights
    layers: int  # encoder plus decoder layers; 0 for a static encoder
    hidden: int  # hidden size
    heads: int
    vocabulary: int

    @property
    def operations_per_token(self) -> float:
        """Floating-point operations per token: two per weight, none for embeddings, which are
        looked up.
        """
        return 2.0 * max(0, self.parameters - self.vocabulary * self.hidden)

    def estimate_activation_bytes(self, texts: int, tokens: int) -> int:
        """Estimate the activation bytes of a float32 backward pass over `texts` texts of `tokens`
        tokens.

        In 16 bits a layer keeps s b h (34 + 5 a s / h) bytes (Korthikanti et al. 2022, "Reducing
        Activation Recomputation in Large Transformer Models", equation 2). Three times that, plus
        one layer for gradients in flight, is an upper bound of measurements in 32 bits: 156 to 203
        bytes per value of s b h for MiniLM, and 75 for SmolLM2, which has no dropout.
        """
        bytes_per_number = 3 * (34 + 5 * self.heads * tokens / self.hidden)
        return math.ceil(texts * tokens * self.hidden * (self.layers + 1) * bytes_per_number)


def read_architecture(folder: Path, part: str | None = None) -> Architecture:
    """Read the sizes of the model in a folder: safetensors or an ONNX graph with a config, or one
    GGUF file.

    `part` selects `question_encoder` or `generator` of a RAG model in transformers' layout, whose
    single file holds both.

    Raises:
        InputError: a file is missing or corrupt, or the config does not name the sizes.
        MissingExtraError: the folder holds a GGUF file, and the package `gguf` is not installed.
    """
    files = sorted(folder.glob("*.gguf"))
    if files and not (folder / CONFIG).is_file():
        return _from_gguf(files[0])
    if part is None and is_endpoint_encoder(folder):
        # Another machine computes the vectors.
        return Architecture(0, layers=0, hidden=read_endpoint_record(folder)["dim"], heads=1, vocabulary=0)
    if part is None and is_static_encoder(folder):
        return _from_static_table(StaticTable.open(find_static_body(folder)))
    config = read_json_object(folder / CONFIG)
    sub_config = config.get(part) if part else config
    return _from_config(sub_config if isinstance(sub_config, dict) else {}, _count_parameters(folder, part), folder)


def _count_parameters(folder: Path, part: str | None) -> int:
    graph = find_onnx_file(folder)
    if graph is not None and not (folder / WEIGHTS).is_file():
        return graph.stat().st_size // _FLOAT
    tensors = read_tensor_headers(folder).items()
    return sum(math.prod(tensor.shape) for name, tensor in tensors if part is None or part in name.split("."))


def _from_config(config: dict[str, Any], parameters: int, folder: Path) -> Architecture:
    layers = _first_positive_integer(config, _LAYERS, folder)
    if config.get("is_encoder_decoder"):
        layers += next((config[name] for name in _DECODER_LAYERS if isinstance(config.get(name), int)), layers)
    return Architecture(
        parameters,
        layers,
        hidden=_first_positive_integer(config, _HIDDEN, folder),
        heads=_first_positive_integer(config, _HEADS, folder),
        vocabulary=_first_positive_integer(config, _VOCABULARY, folder),
    )


def _first_positive_integer(config: dict[str, Any], names: tuple[str, ...], folder: Path) -> int:
    for name in names:
        if isinstance(value := config.get(name), int) and value > 0:
            return value
    raise InputError(f"model file {folder / CONFIG} names no {names[0]}: give the folder of a Hugging Face transformer")


def _from_static_table(table: StaticTable) -> Architecture:
    rows, width = table.embeddings.shape
    return Architecture(rows * width, layers=0, hidden=width, heads=1, vocabulary=rows)


def _from_gguf(path: Path) -> Architecture:
    gguf = require("gguf", "train")
    check_gguf_file(path)
    try:
        reader = gguf.GGUFReader(path)
        family = reader.fields["general.architecture"].contents()

        def field(name: str) -> int:
            return int(reader.fields[f"{family}.{name}"].contents())

        hidden, embeddings = field("embedding_length"), next(t for t in reader.tensors if t.name == "token_embd.weight")
        return Architecture(
            parameters=sum(int(tensor.n_elements) for tensor in reader.tensors),
            layers=field("block_count"),
            hidden=hidden,
            heads=field("attention.head_count"),
            vocabulary=int(embeddings.n_elements) // hidden,
        )
    except Exception as error:  # a corrupt file may raise any exception of its reader
        raise InputError(f"model file {path} is corrupt ({error}): fetch the model again") from error


def check_is_encoder(folder: Path) -> None:
    """Check by its config that `folder` holds an encoder of one dense vector per text.

    Raises:
        InputError: it holds a generator, a classifier, a ColBERT, a sparse encoder, or a model for
            another task.
    """
    if is_static_encoder(folder) or is_endpoint_encoder(folder):
        return
    config = read_json_object(folder / CONFIG)
    if is_token_encoder(folder):
        raise InputError(
            f"encoder {folder} is a ColBERT, which makes many vectors per text: name it in "
            "[represent.tokens] of a recipe"
        )
    if is_sparse_encoder(folder):
        raise InputError(
            f"encoder {folder} is a sparse encoder, which makes weighted terms: name it in "
            "[represent.sparse] of a recipe"
        )
    architecture = next(iter(config.get("architectures") or [""]))
    has_encoder_record = (folder / RECORD_FILE).is_file() or (folder / MODULES).is_file()
    generates = config.get("is_encoder_decoder") or (architecture.endswith(_GENERATORS) and not has_encoder_record)
    other_dpr = config.get("model_type") == "dpr" and architecture not in DPR_ENCODERS
    if generates or other_dpr or architecture.endswith(_OTHER_TASKS):
        raise InputError(
            f"encoder {folder} is a {architecture or config.get('model_type')}, which makes no "
            "vectors for search: give a bi-encoder such as BERT, MPNet, DPR, E5 or BGE"
        )
