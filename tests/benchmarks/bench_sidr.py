"""Measure SiDR: a training step beside a plain loop of the same equations, and an index of bags by query terms.

Prints one JSON line a measurement. `step`: both encoders start from MiniLM; the peer is the
authors' method in torch and transformers, which multiplies all tokens with all words at once.
Weights, batch and losses are equal, and each side runs in its own process, in turns; `ratio` is the
peer's CPU seconds over ours, `memory_ratio` our peak over the peer's.

`terms`: no trained SiDR is shipped, so one is trained here for `--steps` steps, few by default; its
Success is one of the machinery, and not of the method. Questions search the bags with their
heaviest n terms, for n of 4 to all 768: recall of the first 20 against all terms, questions a
second, and Success@20. The peers are BM25, an index of SiDR's own weights, and 20 proposals of the
bags in the order of the current encoder. `refresh` is the cost of a changed encoder for each index:
encoding and indexing all passages, or nothing.

`--passages FILE --questions FILE` are JSON lines, plain or .xz (`title`, `text`; `question`,
`answers`), by default the demo's; `--train FILE` has triples (`question`, `context`, `answers`), by
default questions about the titles of passages. `python tests/benchmarks/bench_sidr.py` takes about
two minutes.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import step_timing
import torch
import transformers
from isolated_run import WorkCost, run_alone
from passages import demo_passages, read_json_lines
from step_timing import Step
from torch import Tensor, nn

from flows.demo import QUESTIONS, demo_encoder
from rag_model.corpus.ragged_file import SparseVectors, SparseWriter
from rag_model.corpus.records import Passage
from rag_model.encoders.bag import BagEncoder, compute_term_mask, read_bag_spec
from rag_model.encoders.files import read_vocabulary_size
from rag_model.encoders.tokens import load_tokenizer, pad_rows, tokenize
from rag_model.evaluation.matching import AnswerMatcher
from rag_model.index.build import run_stages
from rag_model.index.kind import IndexFiles
from rag_model.index.postings.impact import KIND
from rag_model.index.postings.kind import KIND as BM25
from rag_model.index.postings.search import ImpactIndex
from rag_model.index.recipe import IndexRecipe
from rag_model.training.data.examples import Example, build_passage, read_examples
from rag_model.training.objectives.sidr import SidrPair, SidrRecipe, SidrTask

QUESTIONS_A_BATCH, K = 6, 20
TERMS = (4, 8, 16, 32, 64, 128, 256, 768)


def build_batch(examples: Sequence[Example]) -> tuple[list[str], list[Passage]]:
    """Return questions, and their positives followed by as many hard negatives."""
    sources, negatives = examples[:QUESTIONS_A_BATCH], examples[QUESTIONS_A_BATCH : 2 * QUESTIONS_A_BATCH]
    return [example.question for example in sources], [example.positives[0] for example in (*sources, *negatives)]


def ours(folder: Path, questions: list[str], passages: list[Passage], steps: int) -> list[Step]:
    """Train with bookwheel."""
    pair = SidrPair.load(folder, folder, device="cpu").eval()  # without dropout, so that losses are equal
    gold = [Example(str(n), q, (), (passages[n],), (passages[len(questions) + n],)) for n, q in enumerate(questions)]
    task = SidrTask(pair, gold, gold, SidrRecipe(batch_size=len(gold)))
    batch = task.build_batch(gold, random.Random(0))
    return step_timing.take_our_steps(pair, lambda _: task.loss(batch)[0], steps, 1e-6)


def plain(folder: Path, questions: list[str], passages: list[Passage], steps: int) -> list[Step]:
    """Train with the same equations in torch and transformers alone."""
    bodies = nn.ModuleList([transformers.AutoModel.from_pretrained(str(folder)).eval() for _ in range(2)])
    norms = nn.ModuleList([nn.LayerNorm(body.config.hidden_size) for body in bodies])
    size, count = bodies[0].config.vocab_size, len(questions)
    terms = torch.from_numpy(compute_term_mask(load_tokenizer(folder, 256), size))
    texts = [questions, [f"{passage.title} {passage.text}" if passage.title else passage.text for passage in passages]]
    token_rows = [tokenize(load_tokenizer(folder, size), text) for text, size in zip(texts, (128, 256), strict=True)]
    inputs = [[torch.from_numpy(part) for part in pad_rows(rows, max(map(len, rows)), 0)] for rows in token_rows]

    def weigh_terms(position: int) -> tuple[Tensor, Tensor]:
        ids, real = inputs[position]
        hidden = norms[position](bodies[position](input_ids=ids, attention_mask=real.long())[0])
        products = nn.functional.elu(hidden @ bodies[position].embeddings.word_embeddings.weight.T) + 1  # (b, t, V)
        weights = products.masked_fill(~real[..., None], 0).max(1)[0] * terms
        bag = torch.zeros(len(ids), size).scatter(1, ids, 1) * terms
        return weights, bag

    def prune(weights: Tensor, bag: Tensor) -> Tensor:
        mask = torch.zeros_like(weights).scatter(1, weights.topk(768, 1).indices, 1)
        return weights * torch.logical_or(mask, bag)

    def info_nce(queries: Tensor, read: Tensor) -> Tensor:
        scores, gold_columns = queries @ read.T, torch.arange(count)
        entropy = nn.functional.cross_entropy
        return entropy(scores, gold_columns) + entropy(scores[:, :count].T, gold_columns)

    def loss(_: int) -> Tensor:
        (query, query_bag), (doc, doc_bag) = weigh_terms(0), weigh_terms(1)
        pairs = ((prune(query, query_bag), doc), (query, prune(doc, doc_bag)), (query_bag, doc), (query, doc_bag))
        return torch.stack([info_nce(*pair) for pair in pairs]).mean()

    return step_timing.take_plain_steps(nn.ModuleList([bodies, norms]), loss, steps, 1e-6)


def compare_steps(folder: Path, examples: Sequence[Example], options: argparse.Namespace) -> dict[str, Any]:
    """Run both sides in turns and compare them; the first step of each process is a warm-up."""
    runs: dict[str, list[WorkCost]] = {"ours": [], "plain": []}
    for _ in range(options.rounds):
        for side in (ours, plain):
            runs[side.__name__].append(run_alone(side, folder, *build_batch(examples), 3))
    cpu = {name: [step.cpu_seconds for run in costs for step in run.value[1:]] for name, costs in runs.items()}
    peak = {name: statistics.median(run.anonymous_mb for run in costs) for name, costs in runs.items()}
    losses = np.array([[step.loss for step in run[0].value] for run in runs.values()])
    middle = {name: statistics.median(step_seconds) for name, step_seconds in cpu.items()}
    return {
        "benchmark": "sidr_step",
        "ratio": round(middle["plain"] / middle["ours"], 3),
        "time_ratio": round(middle["ours"] / middle["plain"], 3),
        "memory_ratio": round(peak["ours"] / peak["plain"], 3),
        "peak_mb": {name: round(value) for name, value in peak.items()},
        "cpu_s": {name: [round(value, 2) for value in step_seconds] for name, step_seconds in cpu.items()},
        "loss_difference": float(f"{np.abs(losses[0] / losses[1] - 1).max():.1e}"),
    }


def train_sidr(folder: Path, examples: Sequence[Example], options: argparse.Namespace) -> tuple[SidrPair, float]:
    """Train a SiDR for the steps of the options; return the pair of encoders and the seconds."""
    shape = SidrRecipe(question_length=32, passage_length=options.length, shared=True)
    pair = SidrPair.load(folder, folder, shape, device="cpu").train()
    recipe = replace(shape, batch_size=options.batch, hard_negatives=0)
    task = SidrTask(pair, examples, examples[:1], recipe)
    optimizer = torch.optim.AdamW(pair.parameters(), lr=options.rate)
    start, step, epoch = time.perf_counter(), 0, 0
    while step < options.steps:
        for batch in task.batches(epoch)[: options.steps - step]:
            torch.manual_seed(step)
            task.loss(batch)[0].backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(pair.parameters(), 2.0)
            for group in optimizer.param_groups:
                group["lr"] = options.rate * min(1, (step + 1) / 10) * (1 - step / options.steps)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        epoch += 1
    return pair.eval(), time.perf_counter() - start


def build_index(rows: SparseVectors, factory: str, dim: int, scale: int, work: Path) -> ImpactIndex:
    """Write rows as one part; build and open their index."""
    part, out = work / f"{factory}.sparse", work / f"{factory}.postings"
    with SparseWriter(part, dim, scale) as writer:
        writer.write(rows)
    plan = KIND.plan(IndexRecipe(factory), len(rows), dim)
    run_stages(plan, [part], out, work)
    return KIND.open(IndexFiles(out, lambda: [part], len(rows)), plan.entry())


class Success:
    """Computes the share of questions with an answer among their hits."""

    def __init__(self, texts: Sequence[str], golds: Sequence[Sequence[str]]) -> None:
        """Store the passages' texts, and matchers of the questions' answers."""
        self._texts, self._golds = texts, [AnswerMatcher(gold) for gold in golds]

    def __call__(self, rows: Any, k: int = K) -> float:
        """Return Success@k of (q, ≥k) rows."""
        successes = [
            any(gold.match(self._texts[row]) for row in question_rows[:k] if row >= 0)
            for gold, question_rows in zip(self._golds, rows, strict=True)
        ]
        return round(sum(successes) / len(successes), 4)


def measure_terms(
    folder: Path, corpus: list[Passage], question_rows: list[dict[str, Any]], train: Any, options: Any
) -> Any:
    """Measure search of the bags with n terms beside other indexes, and the cost of each when the encoder changes."""
    pair, seconds = train_sidr(folder, train, options)
    encoder, questions = pair.question.encoder(), [row["question"] for row in question_rows]
    titles, texts = [passage.title for passage in corpus], [passage.text for passage in corpus]
    success = Success(texts, [row["answers"] for row in question_rows])
    with tempfile.TemporaryDirectory() as base:
        work = Path(base)
        spec, size = read_bag_spec(folder, {"max_length": options.length}), read_vocabulary_size(folder)
        tokenizer = load_tokenizer(folder, spec.max_length)
        bags, bag_s = _time(
            lambda: BagEncoder(folder, spec, tokenizer, compute_term_mask(tokenizer, size)).encode_passages(
                titles, texts
            )
        )
        bag, bag_build_s = _time(lambda: build_index(bags, "Impact1", size, 1, work))
        rows, encode_s = _time(lambda: pair.passage.encoder().encode_passages(titles, texts))
        weights, build_s = _time(lambda: build_index(rows, "Impact", size, pair.passage.spec.scale, work))
        vectors = encoder.encode_questions(questions)
        full = bag.search(vectors, K)[1]
        curve = []
        for count in TERMS:
            bag.search(vectors, K, terms=count)  # decodes the lists before the timed search
            top_rows, search_s = _time(lambda count=count: bag.search(vectors, K, terms=count)[1])
            recall = np.mean([len({*a.tolist()} & {*b.tolist()}) / K for a, b in zip(top_rows, full, strict=True)])
            rate = round(len(questions) / search_s)
            curve.append(
                {
                    "terms": count,
                    "recall@20": round(float(recall), 4),
                    "questions_s": rate,
                    "Success@20": success(top_rows),
                }
            )
        late = _reorder_candidates(rows, vectors, full)
        success_by_index = {
            "weights": {f"Success@{k}": success(weights.search(vectors, K)[1], k) for k in (1, 5, 20)},
            "bags": {f"Success@{k}": success(full, k) for k in (1, 5, 20)},
            "bags_then_weights": {f"Success@{k}": success(late, k) for k in (1, 5, 20)},
            "bm25": {f"Success@{k}": success(_search_bm25(corpus, questions, work), k) for k in (1, 5, 20)},
        }
        sizes = {
            name: round(index.file.layout.size / len(corpus)) for name, index in (("bags", bag), ("weights", weights))
        }
    return {
        "benchmark": "sidr_terms",
        "passages": len(corpus),
        "questions": len(questions),
        "steps": options.steps,
        "train_s": round(seconds, 1),
        "terms_a_question": round(float((vectors[..., 1] > 0).sum(1).mean()), 1),
        "heaviest": round(float(rows.weights.max()) / pair.passage.spec.scale, 2),
        "curve": curve,
        **success_by_index,
        "bytes_a_passage": sizes,
        "refresh_s": {"weights": round(encode_s + build_s, 1), "bags": 0.0},
        "first_build_s": {"weights": round(encode_s + build_s, 1), "bags": round(bag_s + bag_build_s, 1)},
    }


def _reorder_candidates(rows: SparseVectors, questions: Any, proposed: Any) -> list[Any]:
    """Rank each question's proposed rows by the weights of their passages."""
    row_lists = []
    for question, candidate_rows in zip(questions, proposed, strict=True):
        table = np.zeros(1 << 16)
        table[question[:, 0].astype(int)] += question[:, 1]
        candidates = rows.take(candidate_rows[candidate_rows >= 0])
        sums = np.concatenate([[0], np.cumsum(table[candidates.terms] * candidates.weights)])
        scores = sums[candidates.offsets[1:]] - sums[candidates.offsets[:-1]]
        row_lists.append(candidate_rows[candidate_rows >= 0][np.argsort(-scores, kind="stable")])
    return row_lists


def _search_bm25(corpus: list[Passage], questions: list[str], work: Path) -> Any:
    from rag_model.corpus.passages import PassageWriter  # noqa: PLC0415

    rows, out = work / "rows.parquet", work / "bm25.postings"
    with PassageWriter(rows) as writer:
        for passage in corpus:
            writer.write(passage)
    plan = BM25.plan(IndexRecipe("BM25", over="text"), len(corpus), 0)
    run_stages(plan, [rows], out, work)
    return BM25.open(IndexFiles(out, lambda: [rows], len(corpus)), plan.entry()).search(questions, K)[1]


def _time(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    return work(), time.perf_counter() - start


def load_examples(options: argparse.Namespace, corpus: Sequence[Passage]) -> list[Example]:
    """Read the triples, or return questions about the titles of passages."""
    if options.train:
        return read_examples(options.train)[: options.examples]
    titled_passages = [passage for passage in corpus if passage.title][: options.examples]
    return [Example(str(n), f"what is {passage.title}?", (), (passage,)) for n, passage in enumerate(titled_passages)]


def main() -> None:
    """Run both measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("passages", "questions", "train", "encoder"):
        parser.add_argument(f"--{name}", type=Path)
    for name, default in {
        "count": 300,
        "max-questions": 60,
        "examples": 300,
        "steps": 6,
        "batch": 8,
        "length": 96,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--rate", type=float, default=5e-5)
    parser.add_argument("--only", choices=["step", "terms"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = options.encoder or Path(demo_encoder())
    passage_rows = read_json_lines(options.passages) if options.passages else demo_passages()
    order = np.random.default_rng(0).permutation(len(passage_rows))[: options.count]
    corpus = [build_passage(passage_rows[row]["title"] or "", passage_rows[row]["text"]) for row in np.sort(order)]
    questions = read_json_lines(options.questions) if options.questions else read_json_lines(Path(QUESTIONS))
    sample = [
        questions[row] for row in np.sort(np.random.default_rng(1).permutation(len(questions))[: options.max_questions])
    ]
    examples = load_examples(options, corpus)
    if options.only != "terms":
        print(json.dumps(compare_steps(folder, examples, options)), flush=True)
    if options.only != "step":
        print(json.dumps(measure_terms(folder, corpus, sample, examples, options)), flush=True)


if __name__ == "__main__":
    main()
