"""Two texts as one line of token ids, of ids that are known already: what a masked language model reads.

A tokenizer's own template says which special tokens stand before, between and after two texts. Here they are joined by
ids, because a text with masks cannot be tokenized again without changing its pieces.
"""

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

Ids = npt.NDArray[np.int64]
MASKS = ("[MASK]", "<mask>")  # as tokenizers write them
_PADS = ("[PAD]", "<pad>")


@dataclass(frozen=True, slots=True)
class Frame:
    """The special tokens of a pair, and the segment ids of its five pieces."""

    before: tuple[int, ...]  # ids: BERT's [CLS]
    between: tuple[int, ...]  # [SEP]
    after: tuple[int, ...]  # [SEP]
    types: tuple[int, int, int, int, int]  # before, of the first text, between, of the second text, after

    @classmethod
    def of(cls, pair: "Encoding") -> Self:
        """Read the template off an encoded pair of two texts that are not empty."""
        special, sides = pair.special_tokens_mask, pair.sequence_ids
        first = [at for at, side in enumerate(sides) if side == 0 and not special[at]]
        second = [at for at, side in enumerate(sides) if side == 1 and not special[at]]
        places = [0, first[0], first[-1] + 1, second[0], len(sides) - 1]
        ids, types = pair.ids, [pair.type_ids[at] for at in places]
        return cls(
            tuple(ids[: first[0]]),
            tuple(ids[first[-1] + 1 : second[0]]),
            tuple(ids[second[-1] + 1 :]),
            (types[0], types[1], types[2], types[3], types[4]),
        )

    @property
    def size(self) -> int:
        """The number of special tokens."""
        return len(self.before) + len(self.between) + len(self.after)


@dataclass(frozen=True, slots=True)
class JointTokens:
    """The tokenizer of a masked language model; make it with `load`."""

    tokenizer: "Tokenizer"  # cuts nowhere
    frame: Frame
    mask: str  # as it is written
    mask_id: int
    pad_id: int
    longest: int  # tokens that the model reads

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load the tokenizer of a folder.

        Raises:
            InputError: its files are missing or corrupt, or it has no token for masks.
        """
        longest = longest_input(folder)
        tokenizer = load_tokenizer(folder, longest)
        tokenizer.no_truncation()
        ids = {mark: number for mark in MASKS if (number := tokenizer.token_to_id(mark)) is not None}
        if not ids:
            raise InputError(
                f"the tokenizer of {folder} has no token {' or '.join(MASKS)}: give a masked language model, such as "
                "BERT"
            )
        known = [optional_object(folder / CONFIG).get("pad_token_id"), *map(tokenizer.token_to_id, _PADS), 0]
        pad = next(number for number in known if number is not None)
        frame = Frame.of(tokenizer.encode("a", "a"))
        mask, mask_id = next(iter(ids.items()))
        return cls(tokenizer, frame, mask, mask_id, pad, longest)

    def pieces(self, texts: Sequence[str]) -> "list[Encoding]":
        """Return the wordpieces of each text, without special tokens, with their offsets in it."""
        return self.tokenizer.encode_batch(list(texts), add_special_tokens=False)

    def join(self, first: Sequence[int], second: Sequence[int]) -> tuple[Ids, Ids]:
        """Return the (t,) int64 ids and segment ids of a pair of texts, given by their ids."""
        own = self.frame
        parts = [own.before, first, own.between, second, own.after]
        ids = np.concatenate([np.asarray(part, np.int64) for part in parts])
        return ids, np.repeat(np.array(own.types, np.int64), [len(part) for part in parts])
