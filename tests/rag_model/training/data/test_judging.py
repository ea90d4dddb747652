"""A frozen generator's verdicts beside its own decoding and likelihood, of free answers and of choices."""

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


def by_hand(generator: Generator, passage: object, answer: str) -> float:
    contexts, targets = generator.encode_contexts([QUESTION], [[passage]]), generator.encode_targets([answer])  # type: ignore[list-item]
    with torch.no_grad():
        log_p = generator.logits(contexts, targets)[0, 0].double().log_softmax(-1)  # (t, v)
    return sum(float(log_p[place, token]) for place, token in enumerate(targets.tokens[0].tolist()))


def test_a_free_answer_is_right_if_it_holds_a_gold_one(generator: Generator) -> None:
    reader = MarginalReader(
        None, Rag(torch.nn.Identity(), generator, RagSettings(k=1)), DecodingSettings(max_new_tokens=6)
    )
    said = [
        reader.answer_from([QUESTION], [[Hit(1, 0.0, 0, one, "", "", inner_product=0.0)]])[0].text for one in PASSAGES
    ]
    word = next(word for text in said for word in text.split() if word.isalnum() or len(word) > 1)
    expected = [AnswerMatcher([word]).match(text) for text in said]
    judge = PassageJudge(generator, [Example("1", QUESTION, ("gold", word))], JudgeSettings(max_new_tokens=6))
    found = judge_passages(judge, QUESTION, PASSAGES)
    assert [one.right for one in found] == expected
    assert True in expected
    assert [one.log_p for one in found] == pytest.approx(
        [by_hand(generator, one, "gold") for one in PASSAGES], rel=1e-4
    )


def test_of_choices_the_likeliest_counts(generator: Generator) -> None:
    choices = ("the", "who", "king")
    judge = PassageJudge(generator, [Example("1", QUESTION, ("who", "other"))], JudgeSettings(choices))
    for passage, told in zip(PASSAGES, judge_passages(judge, QUESTION, PASSAGES), strict=True):
        log_p = [by_hand(generator, passage, choice) for choice in choices]
        assert told.right is (int(np.argmax(log_p)) == 1)
        assert told.log_p == pytest.approx(log_p[1], rel=1e-4)


def test_a_judge_that_does_not_write_says_the_same_log_p(generator: Generator) -> None:
    examples, settings = [Example("1", QUESTION, ("king", "the"))], JudgeSettings(max_new_tokens=6)
    judge, silent = (PassageJudge(generator, examples, settings, generates_answers=writes) for writes in (True, False))
    told, found = (judge_passages(one, QUESTION, PASSAGES) for one in (judge, silent))
    assert [one.log_p for one in found] == [one.log_p for one in told]
    assert not any(one.right for one in found)
    assert judge.compute_identity("x") != silent.compute_identity("x")


def test_all_that_decides_a_verdict_is_in_its_identity(generator: Generator) -> None:
    one, other = Example("1", QUESTION, ("a",)), Example("1", QUESTION, ("b",))
    judge = PassageJudge(generator, [one], JudgeSettings())
    assert judge.compute_identity("x") == PassageJudge(generator, [one], JudgeSettings()).compute_identity("x")
    others = (
        judge.compute_identity("y"),
        PassageJudge(generator, [other], JudgeSettings()).compute_identity("x"),
        PassageJudge(generator, [one], JudgeSettings(max_new_tokens=3)).compute_identity("x"),
    )
    assert judge.compute_identity("x") not in others


def test_what_cannot_be_is_refused(generator: Generator) -> None:
    with pytest.raises(UsageError, match="no choices or at least two different ones"):
        JudgeSettings(("yes",))
    with pytest.raises(InputError, match="example 1 has the answers maybe, none of which is among the choices yes, no"):
        PassageJudge(generator, [Example("1", QUESTION, ("maybe",))], JudgeSettings(("yes", "no")))
    weight = generator.module.get_output_embeddings().weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    try:
        with pytest.raises(InputError, match=r"score of question .* is not finite"):
            judge_passages(
                PassageJudge(generator, [Example("1", QUESTION, ("a",))], JudgeSettings(("a", "b"))), QUESTION, PASSAGES
            )
    finally:
        with torch.no_grad():
            weight.copy_(kept)
