"""The sizes of a transformer, read from its config and the headers of its weights, without tensors."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rag_model.encoders.files import CONFIG, read_object
from rag_model.encoders.pairs.session import onnx_file
from rag_model.encoders.sentence_transformers import MODULES
from rag_model.encoders.sparse_spec import is_sparse_encoder
from rag_model.encoders.spec import RECORD_FILE, is_static
from rag_model.encoders.static_folder import StaticTable, static_body
from rag_model.encoders.token_spec import is_token_encoder
from rag_model.encoders.weights import WEIGHTS, stored_tensors
from rag_model.errors import InputError
from rag_model.extras import require

# The names of one number in different model families; the two halves of an encoder-decoder are added.
_LAYERS = ("encoder_layers", "num_layers", "num_hidden_layers", "n_layer", "n_layers")
_MORE_LAYERS = ("decoder_layers", "num_decoder_layers")
_HIDDEN = ("hidden_size", "d_model", "n_embd", "dim")
_HEADS = ("num_attention_heads", "n_head", "encoder_attention_heads", "num_heads", "n_heads")
_VOCABULARY = ("vocab_size",)
_FLOAT = 4  # bytes of a float32
DPR_ENCODERS = {"DPRContextEncoder": "ctx_encoder", "DPRQuestionEncoder": "question_encoder"}
_GENERATORS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_OTHER_TASKS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


@dataclass(frozen=True, slots=True)
class Architecture:
    """The sizes of a model that determine its memory and time."""

    parameters: int  # numbers in its weights
    layers: int  # both halves of an encoder-decoder; 0: a static encoder
    hidden: int  # width of a layer
    heads: int
    vocabulary: int

    @property
    def operations(self) -> float:
        """Operations per token: two per weight; embeddings need none, because they are looked up."""
        return 2.0 * max(0, self.parameters - self.vocabulary * self.hidden)

    def activations(self, texts: int, tokens: int) -> int:
        """Estimate the bytes that a float32 backward pass keeps for `texts` texts of `tokens` tokens.

        A layer keeps s b h (34 + 5 a s / h) bytes in 16 bits (Korthikanti et al. 2022, "Reducing Activation
        Recomputation in Large Transformer Models", equation 2). Three times that, and one more layer for gradients in
        flight, is an upper bound of measurements in 32 bits: MiniLM 156 to 203 bytes per number of s b h, SmolLM2,
        which has no dropout, 75.
        """
        a_number = 3 * (34 + 5 * self.heads * tokens / self.hidden)
        return math.ceil(texts * tokens * self.hidden * (self.layers + 1) * a_number)


def architecture_of(folder: Path, part: str | None = None) -> Architecture:
    """Read the sizes of the model in a folder: safetensors or an ONNX graph with a config, or one GGUF file.

    `part`: `question_encoder` or `generator` of a RAG model in transformers' layout, whose one file holds both.

    Raises:
        InputError: a file is missing or corrupt, or the config does not name the sizes.
        MissingExtraError: it is a GGUF file, and the package that reads GGUF is not installed.
    """
    files = sorted(folder.glob("*.gguf"))
    if files and not (folder / CONFIG).is_file():
        return _of_gguf(files[0])
    if part is None and is_static(folder):
        return _of_static(StaticTable.open(static_body(folder)))
    config = read_object(folder / CONFIG)
    told = config.get(part) if part else config
    return _described(told if isinstance(told, dict) else {}, _parameters(folder, part), folder)


def _parameters(folder: Path, part: str | None) -> int:
    graph = onnx_file(folder)
    if graph is not None and not (folder / WEIGHTS).is_file():
        return graph.stat().st_size // _FLOAT
    tensors = stored_tensors(folder).items()
    return sum(math.prod(tensor.shape) for name, tensor in tensors if part is None or part in name.split("."))


def _described(config: dict[str, Any], parameters: int, folder: Path) -> Architecture:
    layers = _named(config, _LAYERS, folder)
    if config.get("is_encoder_decoder"):
        layers += next((config[name] for name in _MORE_LAYERS if isinstance(config.get(name), int)), layers)
    return Architecture(
        parameters,
        layers,
        hidden=_named(config, _HIDDEN, folder),
        heads=_named(config, _HEADS, folder),
        vocabulary=_named(config, _VOCABULARY, folder),
    )


def _named(config: dict[str, Any], names: tuple[str, ...], folder: Path) -> int:
    for name in names:
        if isinstance(value := config.get(name), int) and value > 0:
            return value
    raise InputError(f"model file {folder / CONFIG} names no {names[0]}: give the folder of a Hugging Face transformer")


def _of_static(table: StaticTable) -> Architecture:
    rows, width = table.embeddings.shape
    return Architecture(rows * width, layers=0, hidden=width, heads=1, vocabulary=rows)


def _of_gguf(path: Path) -> Architecture:
    gguf = require("gguf", "train")
    try:
        reader = gguf.GGUFReader(path)
        family = reader.fields["general.architecture"].contents()

        def field(name: str) -> int:
            return int(reader.fields[f"{family}.{name}"].contents())

        hidden, embedded = field("embedding_length"), next(t for t in reader.tensors if t.name == "token_embd.weight")
        return Architecture(
            parameters=sum(int(tensor.n_elements) for tensor in reader.tensors),
            layers=field("block_count"),
            hidden=hidden,
            heads=field("attention.head_count"),
            vocabulary=int(embedded.n_elements) // hidden,
        )
    except Exception as broken:  # a corrupt file may raise any exception of its reader
        raise InputError(f"model file {path} is corrupt ({broken}): fetch the model again") from broken


def check_kind(folder: Path) -> None:
    """Check that `folder` holds an encoder, by its config.

    Raises:
        InputError: it holds a generator, a classifier, a ColBERT, a sparse encoder, or a model of another task.
    """
    if is_static(folder):
        return
    config = read_object(folder / CONFIG)
    if is_token_encoder(folder):
        raise InputError(
            f"encoder {folder} is a ColBERT, which makes many vectors a text: name it in [represent.tokens] of a recipe"
        )
    if is_sparse_encoder(folder):
        raise InputError(
            f"encoder {folder} is a sparse encoder, which makes weighted terms: name it in [represent.sparse] of a "
            "recipe"
        )
    architecture = next(iter(config.get("architectures") or [""]))
    ours = (folder / RECORD_FILE).is_file() or (folder / MODULES).is_file()
    generates = config.get("is_encoder_decoder") or (architecture.endswith(_GENERATORS) and not ours)
    other_dpr = config.get("model_type") == "dpr" and architecture not in DPR_ENCODERS
    if generates or other_dpr or architecture.endswith(_OTHER_TASKS):
        raise InputError(
            f"encoder {folder} is a {architecture or config.get('model_type')}, which makes no vectors for "
            "search: give a bi-encoder such as BERT, MPNet, DPR, E5 or BGE"
        )
