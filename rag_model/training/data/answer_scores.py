"""Score how likely a generator's answer is with each passage, for LM-supervised retrieval.

A generator is identified by the digest of its prompt template, tokenizer and weights, and a block
of examples by the digest of its texts. In the retriever training of RA-DIT (R-ft), these scores
take most of the time.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch

from rag_model.corpus.records import Passage
from rag_model.encoders.spec import RECORD_FILE
from rag_model.errors import InputError
from rag_model.generate.generator import Generator, Targets
from rag_model.generate.likelihood import target_log_p
from rag_model.generate.load import load_generator
from rag_model.generate.prompts import InstructionTemplate, PromptTemplate, template_to_json
from rag_model.generate.transformer import CausalGenerator, TransformersGenerator
from rag_model.process import temporary_folder
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.cache import build_link_tree
from rag_model.store.recorded_tasks import OnProgress, TaskRunner
from rag_model.store.store import Store
from rag_model.training.data.batches import split_batches
from rag_model.training.data.blocks import Files, ScoreBlock, put_blocks, score_blocks

# Examples per block. With 10 passages each, a block takes a generator of 135 million weights one
# minute on one core.
BLOCK_SIZE = 32
PLAIN_TEXT_PROMPT = "Background: {title}\n{text}\n\n{question}"
"""Prompt for plain text. Its first line is from Lin et al. 2023, appendix C."""


@dataclass(frozen=True, slots=True)
class ScoringExample:
    """An input x with an output y, whose likelihood is computed with each of the passages."""

    id: str
    text: str  # x: a question, or the beginning of a text
    answer: str  # y: the answer, or the continuation of the text
    passages: tuple[tuple[str, str], ...]  # (title, text) of one or more passages
    # whether x and y are plain text instead of a question and its answer
    is_plain_text: bool = False


@dataclass(frozen=True, slots=True)
class AnswerScores:
    """The scores that a generator computed for one example."""

    log_p: tuple[float, ...]  # log p_LM(y|c∘x) in nats, one per passage c
    n_tokens: int  # number of tokens of y that are scored


@dataclass(frozen=True, slots=True)
class AnswerBlock(ScoreBlock):
    """A block of examples to score with a generator."""

    stage: ClassVar[str] = "score"
    code: ClassVar[Any] = [1, PLAIN_TEXT_PROMPT]

    def compute(self, store: Store) -> list[list[Any]]:
        """Return (log p per passage, number of scored tokens) for each example.

        Raises:
            InputError: the generator's files are damaged, or a score is not finite.
        """
        generator = load_stored_generator(store.url, self.model, self.dtype, self.cpu)
        scores = [score_example(generator, example) for example in _load_examples(store, self.content)]
        return [[list(example_scores.log_p), example_scores.n_tokens] for example_scores in scores]


def score_answers(
    store: Store,
    generator: Callable[[], TransformersGenerator],
    identity: str,
    examples: Sequence[ScoringExample],
    runner: TaskRunner | None = None,
    on_progress: OnProgress | None = None,
    dtype: str = "float32",
    *,
    cpu: bool = False,
) -> list[AnswerScores]:
    """Return the generator's scores of the answer of each example, in the order of the examples.

    `generator` loads the generator; it is only called if a block is not recorded yet. `identity` is
    the digest of the generator's files. If `runner` is None, this process computes the scores.
    Scores of different dtypes are recorded separately. `cpu` means not to use a GPU.

    Raises:
        InputError: a score is not finite.
    """
    blocks = put_blocks(partial(_put_block, store, identity, dtype, cpu), split_batches(examples, BLOCK_SIZE))
    block_scores = score_blocks(
        store, blocks, lambda: put_generator(store, generator()), runner, on_progress or (lambda _, __: None)
    )
    load_stored_generator.cache_clear()  # This frees the generator if this process computed scores.
    return [AnswerScores(tuple(log_p), n_tokens) for scores in block_scores for log_p, n_tokens in scores]


def put_generator(store: Store, generator: TransformersGenerator) -> Files:
    """Store a generator's weights, tokenizer and prompt; equal generators give equal files."""
    with temporary_folder("generator") as folder:
        generator.module.save_pretrained(folder)
        generator.tokenizer.save_pretrained(folder)
        (folder / RECORD_FILE).write_text(
            json.dumps({"form": template_to_json(generator.prompt_template)}, sort_keys=True)
        )
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        return tuple((path.relative_to(folder).as_posix(), store.blobs.put_file(path)) for path in paths)


@torch.inference_mode()
def score_example(generator: Generator, example: ScoringExample) -> AnswerScores:
    """Score one example. Its passages form one batch, so its scores depend on no other example.

    The end token is scored after an answer, but not after a plain text, because the text goes on.

    Raises:
        InputError: a score is not finite.
    """
    prompted_generator = with_plain_text_prompt(generator) if example.is_plain_text else generator
    passages = [Passage("", "", 0, title, "", text, 0, 0, "") for title, text in example.passages]
    targets = prompted_generator.encode_targets([example.answer])
    target_mask = _exclude_last_token(targets) if example.is_plain_text else targets.mask
    token_log_p, _ = target_log_p(
        prompted_generator.logits(prompted_generator.encode_contexts([example.text], [passages]), targets),
        targets.tokens,
    )
    # (1, k, t) -> (1, k) -> (k,)
    log_p = token_log_p.double().masked_fill(~target_mask[:, None], 0).sum(2)[0]
    if not log_p.isfinite().all():
        raise InputError(
            f"the generator's probability of the answer of example {example.id} is not finite: its "
            "weights are broken, fetch or train it again"
        )
    return AnswerScores(tuple(log_p.tolist()), int(target_mask.sum()))


def with_plain_text_prompt(generator: Any) -> Generator:
    """Return the generator with the prompt for plain text; an encoder-decoder stays unchanged."""
    template: PromptTemplate = generator.prompt_template
    if not isinstance(generator, CausalGenerator) or not isinstance(template, InstructionTemplate):
        unchanged_generator: Generator = generator
        return unchanged_generator
    plain_prompt = InstructionTemplate(
        PLAIN_TEXT_PROMPT, answer_prefix="", max_length=template.max_length, max_answer=template.max_answer
    )
    return replace(generator, prompt_template=plain_prompt)


def _exclude_last_token(targets: Targets) -> torch.Tensor:
    """Return the mask of the targets without the last token of each target."""
    mask = targets.mask.clone()
    last_position = mask.sum(1, keepdim=True) - 1
    return mask.scatter_(1, last_position, value=False)


def _put_block(store: Store, identity: str, dtype: str, cpu: bool, examples: Sequence[ScoringExample]) -> AnswerBlock:
    example_rows = [
        [example.id, example.text, example.answer, example.passages, example.is_plain_text] for example in examples
    ]
    block_ref = store.blobs.put_bytes(json.dumps(example_rows, ensure_ascii=False).encode())
    n_contexts = sum(len(example.passages) for example in examples)
    return AnswerBlock(block_ref, identity, n_contexts, dtype=dtype, cpu=cpu)


def _load_examples(store: Store, blob: BlobRef) -> list[ScoringExample]:
    return [
        ScoringExample(example_id, text, answer, tuple((title, body) for title, body in passages), is_plain_text)
        for example_id, text, answer, passages, is_plain_text in json.loads(store.blobs.read(blob))
    ]


@lru_cache(maxsize=1)  # A worker process loads the generator only once.
def load_stored_generator(store_url: str, files: Files, dtype: str, cpu: bool) -> Generator:
    """Load the generator whose files `put_generator` stored; `cpu` means not to use a GPU."""
    blobs = Store.open(store_url).blobs
    folder = build_link_tree({name: blobs.get_local_path(ref) for name, ref in files})
    return load_generator(folder, device="cpu" if cpu else None, dtype=dtype)
