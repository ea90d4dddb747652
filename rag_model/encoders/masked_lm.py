"""A trainable masked language model: the log-likelihood of the tokens that masks hide, with gradient."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from rag_model.encoders.batches import padded
from rag_model.encoders.joint_tokens import Ids, JointTokens
from rag_model.encoders.pairs.classifier import takes_types
from rag_model.encoders.pretrained import load_pretrained
from rag_model.encoders.resolve import resolve_folder
from rag_model.encoders.tokens import copy_tokenizer
from rag_model.errors import InputError

_log = logging.getLogger(__name__)
_POOLER = "pooler"  # BERT's: logits do not depend on it
_HEADS = ("cls", "lm_head")  # the heads of BERT's and of RoBERTa's families, which take the hidden state of one token


@dataclass(frozen=True, slots=True)
class Hidden:
    """One input with masks, and what they hide."""

    ids: Ids  # (t,)
    types: Ids  # (t,) segment ids
    places: Sequence[int]  # of the masks in `ids`
    targets: Sequence[int]  # the hidden ids


class TrainableMaskedLM(nn.Module):
    """A transformer with a head over its vocabulary; make it with `load`."""

    def __init__(self, whole: Any, tokens: JointTokens, folder: Path, *, new_head: bool = False) -> None:
        """Wrap a transformers model; `folder` has its tokenizer; `new_head`: the folder had none."""
        super().__init__()
        self.whole, self.tokens, self.folder, self.new_head = whole, tokens, folder, new_head
        self._typed = takes_types(whole)

    @classmethod
    def load(cls, name: str | Path) -> Self:
        """Load a masked language model, in float32, on the CPU.

        Any other encoder gets a new head: its logits are inner products with the embeddings of the tokens (tied), of
        hidden states that go through a layer drawn with torch's seed.

        Raises:
            InputError: it is not found, a file is missing or corrupt, it is another kind of model, or its tokenizer has
                no mask.
        """
        folder = resolve_folder(name)
        whole, missing = _load(folder)
        body = f"{whole.base_model_prefix}."
        lost = [one for one in missing if one.startswith(body) and _POOLER not in one.split(".")]
        if lost:
            raise InputError(f"model {folder} lacks {len(lost)} tensors, the first is {lost[0]}: fetch it again")
        head = any(not one.startswith(body) for one in missing)
        if head:
            _log.warning("model %s has no head over its vocabulary: a new one begins, tied to its embeddings", folder)
        return cls(whole, JointTokens.load(folder), folder, new_head=head).train()

    @property
    def device(self) -> torch.device:
        """The current device of the weights."""
        found: torch.device = self.whole.device
        return found

    def forward(self, *batches: Sequence[Hidden]) -> Tensor:
        """Return the (n, m) float32 log-probabilities of what the masks of n inputs hide; m is the most of an input.

        The inputs are those of all batches, one after another; each batch has its own padding. A row with fewer masks
        ends in zeros. The head is computed for masks alone: logits of all tokens would take gigabytes. Embeddings and
        head are computed once, since each time has a gradient as large as the vocabulary.
        """
        inputs = [one for batch in batches for one in batch]
        counts = [len(one.places) for one in inputs]
        if not any(counts):
            return torch.zeros((len(inputs), 0), device=self.device)
        rows = self._flat([[row] * count for row, count in enumerate(counts)])  # (k,)
        columns = self._flat([range(count) for count in counts])
        logits = self._logits([batch for batch in batches if batch])  # (k, V)
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))  # also under autocast
        log_p = -nn.functional.cross_entropy(exact, self._flat([one.targets for one in inputs]), reduction="none")
        return log_p.new_zeros(len(inputs), max(counts)).index_put((rows, columns), log_p)  # (k,) -> (n, m)

    def save(self, folder: Path) -> None:
        """Write a folder that `load` and transformers' `from_pretrained` open."""
        copy_tokenizer(self.folder, folder)
        self.whole.save_pretrained(str(folder))

    def _logits(self, batches: Sequence[Sequence[Hidden]]) -> Tensor:
        head = next((getattr(self.whole, name) for name in _HEADS if hasattr(self.whole, name)), None)
        given = [self._padded(batch) for batch in batches]
        masks = [self._masks(batch) for batch in batches]
        if head is None:
            found = [self.whole(**one).logits[at] for one, at in zip(given, masks, strict=True)]  # (n, t, V) -> (k, V)
            return torch.cat(found)
        body = getattr(self.whole, self.whole.base_model_prefix)
        ids = [one.pop("input_ids") for one in given]
        words = body.get_input_embeddings()(torch.cat([one.flatten() for one in ids]))  # (all tokens, h)
        parts = words.split([one.numel() for one in ids])
        read = [
            body(inputs_embeds=part.view(*own.shape, -1), **one)[0][at]  # (n, t, h) -> (k, h)
            for part, own, one, at in zip(parts, ids, given, masks, strict=True)
        ]
        of_masks: Tensor = head(torch.cat(read))  # (k, h) -> (k, V)
        return of_masks

    def _masks(self, batch: Sequence[Hidden]) -> tuple[Tensor, Tensor]:
        """Return the rows and the places of all masks of a batch."""
        rows = self._flat([[row] * len(one.places) for row, one in enumerate(batch)])
        return rows, self._flat([one.places for one in batch])

    def _padded(self, inputs: Sequence[Hidden]) -> dict[str, Tensor]:
        lengths = np.array([len(one.ids) for one in inputs])
        real = np.arange(padded(int(lengths.max()))) < lengths[:, None]  # (t,) < (n, 1) -> (n, t)
        ids, types = np.full(real.shape, self.tokens.pad_id, np.int64), np.zeros(real.shape, np.int64)
        ids[real] = np.concatenate([one.ids for one in inputs])  # ragged -> (n, t)
        types[real] = np.concatenate([one.types for one in inputs])
        given = {"input_ids": ids, "attention_mask": real.astype(np.int64)}
        if self._typed:
            given["token_type_ids"] = types
        return {name: torch.from_numpy(values).to(self.device) for name, values in given.items()}

    def _flat(self, lists: Iterable[Sequence[int]]) -> Tensor:
        return torch.tensor([one for some in lists for one in some], dtype=torch.int64, device=self.device)


def _load(folder: Path) -> tuple[Any, list[str]]:
    """Load the model of `folder`, and name the tensors that it lacks."""
    whole, loading = load_pretrained(
        transformers.AutoModelForMaskedLM,
        folder,
        "masked language model",
        "fetch it again",
        dtype=torch.float32,
        use_safetensors=True,
        output_loading_info=True,
    )
    return whole, sorted(loading["missing_keys"])
