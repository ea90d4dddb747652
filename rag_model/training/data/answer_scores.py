"""How likely a generator finds an answer after each of an example's passages: the cost of LM-supervised retrieval.

A generator is known by the digest of its form, tokenizer and weights, and a block of examples by that of its texts.
"""

import json
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from rag_model.corpus.records import Passage
from rag_model.encoders.spec import RECORD_FILE
from rag_model.errors import InputError
from rag_model.generate.causal import CausalGenerator
from rag_model.generate.folder import Kept
from rag_model.generate.generator import Generator, Targets
from rag_model.generate.inputs import Form, PromptForm, form_to_json
from rag_model.generate.likelihood import target_log_p
from rag_model.generate.load import load_generator
from rag_model.store.objects.blobs import BlobRef
from rag_model.store.objects.trees import linked_tree
from rag_model.store.store import Store
from rag_model.training.data.blocks import Block, Files, Scorer, score_blocks
from rag_model.training.data.teaching import Tell

BLOCK = 32  # examples of a task: with 10 passages each, a minute of a core with a generator of 135 million weights
TEXT = "Background: {title}\n{text}\n\n{question}"
"""How a passage stands before plain text: Lin et al. 2023, appendix C, `Background: {passage}`, an empty line."""
_THREADS = 32  # blocks put at a time


@dataclass(frozen=True, slots=True)
class Reading:
    """An input x and its output y, to be scored after each of its passages."""

    id: str
    text: str  # x: a question, or the beginning of a text
    answer: str  # y
    passages: tuple[tuple[str, str], ...]  # titles and texts; one or more
    plain: bool = False  # x and y are a text, not a question and its answer


@dataclass(frozen=True, slots=True)
class Scores:
    """What a generator says of one example."""

    log_p: tuple[float, ...]  # log p_LM(y|c∘x) in nats, by passage
    tokens: int  # of y that count


@dataclass(frozen=True, slots=True)
class AnswerBlock(Block):
    """A block of examples, and the generator that scores them."""

    stage: ClassVar[str] = "score"
    code: ClassVar[Any] = [1, TEXT]

    def scored(self, store: Store) -> list[list[Any]]:
        """Return log p by passage, and the number of tokens, of each example.

        Raises:
            InputError: the generator's files are damaged, or a score is not finite.
        """
        generator = _generator(store.url, self.model)
        found = [score_one(generator, one) for one in _readings(store, self.content)]
        return [[list(one.log_p), one.tokens] for one in found]


def score_all(
    store: Store,
    generator: Callable[[], Kept],
    identity: str,
    readings: Sequence[Reading],
    scorer: Scorer | None = None,
    tell: Tell | None = None,
) -> list[Scores]:
    """Score examples after their passages with a generator, in order.

    `generator` loads it and is called if a block is not recorded yet; `identity` is the digest of its files. `scorer`:
    by default this process scores.

    Raises:
        InputError: a score is not finite.
    """
    some = [readings[start : start + BLOCK] for start in range(0, len(readings), BLOCK)]
    with ThreadPoolExecutor(_THREADS) as threads:  # on an object store this is mostly waiting
        blocks = list(threads.map(partial(_block, store, identity), some))
    told = score_blocks(store, blocks, lambda: put_generator(store, generator()), scorer, tell or (lambda _, __: None))
    _generator.cache_clear()  # this process may have done a small job itself
    return [Scores(tuple(log_p), tokens) for scores in told for log_p, tokens in scores]


def put_generator(store: Store, generator: Kept) -> Files:
    """Store a generator's weights, tokenizer and form as files; equal generators give equal files."""
    with tempfile.TemporaryDirectory(prefix="bookwheel-generator-") as name:
        folder = Path(name)
        generator.module.save_pretrained(name)
        generator.tokenizer.save_pretrained(name)
        (folder / RECORD_FILE).write_text(json.dumps({"form": form_to_json(generator.form)}, sort_keys=True))
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        return tuple((path.relative_to(folder).as_posix(), store.blobs.put_file(path)) for path in paths)


@torch.inference_mode()
def score_one(generator: Generator, reading: Reading) -> Scores:
    """Score one example: its passages are one batch, so that scores do not depend on other examples.

    The end of an answer counts; that of a plain text does not, because the text goes on.

    Raises:
        InputError: a score is not finite.
    """
    reads = reading_text(generator) if reading.plain else generator
    passages = [Passage("", "", 0, title, "", text, 0, 0, "") for title, text in reading.passages]
    targets = reads.targets([reading.answer])
    counted = _without_end(targets) if reading.plain else targets.mask
    found, _ = target_log_p(reads.logits(reads.contexts([reading.text], [passages]), targets), targets.tokens)
    log_p = found.double().masked_fill(~counted[:, None], 0).sum(2)[0]  # (1, k, t) -> (1, k) -> (k,)
    if not log_p.isfinite().all():
        raise InputError(
            f"the generator gave the answer of example {reading.id} a probability that is not finite: its weights are "
            "broken, fetch or train it again"
        )
    return Scores(tuple(log_p.tolist()), int(counted.sum()))


def reading_text(generator: Any) -> Generator:
    """Return a generator that goes on with a text after a passage; an encoder-decoder has one form for all."""
    form: Form = generator.form
    if not isinstance(generator, CausalGenerator) or not isinstance(form, PromptForm):
        reads: Generator = generator
        return reads
    plain = PromptForm(TEXT, answer_prefix="", max_length=form.max_length, max_answer=form.max_answer)
    return replace(generator, form=plain)


def _without_end(targets: Targets) -> torch.Tensor:
    """Return the mask without each target's last token."""
    counted = targets.mask.clone()
    last = counted.sum(1, keepdim=True) - 1
    return counted.scatter_(1, last, value=False)


def _block(store: Store, identity: str, some: Sequence[Reading]) -> AnswerBlock:
    values = [[one.id, one.text, one.answer, one.passages, one.plain] for one in some]
    blob = store.blobs.put_bytes(json.dumps(values, ensure_ascii=False).encode())
    return AnswerBlock(blob, identity, sum(len(one.passages) for one in some))


def _readings(store: Store, blob: BlobRef) -> list[Reading]:
    return [
        Reading(identity, text, answer, tuple((title, body) for title, body in passages), plain)
        for identity, text, answer, passages, plain in json.loads(store.blobs.read(blob))
    ]


@lru_cache(maxsize=1)  # a worker loads the generator once
def _generator(store_url: str, files: Files) -> Generator:
    blobs = Store.open(store_url).blobs
    return load_generator(linked_tree({name: blobs.local(ref) for name, ref in files}))
