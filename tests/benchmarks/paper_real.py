"""The tasks of Lewis et al. 2020 with real small models: a frozen MiniLM and an untuned decoder-only generator.

The paper fine-tunes generator and question encoder for each task. Nothing is trained here: the prompt states the task.
The generator reads k passages, or for closed book the same prompt with an empty passage.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from paper_answers import TEMPERATURE, answer_and_score, answer_from_hits, publish, score_readings, variant
from paper_findings import (
    CLOSED,
    CLUE,
    CROSSED,
    CROSSED_BACK,
    FACT,
    FACTS,
    FIRST,
    FOUND,
    FROZEN,
    QA,
    SECOND,
    SEQUENCE,
    SPANS,
    TEXT,
    TOKEN,
    WORDS,
)
from paper_questions import REFUTES, SUPPORTS, PaperQuestions, draw
from paper_swap import changed

from rag_model.encoders.trainable import TrainableEncoder
from rag_model.evaluation.answers.readings import Reading, read_answers
from rag_model.evaluation.answers.scores import ScoredAnswer, score_answer
from rag_model.evaluation.measures.measure import AnswerKind
from rag_model.evaluation.questions import Question
from rag_model.generate.causal import CausalGenerator
from rag_model.generate.decoding import DecodingSettings
from rag_model.generate.load import apply_chat_template, load_generator
from rag_model.generate.prompts import InstructionTemplate
from rag_model.generate.rag import Rag, RagSettings
from rag_model.reading.answer import CLOSED_BOOK
from rag_model.reading.extractive import ExtractiveReader, SpanModel
from rag_model.reading.marginal import MarginalReader
from rag_model.retrieve.factory import open_retriever
from rag_model.retrieve.hits import Hit
from rag_model.retrieve.retriever import SnapshotRetriever
from rag_model.store.versions.manifest import QUESTION_ENCODER
from rag_model.store.versions.snapshot import Snapshot

_PASSAGE = "Title: {title}\nPassage: {text}\n\n"
PROMPTS = {
    QA: f"Answer the question in a few words, from the passage.\n\n{_PASSAGE}Question: {{question}}",
    TEXT: f"{_PASSAGE}{{question}}\n\nAnswer in one sentence from the passage.",
    CLUE: f"{_PASSAGE}Write a short trivia question about {{question}}. Do not name {{question}} in it.",
    FACT: f"Is the claim true or false, by the passage?\n\n{_PASSAGE}Claim: {{question}}",
}
_CUES = {QA: "Answer:", TEXT: "", CLUE: "Question:", FACT: "The claim is"}  # how each answer begins
_LONGEST = {QA: 12, TEXT: 32, CLUE: 24}  # tokens of an answer; longer ones are cut
TASKS = (FOUND, QA, FACTS, TEXT, CLUE, FACT)
_KINDS: dict[str, AnswerKind] = {QA: "spans", TEXT: "texts", CLUE: "clues"}
_LABELS = {"true": SUPPORTS, "false": REFUTES}  # one token each


def real(
    options: argparse.Namespace, generator: CausalGenerator, folder: Path, seed: int
) -> dict[str, list[ScoredAnswer]]:
    """Draw questions and a library, index it, and answer each selected task by each arm."""
    question_set = draw(options.data, options.questions, options.library, seed)
    answers: dict[str, list[ScoredAnswer]] = {}
    with Snapshot.open(
        str(folder / "store"), publish(question_set.library, folder, "real", options.encoder)
    ) as snapshot:
        sides = _Sides.of(snapshot)
        if FOUND in options.tasks:
            answers |= sides.measure_retrieval(question_set.tasks[QA], options.k)
        for task in (task for task in question_set.tasks if task in options.tasks):
            rag = Rag(sides.question, _set_prompt(generator, task), RagSettings("sequence", options.k, TEMPERATURE))
            answers |= sides.answers(rag, task, question_set.tasks[task], options)
        if FACTS in options.tasks:
            rag = Rag(sides.question, _set_prompt(generator, QA), RagSettings("sequence", options.k, TEMPERATURE))
            answers |= _compare_libraries(rag, sides, question_set, folder, options)
    return answers


@dataclass(frozen=True, slots=True)
class _Sides:
    """MiniLM and BM25 over one snapshot."""

    question: TrainableEncoder
    dense: SnapshotRetriever
    words: SnapshotRetriever

    @classmethod
    def of(cls, snapshot: Snapshot) -> Self:
        question = TrainableEncoder.load(snapshot.folder(QUESTION_ENCODER), "question", device="cpu")
        dense = open_retriever(snapshot, "hnsw", encoder=question, products=True)
        return cls(question, dense, open_retriever(snapshot, "bm25"))

    def measure_retrieval(self, questions: Sequence[Question], k: int) -> dict[str, list[ScoredAnswer]]:
        """Measure which questions have an answer among the first k passages, without a reader."""
        texts = [question.text for question in questions]
        silent = [Reading(question.id, "", None, ()) for question in questions]
        both = {FROZEN: self.dense.search(texts, k), WORDS: self.words.search(texts, k)}
        return {f"{FOUND}: {name}": score_readings(questions, silent, hits, "spans") for name, hits in both.items()}

    def answers(
        self, rag: Rag, task: str, questions: Sequence[Question], options: argparse.Namespace
    ) -> dict[str, list[ScoredAnswer]]:
        """Answer the questions of a task by each of its arms."""
        texts = [question.text for question in questions]
        hits, answers = self.dense.search(texts, options.k), dict[str, list[ScoredAnswer]]()
        by_words = self.words.search(texts, options.k) if task in (FACT, QA) else []
        if task == FACT:
            return _claims(rag, questions, hits, by_words)
        settings = _KINDS[task], DecodingSettings(options.beams, _LONGEST[task])
        answers[f"{task}: {SEQUENCE}"] = answer_from_hits(rag, questions, hits, *settings)
        answers[f"{task}: {TOKEN}"] = answer_from_hits(variant(rag, "token"), questions, hits, *settings)
        answers[f"{task}: {CLOSED}"] = answer_from_hits(rag, questions, [()] * len(questions), *settings)
        if task == QA:
            answers[f"{task}: {WORDS}"] = answer_from_hits(_by_scores(rag), questions, by_words, *settings)
            if options.spans:
                spans = ExtractiveReader(None, SpanModel.load(options.spans))
                answers[f"{task}: {SPANS}"] = answer_and_score(spans, questions, hits, "spans")
        return answers


def _compare_libraries(
    rag: Rag, sides: _Sides, question_set: PaperQuestions, folder: Path, options: argparse.Namespace
) -> dict[str, list[ScoredAnswer]]:
    """Answer from the library and from one whose facts differ, and score both by the facts of each library."""
    first_questions, second_questions, library = changed(question_set.tasks[QA], question_set.library)
    reader, texts = (
        MarginalReader(None, rag, DecodingSettings(options.beams, _LONGEST[QA]), 4),
        [question.text for question in first_questions],
    )
    with Snapshot.open(str(folder / "store"), publish(library, folder, "changed", options.encoder)) as second:
        hit_lists = [side.dense.search(texts, options.k) for side in (sides, _Sides.of(second))]
    readings = [(read_answers(reader, first_questions, hits), hits) for hits in hit_lists]
    pairs = {
        FIRST: (first_questions, 0),
        CROSSED: (first_questions, 1),
        SECOND: (second_questions, 1),
        CROSSED_BACK: (second_questions, 0),
    }
    return {
        f"{FACTS}: {name}": score_readings(golds, *readings[library_number], "spans")
        for name, (golds, library_number) in pairs.items()
    }


def load(path: Path, dtype: str) -> CausalGenerator:
    """Load a decoder-only generator on the CPU."""
    generator = load_generator(path, device="cpu", dtype=dtype)
    if not isinstance(generator, CausalGenerator):
        raise SystemExit(f"{path} is an encoder-decoder, which does not read prompts: give a decoder-only model")
    return generator


def _set_prompt(generator: CausalGenerator, task: str) -> CausalGenerator:
    """Return the generator with a task's prompt, in its chat template if it has one, and the same weights."""
    form = InstructionTemplate(PROMPTS[task], max_length=256, max_answer=48)
    if not generator.tokenizer.chat_template:
        return replace(generator, prompt_template=replace(form, after=f"\n\n{_CUES[task]}"))
    chat = apply_chat_template(generator.tokenizer, form)
    return replace(generator, prompt_template=replace(chat, after=f"{chat.after}{_CUES[task]}", answer_prefix=" "))


def _claims(
    rag: Rag, claims: Sequence[Question], hits: Sequence[Sequence[Hit]], by_words: Sequence[Sequence[Hit]]
) -> dict[str, list[ScoredAnswer]]:
    """Label the claims from the passages of each retriever, and from none; BM25's scores weigh its passages."""
    arms = {SEQUENCE: (rag, hits), WORDS: (_by_scores(rag), by_words), CLOSED: (rag, [[CLOSED_BOOK]] * len(claims))}
    return {f"{FACT}: {name}": label_claims(model, claims, arm_hits) for name, (model, arm_hits) in arms.items()}


def _by_scores(rag: Rag) -> Rag:
    return Rag(rag.question, rag.generator, replace(rag.settings, weighed_by="scores", temperature=1.0))


@torch.inference_mode()
def label_claims(rag: Rag, claims: Sequence[Question], hits: Sequence[Sequence[Hit]]) -> list[ScoredAnswer]:
    """Label claims by one of two words, true or false.

    Half of the claims are true by construction. A model that was not tuned prefers
    one of the words whatever it reads, so the threshold between the labels is the median of the log-odds of all claims.
    """
    targets = [rag.generator.encode_targets([word]) for word in _LABELS]
    labels = [target.tokens[0][target.mask[0]] for target in targets]
    odds = []
    for claim, claim_hits in zip(claims, hits, strict=True):
        contexts = rag.generator.encode_contexts([claim.text], [[hit.passage for hit in claim_hits]])
        prior = rag.prior(torch.tensor([[hit.score for hit in claim_hits]]))
        log_p, _ = rag.label_likelihoods(rag.generator, prior, contexts, labels)
        odds.append(float(log_p[0, 0] - log_p[0, 1]))
    threshold = torch.tensor(odds).quantile(0.5).item()
    verdicts = [SUPPORTS if log_odds > threshold else REFUTES for log_odds in odds]
    return [
        score_answer(claim, Reading(claim.id, text, None, ()), "labels")
        for claim, text in zip(claims, verdicts, strict=True)
    ]
