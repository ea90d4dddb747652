"""Train a small extractive reader as the paper's baseline: MiniLM with a head for start and end positions.

    python tests/benchmarks/span_model.py --data FOLDER --to DIR

`--data` has `train_triples.jsonl.xz`: questions, answers and a context that holds one. Each question is trained on its
context and on another question's, with starts and ends normalised over both, as `rag_model.reading.extractive` reads,
and every occurrence of an answer counts (Clark & Gardner 2018, equation 1):

    loss = -log sum over occurrences of p(start) - log sum over occurrences of p(end)

Training ends after `--cpu-seconds`, and the rate falls to 0 by then. Contexts that `held_out` selects are not trained
on, so that benchmarks can use their questions. It writes a folder as transformers does, and prints one JSON line: EM
and F1 on held-out questions, each from its own context alone.
"""

import argparse
import json
import random
import resource
import shutil
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from passages import read_json_lines
from torch import Tensor
from transformers import AutoTokenizer, BertForQuestionAnswering, set_seed

from flows.demo import demo_encoder
from rag_model.encoders.files import resolve_folder
from rag_model.evaluation.bootstrap import estimate_mean
from rag_model.evaluation.measures.answers import exact_match, token_f1
from rag_model.reading.extractive import SpanModel

_PARTS = 8  # one context in eight is held out
_LONGEST = 128  # tokens of a question and its context while training
_HEAD = 10.0  # the head's rate by that of the body, because the head is new
_WARMUP = 0.1  # of the time


def held_out(context: str) -> bool:
    """Return whether questions about a context are for evaluation, and not for training.

    >>> held_out("Paris is the capital of France .")
    False
    """
    return zlib.crc32(context.encode()) % _PARTS == 0


@dataclass(frozen=True, slots=True)
class SpanBatch:
    """A batch of questions, each with two passages, and the positions of the answers in the first."""

    inputs: Any  # of the model: (2 q, t), the q contexts first
    texts: Tensor  # (2 q, t) bool: tokens of passages
    starts: Tensor  # (q, t) bool: an answer begins here
    ends: Tensor  # (q, t) bool: it ends here


def encode_batch(tokenizer: Any, rows: Sequence[dict[str, Any]]) -> SpanBatch:
    """Tokenize each question with its own context and with the next question's."""
    contexts = [row["context"] for row in rows]
    read = tokenizer(
        [row["question"] for row in rows] * 2,
        contexts + contexts[1:] + contexts[:1],
        truncation="only_second",
        max_length=_LONGEST,
        padding=True,
        return_tensors="pt",
        return_offsets_mapping=True,
    )
    offsets = read.pop("offset_mapping")
    texts = torch.tensor([[sequence_id == 1 for sequence_id in read.sequence_ids(row)] for row in range(2 * len(rows))])
    starts, ends = (torch.zeros(len(rows), texts.shape[1], dtype=torch.bool) for _ in range(2))
    for row_number, row in enumerate(rows):
        for first, last in _occurrences(row):
            start = texts[row_number] & (offsets[row_number, :, 0] == first)
            end = texts[row_number] & (offsets[row_number, :, 1] == last)
            if start.any() and end.any():
                starts[row_number] |= start
                ends[row_number] |= end
    return SpanBatch(read, texts, starts, ends)


def _occurrences(row: dict[str, Any]) -> Iterator[tuple[int, int]]:
    for answer in row["answers"]:
        position = row["context"].find(answer)
        while position >= 0:
            yield position, position + len(answer)
            position = row["context"].find(answer, position + 1)


def compute_loss(module: Any, batch: SpanBatch) -> Tensor:
    """Return the mean loss of the questions whose answer is not truncated."""
    outputs, n = module(**batch.inputs), len(batch.starts)
    has_answer = batch.starts.any(1)
    total = torch.zeros(())
    for logits, right in ((outputs.start_logits, batch.starts), (outputs.end_logits, batch.ends)):
        masked = logits.float().masked_fill(~batch.texts, -torch.inf)
        both = torch.cat((masked[:n], masked[n:]), 1)  # (q, 2 t): a question's two passages
        gold = masked[:n].masked_fill(~right, -torch.inf)
        total = total + (both.logsumexp(1) - gold.logsumexp(1))[has_answer].mean()
    return total


def train(module: Any, tokenizer: Any, rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Train until the CPU seconds are spent; return steps and the mean loss of the first and the last tenth."""
    head = [parameter for name, parameter in module.named_parameters() if name.startswith("qa_outputs")]
    # A few hundred steps would hardly change the word embeddings.
    module.bert.embeddings.word_embeddings.weight.requires_grad_(False)
    rest = [parameter for parameter in module.bert.parameters() if parameter.requires_grad]
    groups = [{"params": rest, "lr": options.rate}, {"params": head, "lr": options.rate * _HEAD}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    rates, losses, began = [group["lr"] for group in optimizer.param_groups], [], time.process_time()
    for batch in _batches(rows, options.batch, options.seed):
        progress = (time.process_time() - began) / options.cpu_seconds
        if progress >= 1:
            break
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * min(progress / _WARMUP, (1 - progress) / (1 - _WARMUP))
        with torch.autocast("cpu", torch.bfloat16, enabled=options.bf16):
            loss = compute_loss(module, encode_batch(tokenizer, batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*rest, *head], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    tenth = max(1, len(losses) // 10)
    first, last = (
        round(sum(tenth_losses) / len(tenth_losses), 2) for tenth_losses in (losses[:tenth], losses[-tenth:])
    )
    return {"steps": len(losses), "loss": [first, last]}


def _batches(rows: Sequence[dict[str, Any]], size: int, seed: int) -> Iterator[list[dict[str, Any]]]:
    """Yield batches of about equally long contexts, so that little is padding, in an order drawn by the seed."""
    if len(rows) < size:
        raise SystemExit(f"{len(rows)} questions are fewer than a batch of {size}: give more, or a smaller --batch")
    dice = random.Random(f"spans {seed}")
    while True:
        sorted_rows = sorted(dice.sample(rows, len(rows)), key=lambda row: len(row["context"]) // 50)
        batches = [sorted_rows[start : start + size] for start in range(0, len(sorted_rows) - size + 1, size)]
        yield from dice.sample(batches, len(batches))


def measure_answers(folder: Path, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return EM and F1 of the saved model, each from the question's own context alone, with 95 % intervals."""
    model, answers = SpanModel.load(folder), []
    for row in rows:
        _, start, end, _ = model.score(row["question"], [row["context"]]).find_best_span(model.max_span)
        answers.append((row["context"][start:end], row["answers"]))
    estimates = {
        name: estimate_mean([of(*pair) for pair in answers]) for name, of in (("EM", exact_match), ("F1", token_f1))
    }
    return {
        name: [round(value, 3) for value in (estimate.value, estimate.low, estimate.high)]
        for name, estimate in estimates.items()
    }


def main() -> None:
    """Train, save and evaluate the reader, and print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of train_triples, as .jsonl.xz")
    parser.add_argument("--to", type=Path, required=True, help="a new folder for the model")
    parser.add_argument("--encoder", default=demo_encoder(), help="a BERT to begin with")
    parser.add_argument("--cpu-seconds", type=float, default=90.0, help="of training")
    parser.add_argument("--batch", type=int, default=8, help="questions a step, of two passages each")
    parser.add_argument("--rate", type=float, default=1.5e-4, help="of the body; the head's is 10 times as high")
    parser.add_argument("--check", type=int, default=100, help="questions held out that are asked in the end")
    parser.add_argument("--no-bf16", dest="bf16", action="store_false", help="train in float32 alone")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.to.mkdir(parents=True)
    torch.set_num_threads(1)
    set_seed(options.seed)
    began, cpu_start, source = time.perf_counter(), time.process_time(), resolve_folder(options.encoder)
    rows = read_json_lines(options.data / "train_triples.jsonl.xz")
    train_rows = [row for row in rows if not held_out(row["context"])]
    module, tokenizer = BertForQuestionAnswering.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    training_report = train(module.train(), tokenizer, train_rows, options)
    module.save_pretrained(options.to)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, options.to / name)
    test_rows = random.Random(options.seed).sample([row for row in rows if held_out(row["context"])], options.check)
    line = {
        "benchmark": "span_model",
        "questions": len(train_rows),
        **training_report,
        "held_out": {"n": len(test_rows), **measure_answers(options.to, test_rows)},
        "seconds": round(time.perf_counter() - began),
        "cpu_seconds": round(time.process_time() - cpu_start),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
