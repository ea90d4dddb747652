"""Cross-encoders: question and passage through one transformer, one score out (Nogueira and Cho 2019).

The score is the logit, as the model gives it: it orders the passages of one question, and is no probability.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import torch
import transformers

from rag_model.encoders.batches import by_length
from rag_model.encoders.files import CONFIG, longest_input, read_object
from rag_model.encoders.model import CPU_BATCH_TOKENS, CUDA_BATCH_TOKENS, device_named
from rag_model.encoders.tokens import load_tokenizer
from rag_model.encoders.weights import stored_tensors
from rag_model.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

MOST_TOKENS = 512  # of a pair, special ones included
_WINDOW = 1_024  # pairs that are tokenised and sorted by length together
_TASK = "ForSequenceClassification"


@dataclass(frozen=True, slots=True)
class CrossEncoder:
    """A loaded cross-encoder; make one with `load`."""

    folder: Path
    tokenizer: "Tokenizer"  # of pairs
    whole: "Tokenizer"  # of questions, which it cuts nowhere
    model: Any  # transformers': ids, mask and perhaps segments to (b, 1) logits
    max_length: int  # tokens of a pair
    takes_types: bool  # whether it tells the two texts apart by segment ids
    pad_id: int

    @classmethod
    def load(cls, folder: Path, *, device: str | None = None) -> Self:
        """Load a Hugging Face folder of a sequence classifier with one label, in float32; `device` as `Encoder.load`.

        Raises:
            InputError: a file is missing or corrupt, or it is another kind of model, such as a bi-encoder.
            UsageError: this machine has no such device.
        """
        _check_kind(folder)
        stored_tensors(folder)  # says which file is truncated; transformers does not
        where = device_named(device)
        try:
            model, loading = transformers.AutoModelForSequenceClassification.from_pretrained(
                str(folder), dtype=torch.float32, local_files_only=True, use_safetensors=True, output_loading_info=True
            )
        except (OSError, ValueError, RuntimeError, KeyError) as broken:
            sentence = str(broken).partition("\n")[0]
            raise InputError(f"cross-encoder {folder} cannot be loaded ({sentence}): fetch it again") from broken
        if missing := sorted(loading["missing_keys"]):
            raise InputError(f"cross-encoder {folder} lacks {len(missing)} tensors, {missing[0]} first: fetch it again")
        length = min(MOST_TOKENS, longest_input(folder))
        tokenizer = load_tokenizer(folder, length)
        tokenizer.enable_truncation(length, strategy="only_second")
        whole = load_tokenizer(folder, length)
        whole.no_truncation()
        types = "token_type_ids" in inspect.signature(model.forward).parameters
        types = types and getattr(model.config, "type_vocab_size", 0) > 1
        pad = getattr(model.config, "pad_token_id", None) or 0
        return cls(folder, tokenizer, whole, model.to(where).eval(), length, types, pad)

    def scores(self, questions: Sequence[str], titles: Sequence[str], texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return the (n,) float32 logits of n pairs of a question and a passage, in order; larger is better.

        A passage is its title and text, joined by a space, and is cut where the pair is too long. A question is cut
        only where it would leave a passage less than a quarter of the tokens.
        """
        short = {question: self._cut(question) for question in set(questions)}
        passages = [f"{title} {text}".strip() for title, text in zip(titles, texts, strict=True)]
        pairs = [(short[question], passage) for question, passage in zip(questions, passages, strict=True)]
        out = np.empty(len(pairs), np.float32)
        for start in range(0, len(pairs), _WINDOW):
            encoded = self.tokenizer.encode_batch(pairs[start : start + _WINDOW])
            out[start : start + len(encoded)] = self._scored(encoded)
        return out

    @torch.inference_mode()
    def _scored(self, pairs: "Sequence[Encoding]") -> npt.NDArray[np.float32]:
        """Score pairs, those of like length together: as many as a budget of tokens holds."""
        out = np.empty(len(pairs), np.float32)
        budget = CUDA_BATCH_TOKENS if self.model.device.type == "cuda" else CPU_BATCH_TOKENS
        for rows in by_length([len(pair.ids) for pair in pairs], budget):
            batch = [pairs[row] for row in rows.tolist()]
            lengths = np.array([len(pair.ids) for pair in batch])
            real = np.arange(lengths.max()) < lengths[:, None]  # (b, t)
            inputs = {"input_ids": self._padded([pair.ids for pair in batch], real, self.pad_id)}
            inputs["attention_mask"] = torch.from_numpy(real.astype(np.int64))
            if self.takes_types:
                inputs["token_type_ids"] = self._padded([pair.type_ids for pair in batch], real, 0)
            told = self.model(**{name: value.to(self.model.device) for name, value in inputs.items()}).logits
            out[rows] = told[:, 0].float().cpu().numpy()  # (b, 1) -> (b,)
        return out

    def _padded(self, lines: Sequence[Sequence[int]], real: npt.NDArray[np.bool_], pad: int) -> torch.Tensor:
        filled = np.full(real.shape, pad, np.int64)
        filled[real] = np.concatenate([np.asarray(line, np.int64) for line in lines])
        return torch.from_numpy(filled)

    def _cut(self, question: str) -> str:
        room = self.max_length - self.max_length // 4 - self.tokenizer.num_special_tokens_to_add(is_pair=True)
        offsets = self.whole.encode(question, add_special_tokens=False).offsets
        return question if len(offsets) <= room else question[: offsets[room - 1][1]]


def _check_kind(folder: Path) -> None:
    config = read_object(folder / CONFIG)
    name = next(iter(config.get("architectures") or [""]))
    labels = len(config.get("id2label") or {}) or config.get("num_labels", 2)
    if not name.endswith(_TASK):
        raise InputError(
            f"{folder} is a {name or config.get('model_type')}, which scores no pairs: give a cross-encoder, a folder "
            "with a model for sequence classification, such as cross-encoder/ms-marco-MiniLM-L6-v2"
        )
    if labels != 1:
        raise InputError(f"{folder} gives {labels} scores a pair, and a cross-encoder gives 1: give another model")
