"""What a frozen generator makes of a passage: whether it answers right with it, and how likely the gold answer is.

OpenRAG's RAG label and RAG score (arXiv 2503.08398). A judge is a `PairScorer` with two numbers a pair, so `KeptScores`
keeps what it says: judging is the cost of the training.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import torch

from rag_model.corpus.records import Passage
from rag_model.digest import digest_json
from rag_model.errors import InputError, UsageError
from rag_model.evaluation.questions.match import Answers
from rag_model.generate.decoding import Decoding
from rag_model.generate.generator import Contexts, Generator
from rag_model.generate.likelihood import target_log_p
from rag_model.generate.sequence_beam import decode_sequence
from rag_model.retrieve.rerank import PairScorer
from rag_model.training.data.examples import Example, passage_of

VERSION = 1  # increased when the same pairs would be judged otherwise


@dataclass(frozen=True, slots=True)
class JudgeSettings:
    """How a generator reads a question with one passage."""

    choices: tuple[str, ...] = ()  # the answers among which it chooses, such as labels; none: it writes freely
    max_new_tokens: int = 25  # of an answer that it writes

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or len(set(self.choices)) != len(self.choices) or len(self.choices) == 1:
            raise UsageError(
                f"max_new_tokens {self.max_new_tokens} and choices {', '.join(self.choices) or 'none'} of a judge: use "
                "1 token or more, and no choices or at least two different ones"
            )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a generator makes of a question with one passage."""

    right: bool  # the answer that it writes holds a gold one; of choices: the likeliest is gold
    log_p: float  # log p(y|x,z) of the first gold answer, in nats; of choices: of the likeliest gold one


class Judge:
    """Reads questions with passages; a `PairScorer` with two numbers a pair."""

    def __init__(
        self, generator: Generator, examples: Sequence[Example], settings: JudgeSettings, *, writes: bool = True
    ) -> None:
        """Take the gold answers of `examples`; questions that are asked twice share theirs.

        `writes`: without it the generator writes nothing, and no free answer is right: for who needs log p alone,
        which costs one pass and not one a token.

        Raises:
            InputError: an answer is not among the choices.
        """
        self._generator, self._settings, self._writes = generator, settings, writes
        self._golds: dict[str, tuple[str, ...]] = {}
        for one in examples:
            self._golds[one.question] = tuple(dict.fromkeys((*self._golds.get(one.question, ()), *one.answers)))
            if settings.choices and not set(one.answers) & set(settings.choices):
                raise InputError(
                    f"example {one.id} has the answers {', '.join(one.answers)}, and the choices are "
                    f"{', '.join(settings.choices)}: correct either"
                )

    def identity(self, digest: str) -> str:
        """Return the digest of all that decides a verdict but the pair; `digest` is of the generator's files."""
        silent = [] if self._writes else ["log p alone"]
        return digest_json([VERSION, digest, asdict(self._settings), sorted(self._golds.items()), *silent])

    @torch.inference_mode()
    def scores(self, questions: Sequence[str], titles: Sequence[str], texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return the (n, 2) verdicts of n pairs, in order: 1 if the answer is right, and its log p."""
        passages = [[passage_of(*both)] for both in zip(titles, texts, strict=True)]
        contexts = self._generator.contexts(list(questions), passages)
        golds = [self._golds[question] for question in questions]
        if self._settings.choices:
            return self._chosen(contexts, golds)
        said = self._written(contexts) if self._writes else [""] * len(golds)
        right = [Answers(own).are_in(text) for own, text in zip(golds, said, strict=True)]
        log_p = self._log_p(contexts, [own[0] for own in golds])
        return np.stack([np.array(right, np.float32), log_p], axis=1)

    def _chosen(self, contexts: Contexts, golds: Sequence[tuple[str, ...]]) -> npt.NDArray[np.float32]:
        choices = self._settings.choices
        log_p = np.stack([self._log_p(contexts, [choice] * len(golds)) for choice in choices], axis=1)  # (n, c)
        gold = np.array([[choice in own for choice in choices] for own in golds])
        right = gold[np.arange(len(golds)), log_p.argmax(1)]
        return np.stack([right, np.where(gold, log_p, -np.inf).max(1)], axis=1).astype(np.float32)

    def _written(self, contexts: Contexts) -> list[str]:
        count = len(contexts.tokens)
        most = min(self._settings.max_new_tokens, self._generator.max_answer)
        prior, decoding = torch.zeros(count, 1), Decoding(max_new_tokens=most, mode="fast")
        decoded = decode_sequence(self._generator, contexts, prior, decoding, [0] * count)
        return [self._generator.text(one.tokens) for one in decoded]

    def _log_p(self, contexts: Contexts, answers: Sequence[str]) -> npt.NDArray[np.float32]:
        targets = self._generator.targets(answers)
        log_p, _ = target_log_p(self._generator.logits(contexts, targets), targets.tokens)  # (n, 1, t)
        totals = log_p[:, 0].masked_fill(~targets.mask, 0).sum(1)
        found: npt.NDArray[np.float32] = totals.float().cpu().numpy()
        return found


def verdicts(judge: PairScorer, question: str, passages: Sequence[Passage]) -> list[Verdict]:
    """Return what a judge makes of a question with each of some passages.

    Raises:
        InputError: a score is not finite.
    """
    if not passages:
        return []
    told = judge.scores([question] * len(passages), [one.title for one in passages], [one.text for one in passages])
    if not np.isfinite(told).all():
        raise InputError(
            f"the generator gave {question!r} a score that is not finite: its model is broken, fetch it again"
        )
    return [Verdict(bool(right), float(log_p)) for right, log_p in told]
