"""The check of live answers for overrides: what it costs beside the answer, and whose answers it names.

One JSON line. Each question is read with a passage that holds an answer and with others, in one prompt. `ratio` is the
CPU seconds of an answer over those of its check: 1 or more means that a check costs no more than the answer. `share` is
what checks add to a service's work at one answer in 20. `rates` has what is unsupported, what is an override, and the
evaluation's override: a passage holds a gold answer, and another one is given. By default a model of random weights
reads made passages, for the cost alone. With `--generator` the questions ask for capitals, and every passage names a
wrong one: the answer that is right comes from memory. `memory` says how many are, and how many of these are called an
override; `others` the same of all other unsupported answers. With `--data` too, questions of Natural Questions. In
earnest

    python tests/benchmarks/bench_override.py --generator FOLDER
    python tests/benchmarks/bench_override.py --generator FOLDER --data FOLDER --questions 40
"""

import argparse
import json
import random
import resource
import string
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_stream import random_llama
from passages import lines

from rag_model.corpus.records import Passage
from rag_model.evaluation.answers.readings import AnswerPassage, Reading
from rag_model.evaluation.answers.scores import measure_grounding
from rag_model.evaluation.matching import AnswerMatcher
from rag_model.evaluation.measures.answers import exact_match
from rag_model.evaluation.questions import Question
from rag_model.generate.decoding import DecodingSettings
from rag_model.generate.load import load_generator
from rag_model.reading.answer import Answer
from rag_model.reading.concat import ConcatReader
from rag_model.reading.writers.local import LocalWriter
from rag_model.retrieve.hits import Hit
from rag_model.serving.monitoring.overrides import is_remembered, is_unsupported

EVERY = 20  # as `serve` checks
CAPITALS = (
    "France Paris, Germany Berlin, Italy Rome, Spain Madrid, Portugal Lisbon, Greece Athens, Poland Warsaw, Austria "
    "Vienna, Hungary Budapest, Sweden Stockholm, Norway Oslo, Finland Helsinki, Denmark Copenhagen, Ireland Dublin, "
    "Russia Moscow, Ukraine Kyiv, Turkey Ankara, Egypt Cairo, Kenya Nairobi, Japan Tokyo, China Beijing, India Delhi, "
    "Thailand Bangkok, Vietnam Hanoi, Iran Tehran, Iraq Baghdad, Cuba Havana, Peru Lima, Chile Santiago, Canada Ottawa"
)


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, and the passage to read."""

    question: str
    held: tuple[str, ...]  # answers that the passage holds
    text: str
    known: str = ""  # the answer that only memory gives; empty: not known


def natural(folder: Path, count: int, seed: int) -> list[Asked]:
    """Draw questions with answers of at most three words, each with its passage of at most 100 words."""
    rows = lines(folder / "train_triples.jsonl.xz")
    random.Random(seed).shuffle(rows)
    short = [row for row in rows if len(row["answers"][0].split()) <= 3 and len(row["context"].split()) <= 100]
    return [Asked(row["question"], tuple(row["answers"]), row["context"]) for row in short[:count]]


def capitals(count: int) -> list[Asked]:
    """Ask for capitals; each country's passage names that of the country seven lines further."""
    pairs = [one.split() for one in CAPITALS.split(", ")]
    wrong = [pairs[(place + 7) % len(pairs)][1] for place in range(len(pairs))]
    return [
        Asked(f"What is the capital of {land}?", (town,), f"The capital of {land} is {town}.", right)
        for (land, right), town in list(zip(pairs, wrong, strict=True))[:count]
    ]


def made(count: int, seed: int) -> list[Asked]:
    """Draw passages of 100 words that mean nothing."""
    dice = random.Random(seed)
    words = ["".join(dice.sample(string.ascii_lowercase, 4)) for _ in range(2_000)]
    texts = [" ".join(dice.choices(words, k=100)) for _ in range(count)]
    return [Asked(f"what is {text[:20]}?", (text.split()[-1],), text) for text in texts]


def measure(reader: ConcatReader, rows: Sequence[Asked], k: int) -> dict[str, Any]:
    """Answer each question, and check each answer."""
    spent, said = {"answer": 0.0, "check": 0.0}, list[tuple[Asked, Answer, bool]]()
    for place, asked in enumerate(rows):
        hits = [_hit(step, rows[(place + step) % len(rows)].text) for step in range(k)]
        ((answer,), seconds) = _timed(lambda asked=asked, hits=hits: reader.answer_from([asked.question], [hits]))
        remembered, checking = _timed(lambda answer=answer: is_remembered(reader, answer))
        spent["answer"] += seconds
        spent["check"] += checking
        said.append((asked, answer, is_unsupported(answer) and remembered))
    unsupported = [one for one in said if is_unsupported(one[1])]
    memory = [one for one in unsupported if one[0].known and AnswerMatcher([one[0].known]).match(one[1].plain)]
    others = [one for one in unsupported if one not in memory]
    gold = [_overrides(asked, answer) for asked, answer, _ in said]
    rates = {"unsupported": len(unsupported), "override": sum(one[2] for one in said), "evaluation": sum(gold)}
    cost = spent["check"] / spent["answer"]
    return {
        "ratio": round(1 / cost, 2),
        "share": round(cost * len(unsupported) / len(rows) / EVERY, 4),
        "cpu_s": {name: round(seconds / len(rows), 3) for name, seconds in spent.items()},
        "rates": {name: round(n / len(rows), 3) for name, n in rates.items()},
        "memory": {"said": len(memory), "override": sum(one[2] for one in memory)},
        "others": {"said": len(others), "override": sum(one[2] for one in others)},
    }


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.process_time()
    return work(), time.process_time() - began


def _hit(rank: int, text: str) -> Hit:
    passage = Passage(f"{rank}-0", f"{rank}", 1, "", "", text, 0, len(text.split()), Passage.hash_of("", text))
    return Hit(rank + 1, 1.0 / (rank + 1), rank, passage, "", "")


def _overrides(asked: Asked, answer: Answer) -> bool:
    """Return whether the evaluation calls it an override."""
    shown = tuple(AnswerPassage("", "", "", one.hit.passage.text, 0.0, None, None) for one in answer.support)
    reading, right = Reading("", answer.plain, None, shown), exact_match(answer.plain, asked.held)
    return bool(measure_grounding(Question("", asked.question, asked.held), reading, right).get("override", 0.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with train_triples.jsonl.xz; with --generator")
    parser.add_argument("--generator", type=Path, help="folder of a generator; by default one of random weights")
    parser.add_argument("--questions", type=int, help="by default 8, or 30 capitals")
    parser.add_argument("-k", type=int, default=3, help="passages a question")
    parser.add_argument("--tokens", type=int, default=12, help="of an answer, at most")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if options.generator is None:
            rows = made(options.questions or 8, options.seed)
        elif options.data is None:
            rows = capitals(options.questions or 30)
        else:
            rows = natural(options.data, options.questions or 8, options.seed)
        folder = options.generator or random_llama(Path(name))
        writer = LocalWriter(load_generator(folder, device="cpu"), str(folder), DecodingSettings(1, options.tokens))
        report = {"benchmark": "override", "questions": len(rows), "k": options.k}
        report |= measure(ConcatReader(None, writer), rows, options.k)
        print(json.dumps({**report, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}))


if __name__ == "__main__":
    main()
