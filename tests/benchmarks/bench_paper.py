"""Test on two cores which relative findings of Lewis et al. 2020 also hold for small models.

There are two parts. `--data FOLDER --generator DIR` uses real models and passages without training:
questions, texts, clues and claims, each by RAG-Sequence, RAG-Token and closed book
(`paper_questions` describes the samples and the generated claims). Without these options, or with
`--subjects N` beside them, a world is generated in which retriever and generator learn: trained,
frozen and BM25 retrieval (table 6), more passages (figure 3), and two indexes whose facts differ
(section 4.5).

Prints a table of the paper's figures and ours, with the paired difference, its 95 % interval over
the questions, and a verdict: reproduced (above 0), not reproduced (below), undecidable at this size
(`paper_verdicts`). Only the direction is compared, since our figures are no measure of the paper's
models. Then prints one JSON line. `--spans DIR` adds an extractive reader.

By default each part takes less than two minutes, and most verdicts are undecidable. For more:

    python tests/benchmarks/bench_paper.py --data FOLDER --generator DIR --questions 40 --subjects 60 --steps 100
        --made-questions 240 --seeds 2
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import torch
from paper_findings import FINDINGS
from paper_made import made
from paper_real import TASKS, load, real
from paper_verdicts import NOT, REPRODUCED, UNDECIDABLE, judge, table

from flows.demo import demo_encoder
from rag_model.evaluation.answers.scores import ScoredAnswer

_SUBJECTS = 10


def collect(options: argparse.Namespace) -> dict[str, list[ScoredAnswer]]:
    """Run both parts for each seed; return the answers of all seeds by task and arm."""
    arms: dict[str, list[ScoredAnswer]] = {}
    generator = load(options.generator, options.dtype) if options.generator else None
    with tempfile.TemporaryDirectory(prefix="bench-paper-") as name:
        for seed in range(options.seeds):
            folder = Path(name) / f"seed-{seed}"
            folder.mkdir()
            parts = [made(options, folder, seed)] if options.subjects else []
            parts += [real(options, generator, folder, seed)] if generator is not None else []
            for arm, answers in (pair for part in parts for pair in part.items()):
                arms.setdefault(arm, []).extend(answers)
    return arms


def main() -> None:
    """Run the benchmark; print the table and one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of passages, qa_* and train_triples, as .jsonl.xz")
    parser.add_argument("--generator", type=Path, help="a decoder-only model: a folder, or one with a GGUF file")
    parser.add_argument(
        "--spans", type=Path, help="a folder of a model with a question-answering head, or DPR's reader"
    )
    parser.add_argument("--encoder", default=demo_encoder())
    parser.add_argument("--questions", type=int, default=4, help="questions of each task with real models")
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=TASKS, help="tasks with real models; default: all")
    parser.add_argument("--library", type=int, default=200, help="additional passages of the library")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the generator")
    parser.add_argument("--beams", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("-k", type=int, default=3, help="passages of an answer")
    parser.add_argument("--most", type=int, default=10, help="maximum number of passages for figure 3")
    parser.add_argument(
        "--subjects",
        type=int,
        help="subjects of the made world, with 16 passages each; 0: none; default: 10, and 0 with a generator",
    )
    parser.add_argument("--made-questions", type=int, default=40, help="maximum number of questions of the made world")
    parser.add_argument("--steps", type=int, default=20, help="steps of a retriever's training")
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--reader-steps", type=int, default=500)
    parser.add_argument("--reader", type=Path, help="a folder of `made_world.write_reader`")
    options = parser.parse_args()
    if (options.data is None) != (options.generator is None):
        parser.error("--data and --generator belong together: give both, or neither for the made world alone")
    if options.subjects is None:
        options.subjects = 0 if options.generator else _SUBJECTS
    torch.set_num_threads(1)
    start, cpu_start = time.perf_counter(), time.process_time()
    arms = collect(options)
    judgements = [judgement for finding in FINDINGS if (judgement := judge(finding, arms)) is not None]
    print(table(judgements), flush=True)
    verdicts = [judgement.verdict for judgement in judgements]
    report = {
        "benchmark": "paper",
        "generator": options.generator.name if options.generator else None,
        "questions": options.questions if options.data else 0,
        "made_questions": options.made_questions if options.subjects else 0,
        "k": options.k,
        "seeds": options.seeds,
        "verdicts": {name: verdicts.count(name) for name in (REPRODUCED, NOT, UNDECIDABLE)},
        "findings": [judgement.to_json() for judgement in judgements],
        "seconds": round(time.perf_counter() - start),
        "cpu_seconds": round(time.process_time() - cpu_start),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
