"""How likely a generator finds an answer after each of an example's passages: the cost of LM-supervised retrieval.

Examples are scored in blocks, each a task for a worker, and recorded in the store's memo by the digest of the generator
(form and tokenizer included) and the block's texts. A run that resumes, or a second one, scores no block twice, and
does not load the generator if there is nothing to score.
"""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

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
from rag_model.store.objects.memo import Produced
from rag_model.store.objects.trees import linked_tree
from rag_model.store.store import Store

STAGE = "score"
VERSION = 1  # increased when the same inputs would give other scores
BLOCK = 32  # examples of a task: with 10 passages each, a minute of a core with a generator of 135 million weights
TEXT = "Background: {title}\n{text}\n\n{question}"
"""How a passage stands before plain text: Lin et al. 2023, appendix C, `Background: {passage}`, an empty line."""
_LIBRARIES = ("torch", "transformers", "tokenizers")
_THREADS = 32  # look-ups at a time

Tell = Callable[[int, int], None]  # examples scored, of how many


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
class ScoreTask:
    """A block of examples, and the generator that scores them."""

    readings: BlobRef  # JSON: a list of `Reading` as values
    identity: str  # digest of the generator
    contexts: int  # passages of all examples
    generator: tuple[tuple[str, BlobRef], ...] = ()  # its files in the store, by name; not needed if it is recorded

    @property
    def weights(self) -> int:
        """The bytes of the generator's files."""
        return sum(ref.size for _, ref in self.generator)

    def inputs(self) -> dict[str, Any]:
        """Return all inputs that decide the scores, up to rounding."""
        return {
            "readings": self.readings.id,
            "generator": self.identity,
            "text": TEXT,
            "code": VERSION,
            "libraries": {name: version(name) for name in _LIBRARIES},
        }


Scorer = Callable[[Sequence[ScoreTask], Tell], Sequence[Mapping[str, Any]]]
"""Does all tasks by `score`, on whatever workers; returns their reports, in order."""


def score(task: ScoreTask, store: Store) -> dict[str, Any]:
    """Score a block, once; return its report: `scores`, the blob that `read_scores` reads, and the number of examples.

    Raises:
        InputError: the generator's files are damaged, or a score is not finite.
    """

    def produce(workdir: Path) -> Produced:
        generator = _generator(store.url, task.generator)
        found = [score_one(generator, one) for one in _readings(store, task.readings)]
        (out := workdir / "scores.json").write_text(json.dumps([[list(one.log_p), one.tokens] for one in found]))
        return Produced({"scores": out}, {"examples": len(found)})

    record, _ = store.memo.once(STAGE, task.inputs(), produce)
    return {"scores": record.outputs["scores"].to_json(), **record.facts}


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
    blocks = [readings[start : start + BLOCK] for start in range(0, len(readings), BLOCK)]
    with ThreadPoolExecutor(_THREADS) as threads:  # on an object store this is mostly waiting
        tasks = list(threads.map(partial(_task, store, identity), blocks))
        recorded = all(threads.map(partial(_is_recorded, store), tasks))
    if not recorded:
        files = put_generator(store, generator())
        tasks = [replace(task, generator=files) for task in tasks]
    reports = (scorer or _here(store))(tasks, tell or (lambda _, __: None))
    _generator.cache_clear()  # this process may have done a small job itself
    blobs = [BlobRef.from_json(report["scores"]) for report in reports]
    return [Scores(tuple(log_p), tokens) for blob in blobs for log_p, tokens in json.loads(store.blobs.read(blob))]


def put_generator(store: Store, generator: Kept) -> tuple[tuple[str, BlobRef], ...]:
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


def _here(store: Store) -> Scorer:
    def run(tasks: Sequence[ScoreTask], tell: Tell) -> list[Mapping[str, Any]]:
        reports = list[Mapping[str, Any]]()
        for task in tasks:
            reports.append(score(task, store))
            tell(len(reports), len(tasks))
        return reports

    return run


def _task(store: Store, identity: str, block: Sequence[Reading]) -> ScoreTask:
    values = [[one.id, one.text, one.answer, one.passages, one.plain] for one in block]
    blob = store.blobs.put_bytes(json.dumps(values, ensure_ascii=False).encode())
    return ScoreTask(blob, identity, sum(len(one.passages) for one in block))


def _is_recorded(store: Store, task: ScoreTask) -> bool:
    return store.memo.get(STAGE, store.memo.key(task.inputs())) is not None


def _readings(store: Store, blob: BlobRef) -> list[Reading]:
    return [
        Reading(identity, text, answer, tuple((title, body) for title, body in passages), plain)
        for identity, text, answer, passages, plain in json.loads(store.blobs.read(blob))
    ]


@lru_cache(maxsize=1)  # a worker loads the generator once
def _generator(store_url: str, files: tuple[tuple[str, BlobRef], ...]) -> Generator:
    blobs = Store.open(store_url).blobs
    return load_generator(linked_tree({name: blobs.local(ref) for name, ref in files}))
