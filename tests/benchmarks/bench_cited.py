"""Measure cited answers of a small model without training, beside closed book and RAG-Sequence.

The questions are Natural Questions with short answers (`train_triples`), over a library of their
contexts and other passages. The context of every fourth question is left out, so that some cannot
be answered (`cited_questions`). MiniLM retrieves k passages. They are read in one prompt with
citations, and separately by RAG-Sequence; closed book reads none. The test questions measure EM,
F1, answers that hold a gold answer, citation recall and precision, override, answers that a passage
supports, seconds and tokens, each with a 95 % interval over the questions. Signal and threshold of
abstaining are chosen on dev questions and measured on test questions. There an answer is right if
it holds a gold answer, since a chat model answers in sentences. Prints a table, then one JSON line.

`--model DIR` is a decoder-only generator, a folder or one with a GGUF file. `--model openai:NAME`
is a model behind the endpoint that the environment names. An endpoint returns no likelihoods of
given texts, so RAG-Sequence and the closed book likelihood are left out. The store in `--work`
keeps the answers, so that an interrupted run can continue. The default is small, and only shows
that the benchmark runs.
`python tests/benchmarks/bench_cited.py --data FOLDER --model DIR [--dev 60 --test 120]`
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from cited_questions import SplitQuestions, draw

from flows.demo import demo_encoder
from flows.reindex import reindex
from rag_model.digest import digest_folder
from rag_model.encoders.files import ENDPOINT_PREFIX
from rag_model.encoders.trainable import TrainableEncoder
from rag_model.evaluation.answers.ablation import CLOSED_BOOK, OPEN_BOOK, AblationResult, AblationSettings
from rag_model.evaluation.answers.abstaining import choose_threshold, describe_abstention, measure_threshold
from rag_model.evaluation.answers.examination import AnswerCache, AnswerEvaluation
from rag_model.evaluation.answers.scores import ScoredAnswer
from rag_model.evaluation.answers.settings import EvaluationSettings
from rag_model.evaluation.bootstrap import Estimate, estimate_mean
from rag_model.evaluation.questions import Question, QuestionSet
from rag_model.evaluation.retrieval.judging import build_answer_matcher
from rag_model.generate.decoding import DecodingSettings
from rag_model.generate.load import load_generator
from rag_model.generate.rag import Rag, RagSettings
from rag_model.index.recipe import IndexRecipe
from rag_model.reading.marginal import MarginalReader
from rag_model.reading.model import ReadingModel, load_reading_model
from rag_model.reading.reader import Reader
from rag_model.reading.settings import PromptSettings, ReaderSettings, read_prompt
from rag_model.retrieve.factory import open_retriever
from rag_model.retrieve.retriever import SnapshotRetriever
from rag_model.snapshots.recipe import Recipe
from rag_model.store.store import Store
from rag_model.store.versions.manifest import QUESTION_ENCODER
from rag_model.store.versions.snapshot import Snapshot

MARGINAL = "marginal"
TEMPERATURE = 0.05  # of p(z|x): MiniLM's vectors have unit length
HOLDS = "holds a gold answer"
MEASURES = (
    *("EM", "F1", HOLDS, "cited", "citation-recall", "citation-precision"),
    *("override", "supported", "EM-unheld", "from-passages"),
)


def publish(library: Sequence[tuple[str, str]], folder: Path, encoder: str) -> str:
    """Build a snapshot of passages, title and text each, in the store in `folder`; return its id."""
    rows = [{"id": str(number), "title": title, "text": text} for number, (title, text) in enumerate(library)]
    path = folder / "cited.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = Recipe(index={"hnsw": IndexRecipe("HNSW32"), "bm25": IndexRecipe("BM25")})
    with redirect_stderr(StringIO()):
        result = reindex.fn(str(path), str(folder / "store"), encoder, recipe, "cited")
    assert result.snapshot is not None
    return result.snapshot


def load_model(options: argparse.Namespace) -> ReadingModel:
    """Load a generator from its folder, or return a model of the endpoint."""
    if options.model.startswith(ENDPOINT_PREFIX):
        return load_reading_model(None, options.model, "concat")
    return ReadingModel(options.model, generator=load_generator(options.model, device="cpu", dtype=options.dtype))


def open_readers(options: argparse.Namespace, model: ReadingModel, question: Any) -> dict[str, Reader]:
    """Return the readers by condition; the first reads all passages in one prompt."""
    citing = {"cite": True}
    concat = PromptSettings(**(read_prompt(options.prompt, **citing) if options.prompt else citing))
    settings = ReaderSettings("concat", DecodingSettings(max_new_tokens=options.max_tokens), concat)
    readers_by_name = {"": model.open_reader(None, settings)}
    if model.generator is not None and not options.no_marginal:
        rag = Rag(question, model.generator, RagSettings("sequence", options.k, TEMPERATURE))
        readers_by_name[MARGINAL] = MarginalReader(None, rag, settings.decoding, batch_size=4)
    return readers_by_name


def examine(
    options: argparse.Namespace,
    questions: list[Question],
    retriever: SnapshotRetriever,
    answering: Mapping[str, AnswerCache],
    settings: EvaluationSettings,
) -> AnswerEvaluation:
    """Answer the questions under each condition, and measure the answers."""
    first, *other_caches = answering.items()
    question_set = QuestionSet(tuple(questions))
    examination = AnswerEvaluation(
        retriever,
        first[1],
        question_set,
        options.k,
        retriever.snapshot.n,
        settings,
        dict(other_caches if settings.ablations else ()),
    )
    examination.retrieve()
    arms = {condition.name: condition for condition in examination.list_conditions()}
    for condition in (arms[name] for name in (OPEN_BOOK, CLOSED_BOOK, f"{MARGINAL}, {OPEN_BOOK}") if name in arms):
        examination.answer_condition(condition)
    return examination


def measure(options: argparse.Namespace, questions: SplitQuestions, folder: Path) -> dict[str, Any]:
    """Build the library, choose a threshold on the dev questions, and measure the test questions."""
    store, model = str(folder / "store"), load_model(options)
    with Snapshot.open(store, publish(questions.library, folder, options.encoder)) as snapshot:
        question = TrainableEncoder.load(snapshot.folder(QUESTION_ENCODER), "question", device="cpu")
        retriever = open_retriever(snapshot, "hnsw", encoder=question, products=True)
        dtype = {} if model.generator is None else {"dtype": options.dtype}
        inputs = {"snapshot": snapshot.id, "model": identify_model(options.model), "k": options.k, **dtype}
        answering = {
            name: AnswerCache(Store.open(store), reader, {**inputs, "reader": name, **reader.decides})
            for name, reader in open_readers(options, model, question).items()
        }
        settings = EvaluationSettings(k=options.k, depth=options.k)
        dev = examine(options, questions.dev, retriever, answering, settings)
        test_settings = replace(settings, ablations=AblationSettings(sweep=(), gold_depth=1))
        evaluation = examine(options, questions.test, retriever, answering, test_settings)
    choice = choose_threshold(add_holds(dev.results[0]), HOLDS, options.risk)
    test_answers = add_holds(evaluation.results[0])
    test_risk = None if choice.threshold is None else measure_threshold(test_answers, HOLDS, choice.threshold)
    return {
        "passages": len(questions.library),
        "dev": {"n": len(questions.dev), **choice.to_json(), "said": describe_abstention(choice)},
        "test": {} if test_risk is None else {**test_risk.to_json(), "said": describe_abstention(test_risk)},
        "answer_all_risk": 1 - fmean(answer.measures[HOLDS] for answer in test_answers),
        "Success@k": evaluation.retrieval,
        "worth": evaluation.retrieval_worth,
        "rows": [row.to_json() for row in evaluation.results],
        "table": format_table(evaluation.results),
    }


def add_holds(row: AblationResult) -> list[ScoredAnswer]:
    """Add to each answer of a condition whether it holds a gold answer by DPR's token match."""
    return [
        replace(a, measures={**a.measures, HOLDS: float(build_answer_matcher(a.question)(a.reading.answer))})
        for a in row.scored_answers
    ]


def identify_model(model: str) -> Any:
    """Return the identity of a model: its name at the endpoint, or the digest of its folder."""
    return model if model.startswith(ENDPOINT_PREFIX) else digest_folder(Path(model))


def format_table(rows: list[AblationResult]) -> str:
    """Format the metrics of each condition as a table, in percent."""
    head = ["", *(row.name for row in rows)]
    columns = [{**row.metrics, HOLDS: estimate_mean([a.measures[HOLDS] for a in add_holds(row)])} for row in rows]
    body = [[name, *(_percent(figures.get(name)) for figures in columns)] for name in MEASURES]
    body += [[name, *(f"{row.costs[name]:.2f}" if name in row.costs else "-" for row in rows)] for name in COSTS]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body))


COSTS = ("seconds", "read", "written")


def _percent(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    return f"{100 * estimate.value:.1f} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}], {estimate.n}"


def main() -> None:
    """Run the benchmark; print the table and one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of train_triples and passages, as .jsonl.xz")
    parser.add_argument("--model", required=True, help="a folder of a decoder-only generator, or openai:NAME")
    parser.add_argument("--encoder", default=demo_encoder())
    parser.add_argument("--dev", type=int, default=6, help="questions that choose the threshold")
    parser.add_argument("--test", type=int, default=8, help="questions that are measured")
    parser.add_argument("--library", type=int, default=200, help="additional passages of the library")
    parser.add_argument("--risk", type=float, default=0.5, help="maximum share of wrong answers among the given ones")
    parser.add_argument("--no-marginal", action="store_true", help="leave out RAG-Sequence")
    parser.add_argument("--prompt", type=Path, help="a prompt file, as for `bookwheel answer --prompt`")
    parser.add_argument("--longest", type=int, default=40, help="maximum number of tokens of an answer")
    parser.add_argument("-k", type=int, default=3, help="passages of an answer")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of a generator in memory")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--work", type=Path, help="a folder that keeps the library and the answers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start, cpu_start = time.perf_counter(), time.process_time()
    questions = draw(options.data, options.dev, options.test, options.library, options.seed)
    with tempfile.TemporaryDirectory(prefix="bench-cited-") as name:
        folder = options.work or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        results = measure(options, questions, folder)
    print(results.pop("table"), flush=True)
    for part in ("dev", "test"):
        print(f"{part}: {results[part].get('said', 'not measured')}", flush=True)
    report = {
        "benchmark": "cited",
        "model": options.model if options.model.startswith(ENDPOINT_PREFIX) else Path(options.model).name,
        "k": options.k,
        **results,
        "seconds": round(time.perf_counter() - start),
        "cpu_seconds": round(time.process_time() - cpu_start),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
