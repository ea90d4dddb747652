"""Verdicts of a frozen generator, compared with its own answers and likelihoods."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rag_model.errors import InputError, UsageError
from rag_model.evaluation.matching import AnswerMatcher
from rag_model.generate.decoding import DecodingSettings
from rag_model.generate.generator import Generator
from rag_model.generate.load import load_generator
from rag_model.generate.rag import Rag, RagSettings
from rag_model.reading.marginal import MarginalReader
from rag_model.retrieve.hits import Hit
from rag_model.training.data.examples import Example, build_passage
from rag_model.training.data.judging import JudgeSettings, PassageJudge, judge_passages
from tests.fixtures.tiny_generators import save_bart, save_llama

PASSAGES = [build_passage("City", f"the king of {city}.") for city in ("york", "oslo", "riga", "bonn")]
QUESTION = "who was the king?"


@pytest.fixture(scope="module", params=["bart", "llama"])
def generator(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator:
    save = {"bart": save_bart, "llama": save_llama}[request.param]
    return load_generator(save(tmp_path_factory.mktemp(request.param)), device="cpu")


def sum_log_p(generator: Generator, passage: object, answer: str) -> float:
    contexts, targets = generator.encode_contexts([QUESTION], [[passage]]), generator.encode_targets([answer])  # type: ignore[list-item]
    with torch.no_grad():
        log_p = generator.logits(contexts, targets)[0, 0].double().log_softmax(-1)  # (t, v)
    return sum(float(log_p[position, token]) for position, token in enumerate(targets.tokens[0].tolist()))


def test_free_answer_is_right_if_it_contains_a_gold_answer(generator: Generator) -> None:
    rag = Rag(torch.nn.Identity(), generator, RagSettings(k=1))
    reader = MarginalReader(None, rag, DecodingSettings(max_new_tokens=6))
    hits = [[Hit(1, 0.0, 0, passage, "", "", inner_product=0.0)] for passage in PASSAGES]
    answers = [reader.answer_from([QUESTION], [hit])[0].text for hit in hits]
    word = next(word for answer in answers for word in answer.split() if word.isalnum() or len(word) > 1)
    expected = [AnswerMatcher([word]).match(answer) for answer in answers]
    judge = PassageJudge(generator, [Example("1", QUESTION, ("gold", word))], JudgeSettings(max_new_tokens=6))
    verdicts = judge_passages(judge, QUESTION, PASSAGES)
    assert [verdict.right for verdict in verdicts] == expected
    assert True in expected
    assert [verdict.log_p for verdict in verdicts] == pytest.approx(
        [sum_log_p(generator, passage, "gold") for passage in PASSAGES], rel=1e-4
    )


def test_verdict_on_choices_uses_the_likeliest_choice(generator: Generator) -> None:
    choices = ("the", "who", "king")
    judge = PassageJudge(generator, [Example("1", QUESTION, ("who", "other"))], JudgeSettings(choices))
    for passage, verdict in zip(PASSAGES, judge_passages(judge, QUESTION, PASSAGES), strict=True):
        log_p = [sum_log_p(generator, passage, choice) for choice in choices]
        assert verdict.right is (int(np.argmax(log_p)) == 1)
        assert verdict.log_p == pytest.approx(log_p[1], rel=1e-4)


def test_judge_that_generates_no_answers_returns_the_same_log_p(generator: Generator) -> None:
    examples, settings = [Example("1", QUESTION, ("king", "the"))], JudgeSettings(max_new_tokens=6)
    judge = PassageJudge(generator, examples, settings)
    scorer = PassageJudge(generator, examples, settings, generates_answers=False)
    verdicts, scores = judge_passages(judge, QUESTION, PASSAGES), judge_passages(scorer, QUESTION, PASSAGES)
    assert [score.log_p for score in scores] == [verdict.log_p for verdict in verdicts]
    assert not any(score.right for score in scores)
    assert judge.compute_identity("x") != scorer.compute_identity("x")


def test_identity_covers_generator_answers_and_settings(generator: Generator) -> None:
    example, other_example = Example("1", QUESTION, ("a",)), Example("1", QUESTION, ("b",))
    judge = PassageJudge(generator, [example], JudgeSettings())
    assert judge.compute_identity("x") == PassageJudge(generator, [example], JudgeSettings()).compute_identity("x")
    more_ends: Any = replace(generator, end_tokens=generator.end_tokens | {9})  # type: ignore[type-var]
    other_identities = (
        PassageJudge(more_ends, [example], JudgeSettings()).compute_identity("x"),
        judge.compute_identity("y"),
        PassageJudge(generator, [other_example], JudgeSettings()).compute_identity("x"),
        PassageJudge(generator, [example], JudgeSettings(max_new_tokens=3)).compute_identity("x"),
    )
    assert judge.compute_identity("x") not in other_identities


def test_invalid_choices_answers_and_scores_are_refused(generator: Generator) -> None:
    with pytest.raises(UsageError, match="no choices or at least two different ones"):
        JudgeSettings(("yes",))
    with pytest.raises(InputError, match="example 1 has the answers maybe, none of which is among the choices yes, no"):
        PassageJudge(generator, [Example("1", QUESTION, ("maybe",))], JudgeSettings(("yes", "no")))
    weight = generator.module.get_output_embeddings().weight
    original_weight = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    try:
        with pytest.raises(InputError, match=r"score of question .* is not finite"):
            judge_passages(
                PassageJudge(generator, [Example("1", QUESTION, ("a",))], JudgeSettings(("a", "b"))), QUESTION, PASSAGES
            )
    finally:
        with torch.no_grad():
            weight.copy_(original_weight)
