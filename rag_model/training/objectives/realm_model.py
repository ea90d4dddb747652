"""The parts of REALM: masking, candidates, the marginal likelihood, and the model.

x is a text with masks, y are the masked wordpieces, and z is one of the candidate passages: p(y|x)
= sum_z p(z|x) p(y|z,x) (Guu et al. 2020, section 3.1). Salient span masking (section 3.4) masks one
whole name or date, so that world knowledge is needed to predict it, and the sentence alone does not
suffice. Random masks are single wordpieces, as in BERT.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch import Tensor, nn

from rag_model.corpus.records import Passage
from rag_model.encoders.encoder import Vectors
from rag_model.encoders.masked_lm import MASK_TOKENS, MaskedInput, MaskedLMTokenizer, TrainableMaskedLM
from rag_model.encoders.space import Space
from rag_model.store.versions.model_manifest import MASKED_LM
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.examples import deduplicate_passages
from rag_model.training.data.memory import PassageMemory
from rag_model.training.data.texts import passages_overlap
from rag_model.training.objectives.losses import mean_over_processes
from rag_model.training.objectives.task_bases import BiEncoder

if TYPE_CHECKING:
    from tokenizers import Encoding
from typing import Literal

Span = tuple[int, int]  # (start, end) of characters in a text
_WORDS = re.compile(r"\w+")
# Number of wordpieces on each side of a mask. Two texts have so many in common only if one is a
# copy of the other.
_CLUE_SIZE = 8
NULL = Passage("null", "null", 0, "", "", "", 0, 0, Passage.hash_of("", ""))
"""The empty null passage, for masks that need no retrieval (Guu et al. 2020)."""
# number of candidates per text beyond the needed ones, because the source passage and its copies
# are removed
_EXTRA_CANDIDATES = 8
Marginal = Literal["sequence", "token"]


@dataclass(frozen=True, slots=True)
class MaskedText:
    """A text x with masks, and the masked wordpieces y."""

    # for each run of masks, the masked words and the words around them; see `extract_words`
    clues: tuple[str, ...]
    question: str  # the text with masks, for a question encoder
    ids: tuple[int, ...]  # ids of the text with masks, without special tokens
    # ascending positions of the masks in `ids`; empty if the text has no wordpiece
    positions: tuple[int, ...]
    targets: tuple[int, ...]  # ids of the masked wordpieces


@dataclass(frozen=True, slots=True)
class MaskingLimits:
    """Limits of the window that is cut from a text, and of the masks in it."""

    window: int  # maximum number of wordpieces in the window
    max_masks: int  # maximum number of masked wordpieces
    share: float  # share of the wordpieces in the window that random masks cover


def mask_text(
    text: str,
    encoding: "Encoding",
    spans: Sequence[Span] | None,
    rng: random.Random,
    tokenizer: MaskedLMTokenizer,
    limits: MaskingLimits,
) -> MaskedText:
    """Mask wordpieces of a text, and cut the text to a window around the masks.

    One of the `spans` is drawn and masked. A span of more than `max_masks` wordpieces is drawn only
    if there are no shorter spans, and only its beginning is masked. If `spans` is None, a share of
    the wordpieces in the window is masked, but at least one.
    """
    n_pieces, window, max_masks = len(encoding.ids), limits.window, limits.max_masks
    masks = _choose_span(encoding, spans, rng, max_masks) if spans is not None else []
    start = _find_window_start(masks, n_pieces, window) if masks else rng.randint(0, max(0, n_pieces - window))
    end = min(start + window, n_pieces)
    if spans is None:
        n_masks = min(max_masks, max(1, round(limits.share * (end - start))), end - start)
        masks = sorted(rng.sample(range(start, end), n_masks))
    return _build_masked_text(text, encoding, (start, end), [i for i in masks if start <= i < end], tokenizer)


def extract_words(text: str) -> str:
    """Return the lower-case words of a text, separated by spaces, for comparisons of texts."""
    return " ".join(_WORDS.findall(text.casefold()))


def _choose_span(encoding: "Encoding", spans: Sequence[Span], rng: random.Random, max_masks: int) -> list[int]:
    """Draw one of the spans, and return the positions of the wordpieces in it."""
    piece_lists = [
        [
            position
            for position, (piece_start, piece_end) in enumerate(encoding.offsets)
            if piece_start < span[1] and span[0] < piece_end
        ]
        for span in spans
    ]
    nonempty_pieces = [piece_list for piece_list in piece_lists if piece_list]
    maskable_pieces = [piece_list for piece_list in nonempty_pieces if len(piece_list) <= max_masks] or nonempty_pieces
    return rng.choice(maskable_pieces)[:max_masks] if maskable_pieces else []


def _find_window_start(masks: Sequence[int], n_pieces: int, window: int) -> int:
    """Return the start of a window that has the masks in its middle, unless the text ends there."""
    middle = (masks[0] + masks[-1]) // 2
    return max(0, min(middle - window // 2, n_pieces - window))


def _build_masked_text(
    text: str, encoding: "Encoding", window: Span, masks: Sequence[int], tokenizer: MaskedLMTokenizer
) -> MaskedText:
    window_start, window_end = window
    if window_start >= window_end:
        return MaskedText((), text, (), (), ())
    token_ids = list(encoding.ids[window_start:window_end])
    targets = tuple(encoding.ids[mask] for mask in masks)
    for mask in masks:
        token_ids[mask - window_start] = tokenizer.mask_id
    question_parts, text_offset = [], encoding.offsets[window_start][0]
    for mask in masks:
        piece_start, piece_end = encoding.offsets[mask]
        question_parts += [text[text_offset:piece_start], f" {tokenizer.mask_token} "]
        text_offset = piece_end
    question_parts.append(text[text_offset : encoding.offsets[window_end - 1][1]])
    masked_question = " ".join("".join(question_parts).split())
    clues = _find_clues(text, encoding, masks)
    return MaskedText(clues, masked_question, tuple(token_ids), tuple(mask - window_start for mask in masks), targets)


def _find_clues(text: str, encoding: "Encoding", masks: Sequence[int]) -> tuple[str, ...]:
    """Return the words around each run of masks; a passage that contains them reveals the masks."""
    mask_runs: list[list[int]] = []
    for mask in masks:
        if mask_runs and mask == mask_runs[-1][-1] + 1:
            mask_runs[-1].append(mask)
        else:
            mask_runs.append([mask])
    clues = []
    for run in mask_runs:
        start, end = max(0, run[0] - _CLUE_SIZE), min(len(encoding.ids), run[-1] + 1 + _CLUE_SIZE)
        clues.append(extract_words(text[encoding.offsets[start][0] : encoding.offsets[end - 1][1]]))
    return tuple(dict.fromkeys(clue for clue in clues if clue))


@dataclass(frozen=True, slots=True)
class CandidatePassages:
    """The candidates of b texts: up to c passages per text, with the null passage first."""

    passages: list[list[Passage]]  # fewer than c passages per text in a small corpus
    width: int  # c, the maximum number of passages per text

    @property
    def mask(self) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
        """A (b, c) bool mask that says where there is a candidate."""
        lengths = np.array([len(passages) for passages in self.passages])
        return np.arange(self.width) < lengths[:, None]  # (c,) < (b, 1) -> (b, c)


class CandidateRetriever:
    """Retrieves candidates from one snapshot."""

    def __init__(self, snapshot: Snapshot, retriever: str | None, n_candidates: int) -> None:
        """Open a retriever for `n_candidates` passages per text, including the null passage.

        Raises:
            UsageError: the retriever expression is wrong, or the metric of an index is not the
                inner product.
        """
        self.snapshot, self._width = snapshot, n_candidates
        self._memory = PassageMemory(snapshot, None, retriever)

    def retrieve(self, rows: Sequence[int], texts: Sequence[MaskedText], query_vectors: Vectors) -> CandidatePassages:
        """Return the candidates of the texts in these rows; `query_vectors` is (b, d) float32.

        The source passage of a text and passages with the words around a mask, such as copies and
        overlapping passages, are removed, because they reveal the masked words. Of equal passages,
        only one is used.
        """
        retrieved_hits = self._memory.retrieve(
            [text.question for text in texts], query_vectors, self._width - 1 + _EXTRA_CANDIDATES
        )
        candidate_lists = []
        for source, text, hits in zip(self.snapshot.passages(list(rows)), texts, retrieved_hits.hits, strict=True):
            passage_by_hash = {
                hit.passage.hash: hit.passage for hit in hits if not _reveals_masks(hit.passage, source, text)
            }
            candidate_lists.append([NULL, *list(passage_by_hash.values())[: self._width - 1]])
        return CandidatePassages(candidate_lists, self._width)


def _reveals_masks(passage: Passage, source: Passage, text: MaskedText) -> bool:
    passage_words = extract_words(passage.text)
    return passages_overlap(source, passage) or any(clue in passage_words for clue in text.clues)


def compute_log_prior(scores: Tensor, mask: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the (b, c) float32 log p(z|x), the log-softmax of candidate scores (section 3.2).

    `scores` (b, c) are inner products; `mask` (b, c) bool has one candidate or more per text. The
    result is -inf where the mask is False.
    """
    with torch.autocast(scores.device.type, enabled=False):
        scaled_scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) / temperature
        return scaled_scores.masked_fill(~mask, -torch.inf).log_softmax(1)


def compute_log_marginal(log_prior: Tensor, log_p: Tensor, marginal: Marginal) -> Tensor:
    """Return the (b,) log p(y|x) of all masked tokens of each text.

    * `sequence`, as in the paper: log sum_z p(z|x) prod_j p(y_j|z,x); one passage explains all
      masks.
    * `token`, as in the authors' code: sum_j log sum_z p(z|x) p(y_j|z,x); each mask has its own
      sum.

    If a text has one mask, the two are equal. `compute_nll` averages `sequence` over texts, and
    `token` over masks.

    `log_prior` (b, c) is -inf where there is no candidate. `log_p` (b, c, m) is log p(y_j|z,x). It
    is 0 where there is no mask, so that the sum over z is 1 and its logarithm adds 0.
    """
    if marginal == "sequence":
        return (log_prior + log_p.sum(2)).logsumexp(1)  # (b, c) -> (b,)
    return (log_prior[:, :, None] + log_p).logsumexp(1).sum(1)  # (b, c, m) -> (b, m) -> (b,)


def compute_nll(log_y: Tensor, n_masks: int, marginal: Marginal) -> Tensor:
    """Return the loss of a batch: the mean of -log p(y|x) over the texts or masks of all processes.

    `sequence` averages over the texts, as the expectation over x in the paper. `token` averages
    over the masks of the batch, as the authors' code does (google-research/language,
    language/realm/model.py: `reduce_sum(log_p * mlm_weights) / reduce_sum(mlm_weights)`).

    `log_y` (b,) is the result of `compute_log_marginal`; `n_masks` is the number of masks in the
    b texts.
    """
    return mean_over_processes(-log_y.sum(), len(log_y) if marginal == "sequence" else n_masks)


def compute_utility(log_y: Tensor, log_p: Tensor) -> Tensor:
    """Return the (b,) retrieval utility, log p(y|x) - log p(y|x, null), in nats.

    A value above 0 means that the retrieved passages help. Guu et al. 2020 define the utility for
    one passage z; here it is defined for the marginal likelihood. `log_y` (b,) is the result of
    `compute_log_marginal`; `log_p` (b, c, m) has the null passage first.
    """
    return log_y - log_p[:, 0].sum(1)  # (b, m) -> (b,)


class Realm(nn.Module):
    """The model of REALM: a bi-encoder, and a masked language model that reads text and passage.

    The masked language model is called the reader.
    """

    def __init__(self, encoders: BiEncoder, reader: TrainableMaskedLM, *, frozen: bool = False) -> None:
        """Combine encoders and reader; if `frozen` is True, the encoders are not trained."""
        super().__init__()
        self.encoders, self.reader, self.frozen = encoders, reader, frozen
        if frozen:
            encoders.requires_grad_(False)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the module; frozen encoders stay in `eval` mode, without dropout."""
        super().train(mode)
        if self.frozen:
            self.encoders.eval()
        return self

    def embed_texts(self, texts: Sequence[MaskedText]) -> Tensor:
        """Return the (b, d) float32 vectors of masked texts, with a gradient."""
        encoder_mask = next(
            (
                mask_token
                for mask_token in MASK_TOKENS
                if self.encoders.question.tokenizer.token_to_id(mask_token) is not None
            ),
            "",
        )
        return self.encoders.embed_questions(
            [text.question.replace(self.reader.tokenizer.mask_token, encoder_mask) for text in texts]
        )

    def scores(self, query_vectors: Tensor, candidates: CandidatePassages) -> Tensor:
        """Return the (b, c) inner products of (b, d) query vectors with their candidates.

        The current passage encoder encodes each passage of the batch once. Where there is no
        candidate, the result is arbitrary.
        """
        unique_passages, row_by_hash = deduplicate_passages(candidates.passages)
        passage_vectors = self.encoders.embed_passages(unique_passages)  # (u, d)
        vector_rows = torch.tensor(
            [
                [row_by_hash[passage.hash] for passage in passages] + [0] * (candidates.width - len(passages))
                for passages in candidates.passages
            ],
            device=passage_vectors.device,
        )
        with torch.autocast(passage_vectors.device.type, enabled=False):
            # (b, c, d) * (b, 1, d) -> (b, c)
            return (passage_vectors[vector_rows].to(query_vectors) * query_vectors[:, None]).sum(-1)

    def compute_log_p(
        self, texts: Sequence[MaskedText], candidates: CandidatePassages, max_passage_pieces: int
    ) -> Tensor:
        """Return the (b, c, m) log p(y_j|z,x) of masked wordpieces; 0 without a mask or candidate.

        The reader's input is `[CLS] x [SEP] z [SEP]`, where z is the text of the passage without
        the title (Guu et al. 2020, section 3.2), cut to `max_passage_pieces` wordpieces.
        `CandidateRetriever`, too, looks for the masked words only in texts, not in titles. Inputs
        with the null passage are a separate batch, because they are a quarter as long.
        """
        passage_pieces = self._tokenize_passages(candidates, max_passage_pieces)
        null_inputs = [self._join_pair(text, ()) for text in texts]
        candidate_inputs = [
            (row, column, self._join_pair(text, passage_pieces[passage.hash]))
            for row, (text, passages) in enumerate(zip(texts, candidates.passages, strict=True))
            for column, passage in enumerate(passages)
            if column
        ]
        token_log_p: Tensor = self.reader(
            null_inputs, [joined_text for _, _, joined_text in candidate_inputs]
        )  # (b + k, m)
        input_rows = [*range(len(texts)), *(row for row, _, _ in candidate_inputs)]
        input_columns = [0] * len(texts) + [column for _, column, _ in candidate_inputs]
        # (b, c, m)
        log_p = token_log_p.new_zeros(len(texts), candidates.width, token_log_p.shape[1])
        log_p[input_rows, input_columns] = token_log_p
        return log_p

    def save(self, folder: Path) -> Space:
        """Write `question/`, `passage/` and `masked-lm/`; return the space of the passages."""
        self.reader.save(folder / MASKED_LM)
        return self.encoders.save(folder)

    def _tokenize_passages(self, candidates: CandidatePassages, max_pieces: int) -> dict[str, list[int]]:
        """Return the first `max_pieces` wordpieces of the text of each passage, by passage hash."""
        texts_by_hash = {passage.hash: passage.text for passages in candidates.passages for passage in passages}
        encodings = self.reader.tokenizer.tokenize(list(texts_by_hash.values()))
        return {digest: encoding.ids[:max_pieces] for digest, encoding in zip(texts_by_hash, encodings, strict=True)}

    def _join_pair(self, text: MaskedText, passage: Sequence[int]) -> MaskedInput:
        tokenizer = self.reader.tokenizer
        capacity = max(0, tokenizer.max_tokens - tokenizer.template.size - len(text.ids))
        ids, type_ids = tokenizer.join_pair(text.ids, passage[:capacity])
        prefix_length = len(tokenizer.template.prefix)
        return MaskedInput(ids, type_ids, [prefix_length + position for position in text.positions], text.targets)
