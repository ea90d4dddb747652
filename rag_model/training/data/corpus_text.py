"""Examples of plain text: the beginning of a snapshot's passage, and how it goes on."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rag_model.corpus.records import Passage
from rag_model.store.versions.snapshot import Snapshot

_AT_ONCE = 1_024  # passages read at a time


def text_examples(
    snapshot: Snapshot, tokenizer: Any, count: int, tokens: int, seed: int
) -> list[tuple[Passage, str, str]]:
    """Return up to `count` passages of a snapshot, drawn without repetition, each with its first tokens and the next.

    x is the first `tokens` tokens of the passage's text, y the next ones, as many or fewer; both are slices of the
    text, one after the other. A text of no more than `tokens` tokens is passed over, so there may be fewer examples.
    Lin et al. 2023, appendix B, take the first 50 tokens and the chunk's last 50.

    `tokenizer` is a fast one of transformers. Equal snapshots, tokenizers, numbers and seeds give equal examples.
    """
    found = list[tuple[Passage, str, str]]()
    order = np.random.default_rng(seed).permutation(snapshot.n)
    for start in range(0, len(order), _AT_ONCE):
        if len(found) >= count:
            break
        passages = snapshot.passages(order[start : start + _AT_ONCE].tolist())
        found += _split(passages, tokenizer, tokens)
    return found[:count]


def _split(passages: Sequence[Passage], tokenizer: Any, tokens: int) -> Iterator[tuple[Passage, str, str]]:
    texts = [passage.text for passage in passages]
    read = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False)
    for passage, text, places in zip(passages, texts, read["offset_mapping"], strict=True):
        ends = [end for _, end in places[: 2 * tokens]]
        if len(ends) > tokens and text[ends[tokens - 1] : ends[-1]].strip():
            yield passage, text[: ends[tokens - 1]], text[ends[tokens - 1] : ends[-1]]


def overlap(first: Passage, second: Passage) -> bool:
    """Return whether two passages share words of their page, as windows do; or are the same."""
    if first.hash == second.hash:
        return True
    ends = first.start_word + first.n_words, second.start_word + second.n_words
    meet = first.start_word < ends[1] and second.start_word < ends[0]
    return first.page_id == second.page_id and meet
