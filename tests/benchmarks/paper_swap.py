"""Two libraries of real passages whose facts differ: the second gives each question another question's answer.

As Longpre et al. 2021 (arXiv 2109.05052) substitute entities: wherever a passage holds a question's answer, one of the
same kind (with a digit, a name, other words) takes its place, so a model cannot be right beside both libraries from
memory. Section 4.5 of the RAG paper swaps two years of Wikipedia for the same purpose.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from rag_model.evaluation.questions import Question
from rag_model.evaluation.retrieval.judging import answer_matcher

Library = list[tuple[str, str]]  # title and text


def changed(questions: Sequence[Question], library: Library) -> tuple[list[Question], list[Question], Library]:
    """Return the questions whose facts change, the same with the facts of the second library, and that library.

    Each passage is changed once, for all questions together: what has come in is not replaced again. A question is left
    out if its kind has no other answer, or if a passage held its answer and does not hold the other one instead.
    """
    others = _others([question.answers[0] for question in questions])
    texts = [text for _, text in library]
    new = {answer: other for question, other in zip(questions, others, strict=True) for answer in question.answers}
    longest = sorted(new, key=len, reverse=True)
    pattern = re.compile("|".join(rf"(?<!\w){re.escape(one)}(?!\w)" for one in longest))
    told = [pattern.sub(lambda found: new[found[0]], text) for text in texts]
    asked, after = list[Question](), list[Question]()
    for question, other in zip(questions, others, strict=True):
        second = replace(question, answers=(other,))
        held = [at for at, text in enumerate(texts) if answer_matcher(question)(text)]
        if other not in question.answers and all(
            answer_matcher(second)(told[at]) and not answer_matcher(question)(told[at]) for at in held
        ):
            asked.append(question)
            after.append(second)
    return asked, after, [(title, text) for (title, _), text in zip(library, told, strict=True)]


def _others(answers: Sequence[str]) -> list[str]:
    """Return for each answer the next one of its kind, the first after the last."""
    kinds = [_kind(answer) for answer in answers]
    found = list(answers)
    for kind in set(kinds):
        places = [at for at, one in enumerate(kinds) if one == kind]
        for at, following in zip(places, places[1:] + places[:1], strict=True):
            found[at] = answers[following]
    return found


def _kind(answer: str) -> str:
    if any(one.isdigit() for one in answer):
        return "number"
    return "name" if answer[:1].isupper() else "words"
