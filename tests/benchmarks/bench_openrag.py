"""Measure OpenRAG: the answers of a frozen generator from the first passage, before and after its retriever is trained.

A SiDR is first trained for `--sidr-steps` steps (or `--sidr FOLDER` has `question/` and
`passage/`). All arms have the same initial weights, pools and steps: `bags`, whose index never
changes; `pools`, the offline half alone; and `reindex`, which proposes from an index of the
passages' own weights, encoded again every `--every` steps and at the end. Each arm has Success@1
and 5, the share of right answers and the mean -log p of the gold one on questions outside training,
the differences to `before` and to `reindex` (95 % intervals over questions), and the CPU seconds of
its refreshes. `--transfer GENERATOR` reads the same passages with another generator, to see whether
the gain transfers.

By default the world is generated (`made_world`), and the generator is a small BART that is first
trained to copy, which takes most of the run; `--generator` may name a folder that `write_reader`
wrote. Prints one JSON line a world, and a line for all questions of several `--seeds`. `--made 0`
reads files instead: `--passages FILE` and `--questions FILE` (`question`, `answers`), with a
generator that reads a pair in a second or more.
`python tests/benchmarks/bench_openrag.py`
"""

import argparse
import json
import random
import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_sidr import build_index, train_sidr
from made_world import make_examples, make_facts, write_reader, write_short_encoder
from passages import read_json_lines

from flows.demo import demo_encoder
from rag_model.corpus.records import Passage
from rag_model.encoders.encoder import Vectors
from rag_model.evaluation.bootstrap import estimate_difference, estimate_mean
from rag_model.evaluation.matching import AnswerMatcher
from rag_model.generate.load import load_generator
from rag_model.index.postings.search import ImpactIndex
from rag_model.training.data.examples import Example, build_passage
from rag_model.training.data.judging import ExamplePools, JudgeSettings, PassageJudge, build_pools, judge_passages
from rag_model.training.data.pair_scores import CachedPairScorer
from rag_model.training.objectives.openrag import OnlineJudging, OpenRagRecipe, OpenRagTask
from rag_model.training.objectives.sidr import SidrPair
from rag_model.training.objectives.task_bases import find_first_answer_rank

Columns = dict[str, list[float]]  # by measure, one value a question


@dataclass(frozen=True, slots=True)
class OpenRagData:
    """Passages, questions, and the examples that train the initial SiDR."""

    encoder: Path
    corpus: list[Passage]
    train: list[Example]
    dev: list[Example]
    starts: list[Example]


class Proposals:
    """Proposes passages from an index of bags or weights, like `BagMemory` over a snapshot."""

    def __init__(self, corpus: list[Passage], index: ImpactIndex, **parameters: int) -> None:
        """Search `index`, whose row i is passage i, with `parameters`."""
        self.corpus, self.index, self.snapshot, self.parameters = corpus, index, None, parameters

    def propose(self, query_terms: Vectors, k: int) -> list[list[Passage]]:
        """Return the k best passages of each query."""
        rows = self.index.search(query_terms, min(k, len(self.corpus)), **self.parameters)[1]
        return [[self.corpus[row] for row in passage_rows if row >= 0] for passage_rows in rows.tolist()]


def index_weights(pair: SidrPair, corpus: list[Passage], work: Path) -> tuple[ImpactIndex, float]:
    """Encode all passages and index their weights; return the index and the CPU seconds."""
    start = time.process_time()
    encoder = pair.eval().passage.encoder()
    rows = encoder.encode_passages([passage.title for passage in corpus], [passage.text for passage in corpus])
    index = build_index(rows, "Impact", encoder.dim, pair.passage.spec.scale, work)
    return index, time.process_time() - start


def by_bags(pair: SidrPair, corpus: list[Passage], work: Path) -> ImpactIndex:
    """Index the bags of all passages."""
    from rag_model.encoders.bag import BagEncoder, compute_term_mask, read_bag_spec  # noqa: PLC0415
    from rag_model.encoders.tokens import load_tokenizer  # noqa: PLC0415

    folder, size = pair.passage.folder, pair.passage.encoder().dim
    spec = read_bag_spec(folder, {"max_length": pair.passage.spec.max_length})
    tokenizer = load_tokenizer(folder, spec.max_length)
    bags = BagEncoder(folder, spec, tokenizer, compute_term_mask(tokenizer, size))
    rows = bags.encode_passages([passage.title for passage in corpus], [passage.text for passage in corpus])
    return build_index(rows, "Impact1", size, 1, work)


def rank(pair: SidrPair, memory: Proposals, dev: Sequence[Example], recipe: OpenRagRecipe) -> list[list[Passage]]:
    """Return the passages of each dev question, which the index proposes and the encoders rank."""
    task: Any = OpenRagTask.__new__(OpenRagTask)  # only for its ranking
    task.module, task._recipe, task._online_judging = pair, recipe, OnlineJudging(memory, None, None, JudgeSettings())  # type: ignore[arg-type]
    return list(task.rank_proposals([example.question for example in dev]))


def measure_arm(readers: dict[str, Any], dev: Sequence[Example], ranked: Sequence[list[Passage]]) -> Columns:
    """Return for each question Success@k, and how each generator answers from the first passage."""
    firsts = [find_first_answer_rank(*pair) for pair in zip(dev, ranked, strict=True)]
    values = {f"Success@{k}": [float(first is not None and first <= k) for first in firsts] for k in (1, 5)}
    for name, judge in readers.items():
        judgements = [judge_passages(judge, e.question, [top[0]])[0] for e, top in zip(dev, ranked, strict=True)]
        values |= {f"{name} right": [float(j.right) for j in judgements], f"{name} nll": [-j.log_p for j in judgements]}
    return values


def summarize(columns: dict[str, Columns]) -> dict[str, Any]:
    """Return the means of each arm, and their differences to the start and to the arm `reindex`."""

    def minus(arm: str, base: str) -> dict[str, str]:
        return {name: str(estimate_difference(values, columns[base][name])) for name, values in columns[arm].items()}

    pairs = [(arm, base) for arm in columns for base in ("before", "reindex") if base in columns and arm != base]
    return {
        "arms": {
            arm: {name: str(estimate_mean(values)) for name, values in measures.items()}
            for arm, measures in columns.items()
        },
        "differences": {f"{arm} - {base}": minus(arm, base) for arm, base in pairs if arm != "before"},
    }


def train_arm(
    name: str, start: Path, pools: ExamplePools, dev: Any, kit: Any, options: argparse.Namespace
) -> tuple[list[list[Passage]], dict[str, Any]]:
    """Train one arm from the initial weights; return its passages, and the seconds of its steps and refreshes."""
    recipe, memory, judge, corpus, work = kit
    pair = SidrPair.load(start / "question", start / "passage", device="cpu")
    recipe = replace(recipe, online=name != "pools")
    mine, refresh, refreshes = memory, 0.0, 0
    if name == "reindex":
        index, refresh = index_weights(pair, corpus, work)
        mine, refreshes = Proposals(corpus, index), 1
    task = OpenRagTask(
        pair, pools, dev, recipe, OnlineJudging(mine, judge, judge, JudgeSettings(max_new_tokens=options.tokens))
    )
    optimizer = torch.optim.AdamW(
        [parameter for parameter in pair.parameters() if parameter.requires_grad], lr=options.rate
    )
    start_time, step, epoch = time.process_time(), 0, 0
    while step < options.steps:
        for batch in task.batches(epoch)[: options.steps - step]:
            if name == "reindex" and step and step % options.every == 0:
                mine.index, seconds = index_weights(pair, corpus, work)
                refresh, refreshes = refresh + seconds, refreshes + 1
            pair.train()
            torch.manual_seed(step)
            task.loss(batch)[0].backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(pair.parameters(), 2.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        epoch += 1
    seconds = time.process_time() - start_time
    if name == "reindex":  # the dev questions are searched in a fresh index
        mine.index, last = index_weights(pair, corpus, work)
        refresh, refreshes = refresh + last, refreshes + 1
    passages = rank(pair.eval(), mine, dev, recipe)
    return passages, {"cpu_s": round(seconds, 1), "refresh_cpu_s": round(refresh, 2), "refreshes": refreshes}


def read_passages_and_questions(options: argparse.Namespace) -> tuple[list[Passage], list[Example]]:
    """Read passages, and questions whose answers occur in a passage."""
    passages = [build_passage(row["title"] or "", row["text"]) for row in read_json_lines(options.passages)]
    rows = read_json_lines(options.questions)
    order = np.random.default_rng(0).permutation(len(rows))
    examples, gold_passages = list[Example](), dict[str, Passage]()
    for row in (rows[position] for position in order):
        answers = AnswerMatcher(row["answers"])
        gold = next((p for p in passages if p.hash == row.get("hash") or answers.match(p.text)), None)
        if gold is not None and len(row["answers"][0]) > 3:
            gold_passages[gold.hash] = gold
            examples.append(Example(str(len(examples)), row["question"], tuple(row["answers"]), (gold,)))
        if len(examples) == options.train + options.dev + options.examples:
            break
    sample = [passages[i] for i in np.random.default_rng(1).permutation(len(passages))[: options.count]]
    return list({p.hash: p for p in (*gold_passages.values(), *sample)}.values()), examples


def make_world(options: argparse.Namespace, work: Path, seed: int) -> OpenRagData:
    """Return a made world, with training questions about one half of its subjects and dev questions about the other.

    The start learns from statements and their other telling: it finds names, and no word of a relation.
    """
    world, half = make_facts(options.made, seed), options.made // 2 * 8
    encoder = write_short_encoder(options.encoder, options.layers, world, work / "encoder")
    corpus = [build_passage("", fact.format_sentence(form)) for fact in world for form in (0, 1)]
    dice = random.Random(seed)
    sampled_examples = dice.sample(make_examples(world)[:half], min(options.train, half))
    sampled_examples += dice.sample(make_examples(world)[half:], min(options.dev, half))
    starts = [
        Example(
            str(number),
            fact.format_sentence(number % 2),
            (fact.value,),
            (build_passage("", fact.format_sentence(1 - number % 2)),),
        )
        for number, fact in enumerate(dice.sample(world, min(options.examples, len(world))))
    ]
    return OpenRagData(encoder, corpus, sampled_examples[: options.train], sampled_examples[options.train :], starts)


def load_data(options: argparse.Namespace) -> OpenRagData:
    """Return the passages and questions of the files, split into train, dev and initial examples."""
    corpus, examples = read_passages_and_questions(options)
    dev = examples[options.train : options.train + options.dev]
    return OpenRagData(options.encoder, corpus, examples[: options.train], dev, examples[options.train + options.dev :])


def measure(options: argparse.Namespace, work: Path, seed: int) -> tuple[dict[str, Any], dict[str, Columns]]:
    """Train all arms; return their costs, and each arm's measures."""
    work.mkdir()
    data = make_world(options, work, seed) if options.made else load_data(options)
    corpus, train, dev = data.corpus, data.train, data.dev
    start = options.sidr or work / "sidr"
    if options.sidr is None:
        begin = argparse.Namespace(**{**vars(options), "steps": options.sidr_steps, "rate": options.sidr_rate})
        train_sidr(data.encoder, data.starts, begin)[0].save(start)
    pair = SidrPair.load(start / "question", start / "passage", device="cpu").eval()
    recipe = OpenRagRecipe(depth=options.depth, proposed=options.proposed, batch_size=options.openrag_batch)
    by_bags(pair, corpus, work)  # compiles for the timed call
    start_time = time.process_time()
    memory = Proposals(corpus, by_bags(pair, corpus, work))
    bags = time.process_time() - start_time
    bare = [replace(example, positives=()) for example in (*train, *dev)]
    settings = JudgeSettings(max_new_tokens=options.tokens)
    folders = {"generator": options.generator, **({"transfer": options.transfer} if options.transfer else {})}
    readers: dict[str, Any] = {
        name: CachedPairScorer(
            PassageJudge(load_generator(folder, device="cpu"), bare, settings), name, work / name, block_size=1
        )
        for name, folder in folders.items()
    }
    judge = readers["generator"]
    start_time = time.process_time()
    proposed = memory.propose(pair.question.encoder().encode_questions([e.question for e in train]), recipe.depth)
    judged = ((e, top, judge_passages(judge, e.question, top)) for e, top in zip(bare, proposed, strict=False))
    pools = build_pools(judged, recipe.pooled)
    offline = time.process_time() - start_time
    columns_by_arm, costs = {"before": measure_arm(readers, dev, rank(pair, memory, dev, recipe))}, dict[str, Any]()
    for name in options.arms:
        best, costs[name] = train_arm(name, start, pools, dev, (recipe, memory, judge, corpus, work), options)
        columns_by_arm[name] = measure_arm(readers, dev, best)
    return {
        "sizes": {"passages": len(corpus), "train": len(train), "dev": len(dev), "steps": options.steps},
        "pools": {"questions": len(pools), "all_right": pools.all_right, "all_wrong": pools.all_wrong},
        "agreement": str(pools.agreement),
        "bags_cpu_s": round(bags, 2),  # of the only build
        "offline_cpu_s": round(offline, 1),
        "spent": costs,
    }, columns_by_arm


def run(options: argparse.Namespace, work: Path) -> None:
    """Print a line for each seed, and with several seeds a line for all their questions."""
    by_seed = list[dict[str, Columns]]()
    for seed in options.seeds:
        facts, columns = measure(options, work / str(seed), seed)
        by_seed.append(columns)
        print(
            json.dumps({"benchmark": "openrag", "seed": seed, **facts, **summarize(columns), "peak_mb": peak_mb()}),
            flush=True,
        )
    if len(by_seed) > 1:
        all_columns = {
            arm: {name: [value for seed_columns in by_seed for value in seed_columns[arm][name]] for name in measures}
            for arm, measures in by_seed[0].items()
        }
        print(json.dumps({"benchmark": "openrag", "seeds": options.seeds, **summarize(all_columns)}), flush=True)


def peak_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> None:
    """Parse the options, write the generator if none is given, and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("generator", "passages", "questions", "sidr", "transfer", "encoder"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--made", type=int, default=40, help="subjects of 16 passages in a made world; 0: files")
    parser.add_argument("--layers", type=int, default=2, help="layers of the encoder of a made world")
    parser.add_argument("--reader-steps", type=int, default=1200, help="training steps of a made world's generator")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    sizes = {"count": 150, "train": 24, "dev": 40, "examples": 320, "sidr-steps": 32, "batch": 16, "length": 32}
    sizes |= {"depth": 16, "proposed": 16, "steps": 12, "every": 4, "openrag-batch": 8, "tokens": 12}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--arms", nargs="+", default=["bags", "pools", "reindex"])
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--sidr-rate", type=float, default=1e-4)
    options = parser.parse_args()
    options.encoder = options.encoder or Path(demo_encoder())
    if not options.made and not (options.generator and options.passages and options.questions):
        parser.error("--made 0 needs --generator, --passages and --questions")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        if options.generator is None:
            options.generator = Path(work) / "reader"
            write_reader(options.generator, options.reader_steps)
        run(options, Path(work))


if __name__ == "__main__":
    main()
