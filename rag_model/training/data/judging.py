"""Judge passages with a frozen generator, and build the pools of OpenRAG from the verdicts.

A verdict on a passage consists of OpenRAG's RAG label (whether the generator answers right with the
passage) and RAG score (how likely the gold answer is). Judging takes most of the training's time.
Before the training, workers judge blocks of questions (`iter_judged_examples`), and the store
records each block. A judge is also a `PairScorer` that returns two numbers per pair, so that
`CachedPairScorer` can cache its scores during the training.

A question has two pools: the passages with which the generator answers right, and those with which
it answers wrong. They are built before the training, as in the offline part of Zhou and Chen 2025,
"OpenRAG: Optimizing RAG End-to-End via In-Context Retrieval Learning" (arXiv 2503.08398, section
3).
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import islice
from typing import Any, ClassVar, overload

import numpy as np
import numpy.typing as npt
import torch

from rag_model.corpus.records import Passage
from rag_model.digest import digest_json
from rag_model.errors import InputError, RefusedError, UsageError
from rag_model.evaluation.bootstrap import Estimate, estimate_mean
from rag_model.evaluation.matching import AnswerMatcher
from rag_model.generate.decoding import DecodingSettings
from rag_model.generate.generator import Contexts, Generator
from rag_model.generate.likelihood import target_log_p
from rag_model.generate.rag_decoding import decode_sequence
from rag_model.generate.transformer import TransformersGenerator
from rag_model.retrieve.models import PairScorer
from rag_model.store.recorded_tasks import OnProgress, TaskRunner
from rag_model.store.store import Store
from rag_model.training.data.answer_scores import load_stored_generator, put_generator
from rag_model.training.data.batches import split_batches
from rag_model.training.data.blocks import ScoreBlock, score_blocks
from rag_model.training.data.examples import Example, build_passage

# Questions per block. With 100 passages each, a block takes a generator of 135 million weights some
# minutes on one core.
_BLOCK_SIZE = 4
_BATCH_SIZE = 8  # number of passages of one question that a generator judges in one batch
VERSION = 1  # version of the judge; increase it when the same pairs would get different scores
_CHANCE_AGREEMENT = 0.5  # result of `compute_agreement` for random scores
_MIN_QUESTIONS = 5  # A confidence interval over fewer questions is meaningless.


@dataclass(frozen=True, slots=True)
class JudgeSettings:
    """Settings with which a generator answers a question from one passage."""

    # closed set of possible answers, such as labels; empty means free-form answers
    choices: tuple[str, ...] = ()
    max_new_tokens: int = 25  # maximum number of tokens of a free-form answer

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or len(set(self.choices)) != len(self.choices) or len(self.choices) == 1:
            raise UsageError(
                f"max_new_tokens = {self.max_new_tokens} and choices = "
                f"{', '.join(self.choices) or 'none'} of [judge] are invalid: give "
                "max_new_tokens >= 1, and no choices or at least two different ones"
            )


@dataclass(frozen=True, slots=True)
class RagVerdict:
    """The RAG label and the RAG score of one passage for a question, from a generator."""

    # Whether the generated answer contains a gold answer or, with choices, whether the likeliest
    # choice is a gold answer.
    right: bool
    # log p(y|x,z) in nats of the first gold answer or, with choices, of the likeliest gold choice
    log_p: float


# an example, its retrieved passages, and the verdicts on them
JudgedExample = tuple[Example, Sequence[Passage], Sequence[RagVerdict]]


class PassageJudge:
    """Judges passages of questions with a generator; a `PairScorer` with two numbers per pair."""

    def __init__(
        self,
        generator: Generator,
        examples: Sequence[Example],
        settings: JudgeSettings,
        *,
        generates_answers: bool = True,
    ) -> None:
        """Collect the gold answers of `examples`; equal questions share their answers.

        If `generates_answers` is False, the judge computes only log p, which takes one forward pass
        instead of one per token. Then no free-form answer counts as right.

        Raises:
            InputError: an answer is not among the choices.
        """
        self._generator, self._settings, self._generates_answers = generator, settings, generates_answers
        self._gold_answers = collect_gold_answers(examples, settings)

    def compute_identity(self, digest: str) -> str:
        """Return a digest of all inputs that determine a verdict, except the pair itself.

        `digest` identifies the generator. The result also depends on the generator's dtype.
        """
        mode_parts = [] if self._generates_answers else ["log p alone"]
        dtype = getattr(getattr(self._generator, "module", None), "dtype", torch.float32)
        mode_parts += [] if dtype == torch.float32 else [str(dtype)]
        # Models with one end token keep their identity, so that their verdicts are reused.
        if self._generates_answers and not self._settings.choices and len(self._generator.end_tokens) > 1:
            mode_parts.append(f"end tokens {sorted(self._generator.end_tokens)}")
        return digest_json([VERSION, digest, asdict(self._settings), sorted(self._gold_answers.items()), *mode_parts])

    @torch.inference_mode()
    def scores(self, questions: Sequence[str], titles: Sequence[str], texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return (n, 2) float32 verdicts on n pairs: the label (1 if right, else 0) and log p."""
        passages = [[build_passage(*title_and_text)] for title_and_text in zip(titles, texts, strict=True)]
        contexts = self._generator.encode_contexts(list(questions), passages)
        gold_answers = [self._gold_answers[question] for question in questions]
        if self._settings.choices:
            return self._score_choices(contexts, gold_answers)
        answers = self._generate_answers(contexts) if self._generates_answers else [""] * len(gold_answers)
        is_right = [
            AnswerMatcher(example_answers).match(text)
            for example_answers, text in zip(gold_answers, answers, strict=True)
        ]
        log_p = self._compute_log_p(contexts, [example_answers[0] for example_answers in gold_answers])
        return np.stack([np.array(is_right, np.float32), log_p], axis=1)

    def _score_choices(self, contexts: Contexts, gold_answers: Sequence[tuple[str, ...]]) -> npt.NDArray[np.float32]:
        choices = self._settings.choices
        log_p = np.stack(
            [self._compute_log_p(contexts, [choice] * len(gold_answers)) for choice in choices], axis=1
        )  # (n, c)
        is_gold = np.array([[choice in example_answers for choice in choices] for example_answers in gold_answers])
        is_right = is_gold[np.arange(len(gold_answers)), log_p.argmax(1)]
        return np.stack([is_right, np.where(is_gold, log_p, -np.inf).max(1)], axis=1).astype(np.float32)

    def _generate_answers(self, contexts: Contexts) -> list[str]:
        n_pairs = len(contexts.tokens)
        max_tokens = min(self._settings.max_new_tokens, self._generator.max_answer)
        log_prior, decoding = torch.zeros(n_pairs, 1), DecodingSettings(max_new_tokens=max_tokens, mode="fast")
        sequences = decode_sequence(self._generator, contexts, log_prior, decoding, [0] * n_pairs)
        return [self._generator.decode(answer.tokens) for answer in sequences]

    def _compute_log_p(self, contexts: Contexts, answers: Sequence[str]) -> npt.NDArray[np.float32]:
        targets = self._generator.encode_targets(answers)
        # (n, 1, t)
        log_p, _ = target_log_p(self._generator.logits(contexts, targets), targets.tokens)
        answer_log_p = log_p[:, 0].masked_fill(~targets.mask, 0).sum(1)
        scores: npt.NDArray[np.float32] = answer_log_p.float().cpu().numpy()
        return scores


def collect_gold_answers(examples: Sequence[Example], settings: JudgeSettings) -> dict[str, tuple[str, ...]]:
    """Return the gold answers by question; equal questions share their answers.

    Raises:
        InputError: an answer is not among the choices.
    """
    gold_answers: dict[str, tuple[str, ...]] = {}
    for example in examples:
        known_answers = gold_answers.get(example.question, ())
        gold_answers[example.question] = tuple(dict.fromkeys((*known_answers, *example.answers)))
        if settings.choices and not set(example.answers) & set(settings.choices):
            raise InputError(
                f"example {example.id} has the answers {', '.join(example.answers)}, none of which "
                f"is among the choices {', '.join(settings.choices)}: correct the example or the "
                "choices"
            )
    return gold_answers


@dataclass(frozen=True, slots=True)
class JudgeBlock(ScoreBlock):
    """A block of questions whose passages a generator judges."""

    stage: ClassVar[str] = "judge"
    code: ClassVar[Any] = VERSION

    def inputs(self) -> dict[str, Any]:
        """Return all inputs that determine the verdicts, except for rounding."""
        inputs = super(JudgeBlock, self).inputs()  # `super()` without arguments fails with slots.
        return {**inputs, "dtype": self.dtype}

    def compute(self, store: Store) -> list[list[tuple[bool, float]]]:
        """Return for each question the (label, score) of each passage.

        Raises:
            InputError: the generator's files are damaged, or a score is not finite.
        """
        content = json.loads(store.blobs.read(self.content))
        examples = [Example("", question, tuple(answers)) for question, answers, _ in content["questions"]]
        settings = JudgeSettings(**{**content["settings"], "choices": tuple(content["settings"]["choices"])})
        judge = PassageJudge(load_stored_generator(store.url, self.model, self.dtype, self.cpu), examples, settings)
        passage_lists = [[Passage(**fields) for fields in passages] for _, _, passages in content["questions"]]
        return [
            [(verdict.right, verdict.log_p) for verdict in judge_passages(judge, example.question, passages)]
            for example, passages in zip(examples, passage_lists, strict=True)
        ]


def iter_judged_examples(
    store: Store,
    passage_lists: Iterable[tuple[Example, Sequence[Passage]]],
    gold_answers: Mapping[str, tuple[str, ...]],
    settings: JudgeSettings,
    generator: Callable[[], TransformersGenerator],
    create_block: Callable[..., JudgeBlock],
    runner: TaskRunner | None = None,
    on_progress: OnProgress = lambda _, __: None,
) -> Iterator[JudgedExample]:
    """Yield each example with its passages and a generator's verdicts on these passages.

    Only the passages of one block are in memory at a time.

    Args:
        store: store for the blocks and the verdicts.
        passage_lists: the examples with their passages.
        gold_answers: the gold answers by question.
        settings: settings of the judge.
        generator: loads the generator; only called if a block is not recorded yet.
        create_block: creates a block from its `content` and its number of `contexts`.
        runner: runs the blocks on workers; if None, this process runs them.
        on_progress: called with the number of judged questions and the number of all questions.

    Raises:
        InputError: a score is not finite.
    """
    examples, blocks, remaining_pairs = list[Example](), list[JudgeBlock](), iter(passage_lists)
    while pairs := list(islice(remaining_pairs, _BLOCK_SIZE)):
        question_rows = [
            [example.question, gold_answers[example.question], [*map(asdict, passages)]] for example, passages in pairs
        ]
        block_content = {"settings": asdict(settings), "questions": question_rows}
        blob = store.blobs.put_bytes(json.dumps(block_content, ensure_ascii=False).encode())
        # The generator reads each passage twice: to generate an answer and to score a gold answer.
        n_contexts = 2 * sum(len(passages) for _, passages in pairs)
        blocks.append(create_block(content=blob, contexts=n_contexts))
        examples += [example for example, _ in pairs]

    def report(n_finished: int, _: int) -> None:
        on_progress(min(n_finished * _BLOCK_SIZE, len(examples)), len(examples))

    verdicts_by_block = score_blocks(store, blocks, lambda: put_generator(store, generator()), runner, report)
    load_stored_generator.cache_clear()  # This frees the generator if this process ran the blocks.
    remaining_examples = iter(examples)
    for task, block_verdicts in zip(blocks, verdicts_by_block, strict=True):
        question_rows = json.loads(store.blobs.read(task.content))["questions"]
        for (_, _, passages), verdicts in zip(question_rows, block_verdicts, strict=True):
            judged_passages = [Passage(**passage_fields) for passage_fields in passages]
            yield next(remaining_examples), judged_passages, [RagVerdict(*verdict) for verdict in verdicts]


def judge_passages(judge: PairScorer, question: str, passages: Sequence[Passage]) -> list[RagVerdict]:
    """Return the judge's verdict on each of the passages for a question.

    Raises:
        InputError: a score is not finite.
    """
    return judge_pairs(judge, [(question, passage) for passage in passages], _BATCH_SIZE)


def judge_pairs(judge: PairScorer, pairs: Sequence[tuple[str, Passage]], batch_size: int) -> list[RagVerdict]:
    """Return the judge's verdicts on pairs of a question and a passage, `batch_size` at a time.

    Raises:
        InputError: a score is not finite.
    """
    verdicts = list[RagVerdict]()
    for batch in split_batches(pairs, batch_size):
        questions, passages = zip(*batch, strict=True)
        scores = judge.scores(
            list(questions), [passage.title for passage in passages], [passage.text for passage in passages]
        )
        for question, score in zip(questions, scores, strict=True):
            if not np.isfinite(score).all():
                raise InputError(f"the generator's score of question {question!r} is not finite: fetch the model again")
        verdicts += [RagVerdict(bool(is_right), float(log_p)) for is_right, log_p in scores]
    return verdicts


@dataclass(frozen=True, slots=True)
class PooledExample(Example):
    """A question with two pools, `positives` and `negatives`, each sorted by descending log p."""

    best_negative_log_p: float = 0.0  # largest log p of the gold answer with any negative
    worst_positive_log_p: float = 0.0  # smallest log p of the gold answer with any positive


@dataclass(frozen=True, slots=True)
class ExamplePools(Sequence[Example]):
    """The questions whose pools are not empty, in order, and the counts of all other questions."""

    examples: tuple[PooledExample, ...]
    all_right: int  # number of questions that are answered right with every passage
    all_wrong: int  # number of questions that are answered wrong with every passage
    agreement: Estimate  # mean of `compute_agreement` over the questions

    @overload
    def __getitem__(self, index: int) -> PooledExample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PooledExample]: ...
    def __getitem__(self, index: int | slice) -> PooledExample | Sequence[PooledExample]:
        """Return the example at an index, or the examples of a slice."""
        return self.examples[index]

    def __len__(self) -> int:
        """Return the number of questions whose pools are not empty."""
        return len(self.examples)


def build_pooled_example(
    example: Example, passages: Sequence[Passage], verdicts: Sequence[RagVerdict], pool_size: int
) -> PooledExample | None:
    """Return an example with pools of up to `pool_size` passages each; None if a pool is empty."""
    ranked_pairs = sorted(zip(verdicts, passages, strict=True), key=lambda pair: -pair[0].log_p)
    right_pairs, wrong_pairs = ([pair for pair in ranked_pairs if pair[0].right is right] for right in (True, False))
    if not right_pairs or not wrong_pairs:
        return None
    example_fields = {field.name: getattr(example, field.name) for field in fields(Example)}
    passage_pools = {
        name: tuple(passage for _, passage in pairs[:pool_size])
        for name, pairs in (("positives", right_pairs), ("negatives", wrong_pairs))
    }
    return PooledExample(
        **{**example_fields, **passage_pools},
        best_negative_log_p=wrong_pairs[0][0].log_p,
        worst_positive_log_p=right_pairs[-1][0].log_p,
    )


def compute_agreement(verdicts: Sequence[RagVerdict]) -> float:
    """Return the share of (right, wrong) pairs of passages in which the right passage scores
    higher.

    Equal scores count half. This is the area under the ROC curve; random scores give 0.5. There
    must be at least one right and one wrong passage.
    """
    right_scores, wrong_scores = (
        np.array([verdict.log_p for verdict in verdicts if verdict.right is is_right]) for is_right in (True, False)
    )
    roc_area = (right_scores[:, None] > wrong_scores).mean() + (right_scores[:, None] == wrong_scores).mean() / 2
    return float(roc_area)


def build_pools(judged_examples: Iterable[JudgedExample], pool_size: int) -> ExamplePools:
    """Build the pools of judged examples, in order, with up to `pool_size` passages per pool.

    Raises:
        InputError: every question has an empty pool.
    """
    pooled_examples, agreements, n_right, n_wrong = list[PooledExample](), list[float](), 0, 0
    for example, passages, verdicts in judged_examples:
        pooled_example = build_pooled_example(example, passages, verdicts, pool_size)
        if pooled_example is not None:
            pooled_examples.append(pooled_example)
            agreements.append(compute_agreement(verdicts))
        elif verdicts and verdicts[0].right:
            n_right += 1
        else:
            n_wrong += 1
    if not pooled_examples:
        raise InputError(
            f"none of {n_right + n_wrong:,} questions has a passage with which the generator "
            f"answers right and one with which it answers wrong ({n_right:,} are all right, "
            f"{n_wrong:,} all wrong): use another generator, more passages per question, or "
            "other examples"
        )
    return ExamplePools(tuple(pooled_examples), n_right, n_wrong, estimate_mean(agreements))


def check_agreement(pools: ExamplePools) -> None:
    """Check that the score, which alone the training uses, agrees with the label.

    Raises:
        RefusedError: these questions do not show an agreement above chance.
    """
    agreement = pools.agreement
    if agreement.n < _MIN_QUESTIONS or not agreement.low > _CHANCE_AGREEMENT:
        raise RefusedError(
            "the generator's score does not separate right passages from wrong ones (area under "
            f"the ROC curve {agreement}, over {agreement.n:,} questions; chance is "
            f"{_CHANCE_AGREEMENT}): use another generator or more examples, or give the choices of "
            "a closed set"
        )
