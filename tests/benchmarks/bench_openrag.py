"""OpenRAG: what a frozen generator makes of the first passage, before and after its retriever learned from it.

One JSON line. A SiDR is trained for `--sidr-steps` steps first (or `--sidr FOLDER` has `question/` and `passage/`):
no trained one is shipped, and its figures are of so short a training. Arms, from the same weights and pools, at equal
steps: `bags`, whose index never changes; `pools`, the offline half alone; `reindex`, which proposes by an index of
the passages' own weights, encoded again every `--every` steps. Each has the share of right answers and the mean -log
p of the gold one on dev questions, with the difference to `before` (95 % interval over questions), and the seconds
that its refreshes took. `--transfer GENERATOR` reads the same passages by another generator: what the retriever
learned there is carried over or not.

`--generator`, `--passages FILE` and `--questions FILE` (`question`, `answers`) are not ours to ship. A pair is read
in a second or more on two cores: `--train`, `--depth` and `--steps` decide how long it takes.
`python tests/benchmarks/bench_openrag.py --generator DIR --passages passages.jsonl.xz --questions questions.jsonl.xz`
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_sidr import indexed, learned
from passages import lines

from rag_model.corpus.records import Passage
from rag_model.encoders.encoder import Vectors
from rag_model.evaluation.bootstrap import difference_interval
from rag_model.evaluation.questions.match import Answers
from rag_model.generate.load import load_generator
from rag_model.index.postings.impacts import ImpactIndex
from rag_model.training.data.examples import Example, passage_of
from rag_model.training.data.judging import Judge, JudgeSettings, Verdict, verdicts
from rag_model.training.data.pools import Pools, pools_of
from rag_model.training.data.teaching import KeptScores
from rag_model.training.objectives.openrag.task import Online, OpenRagRecipe, OpenRagTask
from rag_model.training.objectives.sidr.pair import SidrPair


class Proposals:
    """An index of some passages, by bags or by weights: what `BagMemory` is over a snapshot."""

    def __init__(self, corpus: list[Passage], index: ImpactIndex) -> None:
        """Ask `index`, row i of which is passage i."""
        self.corpus, self.index, self.snapshot = corpus, index, None

    def propose(self, asked: Vectors, k: int) -> list[list[Passage]]:
        """Return the k best passages of each question."""
        rows = self.index.search(asked, min(k, len(self.corpus)))[1]
        return [[self.corpus[row] for row in own if row >= 0] for own in rows.tolist()]


def by_weights(pair: SidrPair, corpus: list[Passage], work: Path) -> tuple[ImpactIndex, float]:
    """Encode all passages and index their weights; return the seconds too."""
    started = time.perf_counter()
    encoder = pair.eval().passage.encoder()
    rows = encoder.encode_passages([one.title for one in corpus], [one.text for one in corpus])
    index = indexed(rows, "Impact", encoder.dim, pair.passage.spec.scale, work)
    return index, time.perf_counter() - started


def by_bags(pair: SidrPair, corpus: list[Passage], work: Path) -> ImpactIndex:
    """Index the bags of all passages."""
    from rag_model.encoders.bag import BagEncoder, read_bag_spec, terms_of  # noqa: PLC0415
    from rag_model.encoders.tokens import load_tokenizer  # noqa: PLC0415

    folder, size = pair.passage.folder, pair.passage.encoder().dim
    spec = read_bag_spec(folder, {"max_length": pair.passage.spec.max_length})
    tokenizer = load_tokenizer(folder, spec.max_length)
    bags = BagEncoder(folder, spec, tokenizer, terms_of(tokenizer, size))
    rows = bags.encode_passages([one.title for one in corpus], [one.text for one in corpus])
    return indexed(rows, "Impact1", size, 1, work)


def firsts(pair: SidrPair, memory: Proposals, dev: Sequence[Example], recipe: OpenRagRecipe) -> list[Passage]:
    """Return the first passage of each dev question: the bags propose, the pair orders."""
    task: Any = OpenRagTask.__new__(OpenRagTask)  # only its order is wanted
    task.module, task._recipe, task._online = pair, recipe, Online(memory, None, JudgeSettings())  # type: ignore[arg-type]
    return [own[0] for own in task.ranked([one.question for one in dev])]


def read(judge: Any, dev: Sequence[Example], passages: Sequence[Passage]) -> list[Verdict]:
    """Return what a generator makes of each question with its passage."""
    return [verdicts(judge, one.question, [own])[0] for one, own in zip(dev, passages, strict=True)]


def told(after: list[Verdict], before: list[Verdict]) -> dict[str, Any]:
    """Return the measures of an arm, and their differences to `before`."""
    right = [[float(one.right) for one in some] for some in (after, before)]
    nll = [[-one.log_p for one in some] for some in (after, before)]
    return {
        "right": round(float(np.mean(right[0])), 4),
        "nll": round(float(np.mean(nll[0])), 3),
        "right_difference": str(difference_interval(*right)),
        "nll_difference": str(difference_interval(*nll)),
    }


def arm(
    name: str, start: Path, pools: Pools, dev: Any, kit: Any, options: argparse.Namespace
) -> tuple[SidrPair, dict[str, Any]]:
    """Train one arm from the same weights; return the pair, and the seconds of its steps and refreshes."""
    recipe, memory, judge, corpus, work = kit
    pair = SidrPair.load(start / "question", start / "passage", device="cpu")
    recipe = replace(recipe, online=name != "pools")
    mine, refresh, refreshes = memory, 0.0, 0
    if name == "reindex":
        index, refresh = by_weights(pair, corpus, work)
        mine, refreshes = Proposals(corpus, index), 1
    task = OpenRagTask(pair, pools, dev, recipe, Online(mine, judge, JudgeSettings(max_new_tokens=options.tokens)))
    optimizer = torch.optim.AdamW([one for one in pair.parameters() if one.requires_grad], lr=options.rate)
    started, done, epoch = time.perf_counter(), 0, 0
    while done < options.steps:
        for batch in task.batches(epoch)[: options.steps - done]:
            if name == "reindex" and done and done % options.every == 0:
                mine.index, seconds = by_weights(pair, corpus, work)
                refresh, refreshes = refresh + seconds, refreshes + 1
            pair.train()
            torch.manual_seed(done)
            task.loss(batch)[0].backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(pair.parameters(), 2.0)
            optimizer.step()
            optimizer.zero_grad()
            done += 1
        epoch += 1
    seconds = time.perf_counter() - started
    return pair.eval(), {"seconds": round(seconds, 1), "refresh_s": round(refresh, 1), "refreshes": refreshes}


def data_of(options: argparse.Namespace) -> tuple[list[Passage], list[Example]]:
    """Return passages, and questions whose answers some passage holds."""
    every = [passage_of(row["title"] or "", row["text"]) for row in lines(options.passages)]
    rows = lines(options.questions)
    order = np.random.default_rng(0).permutation(len(rows))
    wanted, held = list[Example](), dict[str, Passage]()
    for row in (rows[place] for place in order):
        answers = Answers(row["answers"])
        found = next((one for one in every if one.hash == row.get("hash") or answers.are_in(one.text)), None)
        if found is not None and len(row["answers"][0]) > 3:
            held[found.hash] = found
            wanted.append(Example(str(len(wanted)), row["question"], tuple(row["answers"]), (found,)))
        if len(wanted) == options.train + options.dev + options.examples:
            break
    others = [every[place] for place in np.random.default_rng(1).permutation(len(every))[: options.count]]
    return list({one.hash: one for one in (*held.values(), *others)}.values()), wanted


def measure(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Train all arms and measure them."""
    corpus, every = data_of(options)
    train, dev = every[: options.train], every[options.train : options.train + options.dev]
    start = options.sidr or work / "sidr"
    if options.sidr is None:
        begin = argparse.Namespace(**{**vars(options), "steps": options.sidr_steps})
        learned(options.encoder, every[options.train + options.dev :], begin)[0].save(start)
    pair = SidrPair.load(start / "question", start / "passage", device="cpu").eval()
    recipe = OpenRagRecipe(depth=options.depth, proposed=options.proposed, batch_size=options.openrag_batch)
    memory = Proposals(corpus, by_bags(pair, corpus, work))
    bare = [replace(one, positives=()) for one in (*train, *dev)]
    settings = JudgeSettings(max_new_tokens=options.tokens)
    generator = load_generator(options.generator, device="cpu")
    judge = KeptScores(Judge(generator, bare, settings), "bench", work / "kept", block=1)
    started = time.perf_counter()
    found = memory.propose(pair.question.encoder().encode_questions([one.question for one in train]), recipe.depth)
    judged = ((one, own, verdicts(judge, one.question, own)) for one, own in zip(bare, found, strict=False))
    pools = pools_of(judged, recipe.pooled)
    offline = time.perf_counter() - started
    before = firsts(pair, memory, dev, recipe)
    readers = {"generator": judge}
    if options.transfer:
        readers["transfer"] = KeptScores(
            Judge(load_generator(options.transfer, device="cpu"), bare, settings), "transfer", work / "kept2", block=1
        )
    base = {name: read(one, dev, before) for name, one in readers.items()}
    arms: dict[str, Any] = {}
    for name in options.arms:
        trained, spent = arm(name, start, pools, dev, (recipe, memory, judge, corpus, work), options)
        after = firsts(trained, memory, dev, recipe)
        changed = sum(a.hash != b.hash for a, b in zip(before, after, strict=True))
        arms[name] = {
            **spent,
            "changed": changed,
            **{who: told(read(one, dev, after), base[who]) for who, one in readers.items()},
        }
    return {
        "benchmark": "openrag",
        "passages": len(corpus),
        "train": len(train),
        "dev": len(dev),
        "steps": options.steps,
        "pools": {"questions": len(pools), "all_right": pools.all_right, "all_wrong": pools.all_wrong},
        "agreement": str(pools.agreement),
        "offline_s": round(offline, 1),
        "before": {who: told(own, own) for who, own in base.items()},
        **arms,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("generator", "passages", "questions"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("sidr", "transfer", "encoder"):
        parser.add_argument(f"--{name}", type=Path)
    sizes = {"count": 150, "train": 12, "dev": 12, "examples": 100, "sidr-steps": 4, "batch": 8, "length": 96}
    sizes |= {"depth": 5, "proposed": 5, "steps": 3, "every": 2, "openrag-batch": 4, "tokens": 10}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--arms", nargs="+", default=["bags", "pools", "reindex"])
    parser.add_argument("--rate", type=float, default=2e-5)
    options = parser.parse_args()
    if options.encoder is None:
        from flows.demo import demo_encoder  # noqa: PLC0415

        options.encoder = Path(demo_encoder())
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        print(json.dumps(measure(options, Path(work))), flush=True)


if __name__ == "__main__":
    main()
