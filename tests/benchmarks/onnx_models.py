"""Conversions of cross-encoders: an ONNX graph to safetensors in float32, and safetensors to an ONNX graph.

A graph that was quantised after training keeps its weights as bytes with one scale per tensor. The conversion
to float32 keeps their values, so torch and sentence-transformers can run the same model as a peer.
"""

import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
HEAD = 32  # dimensions of an attention head of the MiniLM family


def as_safetensors(graph: Path, out: Path) -> Path:
    """Write a BERT cross-encoder's quantised ONNX folder as a Hugging Face folder in float32."""
    state = {name: torch.tensor(values) for name, values in _read_weights(onnx.load(str(graph / "model.onnx"))).items()}
    layers = 1 + max(int(layer_match[1]) for name in state if (layer_match := re.search(r"layer\.(\d+)\.", name)))
    words, hidden = state["bert.embeddings.word_embeddings.weight"].shape
    wide = len(state["bert.encoder.layer.0.intermediate.dense.bias"])
    config = BertConfig(
        vocab_size=words,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD,
        intermediate_size=wide,
        num_labels=1,
    )
    model = BertForSequenceClassification(config)
    model.load_state_dict(state)
    model.save_pretrained(str(out))
    _copy_tokenizer(graph, out)
    return out


def with_new_head(encoder: Path, out: Path) -> Path:
    """Write an encoder as a cross-encoder with a random head: as fast as a trained one, with meaningless scores."""
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(str(encoder), num_labels=1).save_pretrained(str(out))
    _copy_tokenizer(encoder, out)
    return out


def as_graph(folder: Path, out: Path) -> Path:
    """Write a BERT cross-encoder's Hugging Face folder as an ONNX folder in float32."""
    out.mkdir(parents=True)
    ids = torch.ones(2, 16, dtype=torch.int64)
    axes = {name: {0: "pairs", 1: "tokens"} for name in INPUTS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            _Positional(AutoModelForSequenceClassification.from_pretrained(str(folder)).eval()),
            (ids, ids.clone(), torch.zeros_like(ids)),
            str(out / "model.onnx"),
            input_names=list(INPUTS),
            output_names=["logits"],
            dynamic_axes={**axes, "logits": {0: "pairs"}},
            opset_version=17,
            dynamo=False,
        )
    _copy_tokenizer(folder, out)
    return out


class _Positional(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> Any:
        return self.model(input_ids=ids, attention_mask=mask, token_type_ids=types).logits


def _read_weights(model: Any) -> dict[str, Any]:
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}

    def dequantize(name: str) -> Any:
        base = name.removesuffix("_quantized")
        zero = stored[f"{base}_zero_point"].astype(np.float32)
        return (stored[name].astype(np.float32) - zero) * stored[f"{base}_scale"]

    weights = {name: values for name, values in stored.items() if values.dtype == np.float32 and values.ndim}
    weights |= {n.removesuffix("_quantized"): dequantize(n) for n in stored if n.endswith(".weight_quantized")}
    for node in model.graph.node:
        if node.op_type == "MatMulInteger":  # (in, out), where torch has (out, in)
            node_match = re.match(r"/(.*)/(MatMul|Gemm)", node.name)
            assert node_match, node.name
            weights[f"{node_match[1].replace('/', '.')}.weight"] = dequantize(node.input[1]).T
    return weights


def _copy_tokenizer(source: Path, out: Path) -> None:
    for name in TOKENIZER:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
