"""Sample training data from a snapshot's own passages, without questions and answers.

* `TextSplit`, `EpochBatches`: held-out texts, and the batches of an epoch
* `draw_text_examples`: the beginning of a passage and its continuation (RA-DIT)
* `sample_inverse_cloze`: a sentence of a passage as the question (Lee et al. 2019, ORQA)
* `SalientSpans`: names and dates in the passages (REALM)
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from rag_model.arrays import RowPartition
from rag_model.corpus.chunkers.article_words import ends_sentence
from rag_model.corpus.records import Passage
from rag_model.corpus.salient_spans import SalientSpan, SpanFile
from rag_model.errors import InputError, StoreError, UsageError
from rag_model.store.recorded_tasks import PartTask, TaskRunner, run_tasks
from rag_model.store.store import Store
from rag_model.store.versions.manifest import spans_path
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.memory import read_passages

Rows = npt.NDArray[np.int64]  # rows of passages in the snapshot
_WORD = re.compile(r"\S+")
_MIN_BATCH, _MAX_BATCH = 1_024, 16_384  # minimum and maximum number of passages read at a time


@dataclass(frozen=True, slots=True)
class TextSplit:
    """The rows of the training texts and of the held-out texts, ascending."""

    train: Rows
    dev: Rows

    @classmethod
    def hold_out(cls, rows: Rows, n_dev: int) -> "TextSplit":
        """Hold out `n_dev` evenly spaced rows, but at most half of all rows. If nothing can be held
        out, `dev` has the same rows as `train`.
        """
        n_held_out = min(n_dev, len(rows) // 2)
        if not n_held_out:
            return cls(rows, rows)
        dev_rows = np.unique(np.linspace(0, len(rows) - 1, n_held_out, dtype=np.int64))
        return cls(np.delete(rows, dev_rows), rows[dev_rows])


@dataclass(frozen=True, slots=True)
class TextBatch:
    """A batch of texts; the epoch is the seed of random choices for these texts."""

    epoch: int
    rows: tuple[int, ...]


class EpochBatches(Sequence[TextBatch]):
    """The batches of an epoch: rows in a random order that depends only on the seed and the epoch.

    An incomplete last batch is dropped unless it is the only one. The order needs 8 bytes per row.
    """

    def __init__(self, rows: Rows, batch_size: int, seed: int, epoch: int) -> None:
        self._order = np.random.default_rng([seed, epoch]).permutation(rows)
        self._size, self._epoch = min(batch_size, len(rows)), epoch

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._order) // self._size if self._size else 0

    def __getitem__(self, index: Any) -> Any:
        """Return the batch at an index from 0."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        return TextBatch(self._epoch, tuple(self._order[index * self._size : (index + 1) * self._size].tolist()))


def find_sentences(text: str) -> list[tuple[int, int]]:
    """Return the (start, end) offsets of each sentence, in order; every word is in a sentence."""
    words = list(_WORD.finditer(text))
    sentence_spans: list[tuple[int, int]] = []
    first_word = 0
    for i, word in enumerate(words):
        is_last = i + 1 == len(words)
        if is_last or ends_sentence(word[0], words[i + 1][0]):
            sentence_spans.append((words[first_word].start(), word.end()))
            first_word = i + 1
    return sentence_spans


def sample_inverse_cloze(
    passage: Passage, removal_probability: float, rng: random.Random
) -> tuple[str, Passage] | None:
    """Return a random sentence of the passage as the question, and the passage.

    Return None if the passage has only one sentence. With probability `removal_probability` the
    sentence is removed from the passage, so that the model cannot rely on equal words alone.
    Otherwise it stays, so that the model also learns to match words.
    """
    spans = find_sentences(passage.text)
    if len(spans) < 2:
        return None
    start, end = rng.choice(spans)
    if rng.random() >= removal_probability:
        return passage.text[start:end], passage
    other_text = " ".join((passage.text[:start] + passage.text[end:]).split())
    return passage.text[start:end], replace(passage, text=other_text, hash=Passage.hash_of(passage.title, other_text))


def draw_text_examples(
    snapshot: Snapshot, tokenizer: Any, count: int, n_tokens: int, seed: int, runner: TaskRunner | None = None
) -> list[tuple[Passage, str, str]]:
    """Return up to `count` random passages, each with its beginning x and its continuation y.

    Passages are not repeated. x is the first `n_tokens` tokens of the text, and y is the slice of
    the text after x with the next `n_tokens` tokens or fewer. A text with `n_tokens` tokens or
    fewer is skipped, so there may be fewer examples. Lin et al. 2023, appendix B, take the first 50
    tokens and the last 50 tokens of a chunk.

    `tokenizer` is a fast tokenizer of transformers. `runner` reads the passages on workers; if
    None, this process reads them. Equal arguments give equal examples.
    """
    examples = list[tuple[Passage, str, str]]()
    order = np.random.default_rng(seed).permutation(snapshot.n)
    while len(order) and len(examples) < count:
        rows, order = np.split(order, [min(_MAX_BATCH, max(_MIN_BATCH, count - len(examples)))])
        passages = read_passages(snapshot, np.sort(rows).tolist(), runner)
        examples += _iter_splits([passages[row] for row in rows.tolist()], tokenizer, n_tokens)
    return examples[:count]


def _iter_splits(passages: Sequence[Passage], tokenizer: Any, n_tokens: int) -> Iterator[tuple[Passage, str, str]]:
    texts = [passage.text for passage in passages]
    encoding = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False)
    for passage, text, offsets in zip(passages, texts, encoding["offset_mapping"], strict=True):
        ends = [token_end for _, token_end in offsets[: 2 * n_tokens]]
        if len(ends) > n_tokens and text[ends[n_tokens - 1] : ends[-1]].strip():
            yield passage, text[: ends[n_tokens - 1]], text[ends[n_tokens - 1] : ends[-1]]


def passages_overlap(first: Passage, second: Passage) -> bool:
    """Return whether two passages are equal or overlap in the text of the same page."""
    if first.hash == second.hash:
        return True
    word_ends = first.start_word + first.n_words, second.start_word + second.n_words
    shares_words = first.start_word < word_ends[1] and second.start_word < word_ends[0]
    return (first.page_id, first.kind) == (second.page_id, second.kind) and shares_words


@dataclass(frozen=True, slots=True)
class SpanRowsTask(PartTask):
    """A task that lists the passages with a span in the span file of a part."""

    stage: ClassVar[str] = "span-rows"
    code: ClassVar[int] = 1

    def compute(self, store: Store) -> str:
        """Return the hex digits of a bitmap in which the rows with a span are set."""
        span_rows = SpanFile(store.blobs.get_local_path(self.file)).rows
        return np.packbits(np.bincount(span_rows).astype(np.bool_)).tobytes().hex()


class SalientSpans:
    """The salient spans (names and dates) of a snapshot's passages.

    The span file of a part is fetched and memory-mapped when a passage of the part is first read.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        """Check that the snapshot has spans.

        Raises:
            UsageError: the snapshot has no spans.
        """
        self._snapshot, content_files = snapshot, snapshot.manifest.content.files
        self._paths = [spans_path(part.name) for part in snapshot.parts]
        if not {*self._paths} <= {*content_files}:
            raise UsageError(
                f"snapshot {snapshot.id[:12]} has no spans of links and dates: build it with spans "
                "= true in [chunk] "
                'of the recipe, or set masks = "random"'
            )
        self._files: dict[int, SpanFile] = {}
        self._partition = RowPartition(part.rows for part in snapshot.parts)

    def find_rows(self, runner: TaskRunner | None = None) -> Rows:
        """Return the rows of the passages that have a span, ascending.

        `runner` reads the files on workers; if None, this process reads them.
        """
        span_files = [self._snapshot.manifest.content.files[path] for path in self._paths]
        bitmaps = run_tasks(self._snapshot.store, [*map(SpanRowsTask, span_files)], runner)
        masks = (np.unpackbits(np.frombuffer(bytes.fromhex(bitmap), np.uint8)) for bitmap in bitmaps)
        part_rows = [start + np.flatnonzero(mask) for start, mask in zip(self._partition.starts, masks, strict=False)]
        return np.concatenate([np.zeros(0, np.int64), *part_rows])

    def read_spans(self, rows: Sequence[int]) -> list[list[SalientSpan]]:
        """Return the spans of the passages in these rows, in the order of `rows`.

        Raises:
            StoreError: a file is missing or damaged.
        """
        unique_rows = np.unique(np.asarray(rows, np.int64))
        spans_by_row: dict[int, list[SalientSpan]] = {}
        for part_index, span, local_rows in self._partition.split(unique_rows):
            file = self._files.get(part_index) or self._open(part_index)
            part_spans = [file.get_spans(row) for row in local_rows.tolist()]
            spans_by_row |= dict(zip(unique_rows[span].tolist(), part_spans, strict=True))
        return [spans_by_row[row] for row in rows]

    def _open(self, part_index: int) -> SpanFile:
        try:
            self._files[part_index] = SpanFile(self._snapshot.path(self._paths[part_index]))
        except InputError as error:
            raise StoreError(
                f"cannot read the spans of snapshot {self._snapshot.id[:12]} ({error}): run `verify`"
            ) from error
        return self._files[part_index]
