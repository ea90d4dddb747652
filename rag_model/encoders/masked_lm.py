"""A trainable masked language model: log-likelihoods of masked tokens, with gradient.

Pairs of texts are joined as token ids, with the special tokens of the tokenizer's pair template,
because tokenizing a text with masks again could change its tokens.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch import Tensor, nn

from rag_model.encoders.files import read_max_tokens, resolve_folder
from rag_model.encoders.pretrained import check_body_is_complete, load_weights
from rag_model.encoders.tokens import copy_tokenizer, find_pad_id, load_tokenizer, pad_length, pad_rows
from rag_model.encoders.torch_cross_encoder import takes_token_type_ids
from rag_model.errors import InputError
from rag_model.tokenizer import explain_tokenizer_errors

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer


Ids = npt.NDArray[np.int64]
MASK_TOKENS = ("[MASK]", "<mask>")  # mask tokens of different tokenizers
_log = logging.getLogger(__name__)
# Attribute names of the heads of BERT and RoBERTa models, which map the states of single tokens.
_HEAD_NAMES = ("cls", "lm_head")


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """The special tokens around and between two texts, and the token type ids of the five parts."""

    prefix: tuple[int, ...]  # token ids before the first text, such as [CLS]
    separator: tuple[int, ...]  # token ids between the texts, such as [SEP]
    suffix: tuple[int, ...]  # token ids after the second text, such as [SEP]
    # Token type ids of prefix, first text, separator, second text and suffix.
    segment_ids: tuple[int, int, int, int, int]

    @classmethod
    def from_encoding(cls, pair: "Encoding") -> Self:
        """Derive the template from the encoding of two non-empty texts."""
        special_mask, sequence_ids = pair.special_tokens_mask, pair.sequence_ids
        first_positions = [
            position
            for position, sequence_id in enumerate(sequence_ids)
            if sequence_id == 0 and not special_mask[position]
        ]
        second_positions = [
            position
            for position, sequence_id in enumerate(sequence_ids)
            if sequence_id == 1 and not special_mask[position]
        ]
        part_positions = [0, first_positions[0], first_positions[-1] + 1, second_positions[0], len(sequence_ids) - 1]
        ids, segment_ids = pair.ids, [pair.type_ids[position] for position in part_positions]
        return cls(
            tuple(ids[: first_positions[0]]),
            tuple(ids[first_positions[-1] + 1 : second_positions[0]]),
            tuple(ids[second_positions[-1] + 1 :]),
            (segment_ids[0], segment_ids[1], segment_ids[2], segment_ids[3], segment_ids[4]),
        )

    @property
    def size(self) -> int:
        """The number of special tokens."""
        return len(self.prefix) + len(self.separator) + len(self.suffix)


@dataclass(frozen=True, slots=True)
class MaskedLMTokenizer:
    """The tokenizer of a masked language model; create one with `load`."""

    tokenizer: "Tokenizer"  # tokenizer that does not truncate
    template: PairTemplate
    mask_token: str  # text of the mask token, such as [MASK]
    mask_id: int
    pad_id: int
    max_tokens: int  # maximum tokens of an input

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load the tokenizer of a folder.

        Raises:
            InputError: the tokenizer's files are missing or corrupt, or it has no mask token.
        """
        max_tokens = read_max_tokens(folder)
        tokenizer = load_tokenizer(folder, max_tokens)
        tokenizer.no_truncation()
        mask_tokens = [
            (token, token_id) for token in MASK_TOKENS if (token_id := tokenizer.token_to_id(token)) is not None
        ]
        if not mask_tokens:
            raise InputError(
                f"the tokenizer of {folder} has no token {' or '.join(MASK_TOKENS)}: give a masked "
                "language model, such as BERT"
            )
        template = PairTemplate.from_encoding(tokenizer.encode("a", "a"))
        (mask_token, mask_id), pad_id = mask_tokens[0], find_pad_id(tokenizer, folder)
        return cls(tokenizer, template, mask_token, mask_id, pad_id, max_tokens)

    @explain_tokenizer_errors()
    def tokenize(self, texts: Sequence[str]) -> "list[Encoding]":
        """Return the tokens of each text with their character offsets, without special tokens."""
        return self.tokenizer.encode_batch(list(texts), add_special_tokens=False)

    def join_pair(self, first: Sequence[int], second: Sequence[int]) -> tuple[Ids, Ids]:
        """Return the (t,) int64 token ids and token type ids of a pair of texts, given by their
        token ids.
        """
        template = self.template
        id_parts = [template.prefix, first, template.separator, second, template.suffix]
        ids = np.concatenate([np.asarray(id_part, np.int64) for id_part in id_parts])
        return ids, np.repeat(np.array(template.segment_ids, np.int64), [len(id_part) for id_part in id_parts])


@dataclass(frozen=True, slots=True)
class MaskedInput:
    """One input with masks, and the token ids that the masks replace."""

    ids: Ids  # (t,) token ids with masks
    segment_ids: Ids  # (t,) token type ids
    mask_positions: Sequence[int]  # positions of the masks in `ids`
    target_ids: Sequence[int]  # token ids that the masks replace


class TrainableMaskedLM(nn.Module):
    """A transformer with a language-model head; create one with `load`."""

    def __init__(
        self,
        transformers_model: Any,
        tokenizer: MaskedLMTokenizer,
        folder: Path,
        *,
        new_head: bool = False,
    ) -> None:
        """Wrap a transformers model; `folder` contains its tokenizer.

        `new_head` means that the folder had no head, so the model's head is untrained.
        """
        super().__init__()
        self.whole, self.tokenizer = transformers_model, tokenizer
        self.folder, self.new_head = folder, new_head
        self._takes_segment_ids = takes_token_type_ids(transformers_model)

    @classmethod
    def load(cls, name: str | Path) -> Self:
        """Load a masked language model in float32 on the CPU.

        An encoder without a language-model head gets a new one: a random layer (from torch's seed)
        on the hidden states, followed by inner products with the token embeddings (tied weights).

        Raises:
            InputError: the model is not found, a file is missing or corrupt, it is another kind of
                model, or its tokenizer has no mask token.
        """
        folder = resolve_folder(name)
        model, missing_tensors = load_weights(
            transformers.AutoModelForMaskedLM, folder, "masked language model", torch.float32
        )
        check_body_is_complete(model, folder, missing_tensors)
        needs_new_head = any(not name.startswith(f"{model.base_model_prefix}.") for name in missing_tensors)
        if needs_new_head:
            _log.warning("model %s has no language-model head: a new one is created and tied to its embeddings", folder)
        return cls(model, MaskedLMTokenizer.load(folder), folder, new_head=needs_new_head).train()

    @property
    def device(self) -> torch.device:
        """The current device of the weights."""
        device: torch.device = self.whole.device
        return device

    def forward(self, *batches: Sequence[MaskedInput]) -> Tensor:
        """Return the (n, m) float32 log-probabilities of the masked tokens of n inputs; m is the
        maximum number of masks per input.

        The rows are the inputs of all batches in order; each batch is padded separately. A row with
        fewer masks ends in zeros. The head is computed only for the masks, because the logits of
        all tokens would take gigabytes. Embeddings and head are computed once for all batches,
        because each of their gradients is as large as the vocabulary.
        """
        inputs = [masked_input for batch in batches for masked_input in batch]
        mask_counts = [len(masked_input.mask_positions) for masked_input in inputs]
        if not any(mask_counts):
            return torch.zeros((len(inputs), 0), device=self.device)
        text_rows = self._flatten([[row] * n_masks for row, n_masks in enumerate(mask_counts)])  # (k,)
        mask_columns = self._flatten([range(n_masks) for n_masks in mask_counts])
        mask_logits = self._compute_logits([batch for batch in batches if batch])  # (k, V)
        # The log-probabilities need float32, also if autocast computed the logits in fewer bits.
        float_logits = mask_logits.to(torch.promote_types(mask_logits.dtype, torch.float32))
        log_probs = -nn.functional.cross_entropy(
            float_logits, self._flatten([masked_input.target_ids for masked_input in inputs]), reduction="none"
        )
        # (k,) -> (n, m)
        return log_probs.new_zeros(len(inputs), max(mask_counts)).index_put((text_rows, mask_columns), log_probs)

    def save(self, folder: Path) -> None:
        """Write a folder that `load` and transformers' `from_pretrained` can open."""
        copy_tokenizer(self.folder, folder)
        self.whole.save_pretrained(str(folder))

    def _compute_logits(self, batches: Sequence[Sequence[MaskedInput]]) -> Tensor:
        lm_head = next((getattr(self.whole, name) for name in _HEAD_NAMES if hasattr(self.whole, name)), None)
        batch_inputs = [self._pad_batch(batch) for batch in batches]
        mask_indices = [self._list_mask_indices(batch) for batch in batches]
        if lm_head is None:
            logits = [
                self.whole(**inputs).logits[indices] for inputs, indices in zip(batch_inputs, mask_indices, strict=True)
            ]  # (n, t, V) -> (k, V)
            return torch.cat(logits)
        base_model = getattr(self.whole, self.whole.base_model_prefix)
        input_id_batches = [inputs.pop("input_ids") for inputs in batch_inputs]
        batch_embeddings = base_model.get_input_embeddings()(
            torch.cat([token_ids.flatten() for token_ids in input_id_batches])
        )  # (all tokens, h)
        embeddings_by_batch = batch_embeddings.split([token_ids.numel() for token_ids in input_id_batches])
        mask_states = [
            # (n, t, h) -> (k, h)
            base_model(inputs_embeds=input_embeddings.view(*token_ids.shape, -1), **inputs)[0][batch_mask_indices]
            for input_embeddings, token_ids, inputs, batch_mask_indices in zip(
                embeddings_by_batch, input_id_batches, batch_inputs, mask_indices, strict=True
            )
        ]
        mask_logits: Tensor = lm_head(torch.cat(mask_states))  # (k, h) -> (k, V)
        return mask_logits

    def _list_mask_indices(self, batch: Sequence[MaskedInput]) -> tuple[Tensor, Tensor]:
        """Return the rows and the positions of all masks of a batch."""
        text_rows = self._flatten([[row] * len(masked_input.mask_positions) for row, masked_input in enumerate(batch)])
        return text_rows, self._flatten([masked_input.mask_positions for masked_input in batch])

    def _pad_batch(self, inputs: Sequence[MaskedInput]) -> dict[str, Tensor]:
        width = pad_length(max(len(masked_input.ids) for masked_input in inputs))
        ids, is_token = pad_rows([masked_input.ids for masked_input in inputs], width, self.tokenizer.pad_id)
        arrays = {"input_ids": ids, "attention_mask": is_token.astype(np.int64)}
        if self._takes_segment_ids:
            arrays["token_type_ids"] = pad_rows([masked_input.segment_ids for masked_input in inputs], width, 0)[0]
        return {name: torch.from_numpy(array).to(self.device) for name, array in arrays.items()}

    def _flatten(self, lists: Iterable[Sequence[int]]) -> Tensor:
        return torch.tensor([item for integers in lists for item in integers], dtype=torch.int64, device=self.device)
