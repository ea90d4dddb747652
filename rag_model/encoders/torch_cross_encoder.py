"""Compute the logits of pairs with torch, for inference and for training.

For inference on a CPU, linear layers use oneDNN: torch multiplies float32 matrices with MKL, which
has no AVX-512 kernels for processors of other vendors, and oneDNN takes about half the time there.
Results are equal up to rounding.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch import Tensor, nn

from rag_model.corpus.records import Passage
from rag_model.encoders.cross_encoder import CrossEncoder, PairBatch, PairTokenizer, check_is_cross_encoder
from rag_model.encoders.files import CONFIG, read_json_object, resolve_folder
from rag_model.encoders.model import (
    CUDA_BATCH_TOKENS,
    choose_inference_dtype,
    evaluation_mode,
    get_training_length_multiple,
    parse_dtype,
    resolve_device,
)
from rag_model.encoders.pretrained import check_body_is_complete, load_weights, refuse_missing_tensors
from rag_model.encoders.tokens import copy_tokenizer
from rag_model.encoders.weights import list_weight_files

# Maximum tokens per batch, including padding; with 4,096, which exceed the cache, MiniLM is 10 %
# slower.
CPU_BATCH_TOKENS = 1024


class _OneDnnLinear(nn.Module):
    """A linear layer with weights in oneDNN's layout."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        bias = torch.zeros(layer.out_features) if layer.bias is None else layer.bias
        self.weight: Any = layer.weight.detach().to_mkldnn()
        self.bias: Any = bias.detach().to_mkldnn()

    def forward(self, rows: Tensor) -> Tensor:
        """Map (…, in) to (…, out)."""
        product: Tensor = torch.ops.aten.mkldnn_linear(rows.to_mkldnn(), self.weight, self.bias)
        return product.to_dense()


def replace_linear_by_onednn(model: nn.Module) -> nn.Module:
    """Replace the linear layers of a float32 CPU model in place; afterwards the model cannot be
    trained or saved.

    If this build of torch has no oneDNN, the model is unchanged.
    """
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        for name, layer in list(model.named_modules()):
            if type(layer) is nn.Linear:
                model.set_submodule(name, _OneDnnLinear(layer))
    return model


@dataclass(frozen=True, slots=True)
class TorchPairModel:
    """A sequence classifier with one label, on one device; `load` creates one for inference."""

    # model that maps token ids, attention mask and token types to (b, 1) logits
    transformers_model: Any

    @classmethod
    def load(cls, folder: Path, device: str | None = None, dtype: str | None = None) -> Self:
        """Load the model of `folder`, by default on one of the GPUs, else on the CPU.

        `dtype` is by default the result of `choose_inference_dtype`.

        Raises:
            InputError: a file is missing or corrupt, or the model is not a cross-encoder.
            UsageError: this machine has no such device, or torch has no such dtype.
        """
        list_weight_files(folder)
        read_json_object(folder / CONFIG)
        check_is_cross_encoder(folder)
        resolved_device = resolve_device(device)
        resolved_dtype = parse_dtype(dtype or choose_inference_dtype(resolved_device))
        transformers_model, missing_tensors = load_classifier(folder)
        refuse_missing_tensors("cross-encoder", folder, missing_tensors)
        transformers_model = transformers_model.to(resolved_device, resolved_dtype).eval().requires_grad_(False)
        uses_onednn = resolved_device.type == "cpu" and resolved_dtype == torch.float32
        return cls(replace_linear_by_onednn(transformers_model) if uses_onednn else transformers_model)

    @property
    def batch_tokens(self) -> int:
        """The maximum number of tokens per batch, including padding."""
        return CUDA_BATCH_TOKENS if self.transformers_model.device.type == "cuda" else CPU_BATCH_TOKENS

    @torch.inference_mode()
    def logits(self, batch: PairBatch) -> npt.NDArray[np.float32]:
        """Return the (b,) float32 logits of a batch."""
        logits: npt.NDArray[np.float32] = self.forward(batch).cpu().numpy()
        return logits

    def forward(self, batch: PairBatch) -> Tensor:
        """Return the (b,) float32 logits of a batch, with gradient if the weights require one."""
        inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        if takes_token_type_ids(self.transformers_model):
            inputs["token_type_ids"] = batch.token_type_ids
        tensors = {name: torch.from_numpy(array).to(self.transformers_model.device) for name, array in inputs.items()}
        logits: Tensor = self.transformers_model(**tensors).logits
        return logits[:, 0].float()  # (b, 1) -> (b,)


def load_classifier(folder: Path) -> tuple[Any, list[str]]:
    """Load a transformer with a one-label head, in float32 on the CPU; return (model, sorted names
    of missing tensors).

    Raises:
        InputError: a file is missing or corrupt, or transformers has no such head for the model.
    """
    auto_class = transformers.AutoModelForSequenceClassification
    return load_weights(auto_class, folder, "cross-encoder", torch.float32, num_labels=1)


def takes_token_type_ids(transformers_model: Any) -> bool:
    """Return whether a model distinguishes the two texts by token type ids."""
    has_parameter = "token_type_ids" in inspect.signature(transformers_model.forward).parameters
    return has_parameter and getattr(transformers_model.config, "type_vocab_size", 0) > 1


class TrainableCrossEncoder(nn.Module):
    """A trainable transformer with one score per pair; create one with `load`."""

    def __init__(self, transformers_model: nn.Module, tokenizer: PairTokenizer, folder: Path) -> None:
        """Wrap a transformers model; `folder` contains its tokenizer."""
        super().__init__()
        self.whole, self.folder = transformers_model, folder
        self._tokenizer, self._model = tokenizer, TorchPairModel(transformers_model)

    @classmethod
    def load(cls, name: str | Path) -> Self:
        """Load a cross-encoder in float32 on the CPU; any other transformer gets a new random head
        (torch's seed).

        Raises:
            InputError: the model is not found, a file is missing or corrupt, or transformers has no
                such head for it.
        """
        folder = resolve_folder(name)
        model, missing_tensors = load_classifier(folder)
        check_body_is_complete(model, folder, missing_tensors)
        return cls(model, PairTokenizer.load(folder), folder).train()

    def forward(self, questions: Sequence[str], passages: Sequence[Passage]) -> Tensor:
        """Return the (n,) float32 logits of n pairs with gradient, in order; the pairs are one
        batch.
        """
        titles, texts = [passage.title for passage in passages], [passage.text for passage in passages]
        # A GPU selects kernels for each new length, so batches of many lengths train slowly at
        # first.
        length_multiple = get_training_length_multiple(next(self.parameters()).device)
        pairs = self._tokenizer.encode(questions, titles, texts)
        return self._model.forward(self._tokenizer.pad_batch(pairs, length_multiple))

    def scores(self, questions: Sequence[str], passages: Sequence[Passage]) -> npt.NDArray[np.float32]:
        """Return the (n,) float32 logits of n pairs without gradient and without dropout, as
        `CrossEncoder` does.
        """
        with evaluation_mode(self):
            return CrossEncoder(self._tokenizer, self._model).scores(
                questions, [passage.title for passage in passages], [passage.text for passage in passages]
            )

    def save(self, folder: Path) -> None:
        """Write a folder that `CrossEncoder.load` and transformers' `from_pretrained` open."""
        copy_tokenizer(self.folder, folder)
        model: Any = self.whole
        model.save_pretrained(str(folder))
