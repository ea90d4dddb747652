"""A question and a passage as one line of token ids, cut in the passage alone, and lines as one padded batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from rag_model.encoders.files import CONFIG, longest_input, optional_object
from rag_model.encoders.tokens import load_tokenizer
from rag_model.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

MOST_TOKENS = 512  # of a pair, special ones included
_PADS = ("[PAD]", "<pad>")
_TASK = "ForSequenceClassification"
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PairBatch:
    """Pairs as a model takes them: three (b, t) int64 arrays, padded at the end."""

    ids: Ids
    mask: Ids  # 1 for tokens, 0 for padding
    types: Ids  # 0 for the question, 1 for the passage


@dataclass(frozen=True, slots=True)
class PairTokens:
    """The tokenizer of a cross-encoder; make it with `load`."""

    tokenizer: "Tokenizer"  # of pairs
    whole: "Tokenizer"  # of questions, which it cuts nowhere
    max_length: int  # tokens of a pair
    pad_id: int

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load the tokenizer of a cross-encoder's folder; pairs have at most 512 tokens, or what the model can read.

        Raises:
            InputError: its files are missing or corrupt.
        """
        length = min(MOST_TOKENS, longest_input(folder))
        tokenizer, whole = load_tokenizer(folder, length), load_tokenizer(folder, length)
        tokenizer.enable_truncation(length, strategy="only_second")
        whole.no_truncation()
        known = [optional_object(folder / CONFIG).get("pad_token_id"), *map(tokenizer.token_to_id, _PADS), 0]
        return cls(tokenizer, whole, length, next(number for number in known if number is not None))

    def encode(self, questions: Sequence[str], titles: Sequence[str], texts: Sequence[str]) -> "list[Encoding]":
        """Return n pairs as token ids, in order.

        A passage is its title and text, joined by a space, and is cut where the pair is too long. A question is cut
        only where it would leave a passage less than a quarter of the tokens.
        """
        short = {question: self._cut(question) for question in set(questions)}
        passages = [f"{title} {text}".strip() for title, text in zip(titles, texts, strict=True)]
        return self.tokenizer.encode_batch([(short[one], two) for one, two in zip(questions, passages, strict=True)])

    def batch(self, pairs: "Sequence[Encoding]") -> PairBatch:
        """Return encoded pairs as one batch, as long as its longest pair."""
        lengths = np.array([len(pair.ids) for pair in pairs])
        real = np.arange(lengths.max()) < lengths[:, None]  # (t,) < (b, 1) -> (b, t)
        ids = _padded([pair.ids for pair in pairs], real, self.pad_id)
        return PairBatch(ids, real.astype(np.int64), _padded([pair.type_ids for pair in pairs], real, 0))

    def _cut(self, question: str) -> str:
        room = self.max_length - self.max_length // 4 - self.tokenizer.num_special_tokens_to_add(is_pair=True)
        offsets = self.whole.encode(question, add_special_tokens=False).offsets
        return question if len(offsets) <= room else question[: offsets[room - 1][1]]


def check_scores_pairs(folder: Path) -> None:
    """Check by the config, if there is one, that `folder` holds a model with one score a pair.

    Raises:
        InputError: it holds another kind of model, such as a bi-encoder, or one with several labels.
    """
    config = optional_object(folder / CONFIG)
    name = next(iter(config.get("architectures") or [""]))
    labels = len(config.get("id2label") or {}) or config.get("num_labels", 2)
    if config and not name.endswith(_TASK):
        raise no_cross_encoder(folder, f"is a {name or config.get('model_type')}, which scores no pairs")
    if config and labels != 1:
        raise InputError(f"{folder} gives {labels} scores a pair, and a cross-encoder gives 1: give another model")


def no_cross_encoder(folder: Path, why: str) -> InputError:
    """Return the error that refuses the model of `folder`."""
    return InputError(
        f"{folder} {why}: give a cross-encoder, a folder with a model for sequence classification, such as "
        "cross-encoder/ms-marco-MiniLM-L6-v2"
    )


def _padded(lines: Sequence[Sequence[int]], real: npt.NDArray[np.bool_], pad: int) -> Ids:
    filled = np.full(real.shape, pad, np.int64)
    filled[real] = np.concatenate([np.asarray(line, np.int64) for line in lines])  # ragged -> (b, t)
    return filled
