"""Two libraries of real passages whose facts differ: the second gives each question another question's answer.

As Longpre et al. 2021 (arXiv 2109.05052) substitute entities: wherever a passage has a question's answer, another
answer of the same kind (with a digit, a name, other words) replaces it, so a model cannot be right on both libraries
from memory. Section 4.5 of the RAG paper swaps two years of Wikipedia for the same purpose.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from rag_model.evaluation.questions import Question
from rag_model.evaluation.retrieval.judging import answer_matcher

Library = list[tuple[str, str]]  # title and text


def changed(questions: Sequence[Question], library: Library) -> tuple[list[Question], list[Question], Library]:
    """Return the questions whose facts change, the same with the facts of the second library, and that library.

    Each passage is changed once, for all questions together, so that replacements are not replaced again. A question is
    left out if its kind has no other answer, or if a passage had its answer and does not get the replacement.
    """
    replacements = _rotate_answers([question.answers[0] for question in questions])
    texts = [text for _, text in library]
    substitutions = {
        answer: replacement
        for question, replacement in zip(questions, replacements, strict=True)
        for answer in question.answers
    }
    longest = sorted(substitutions, key=len, reverse=True)
    pattern = re.compile("|".join(rf"(?<!\w){re.escape(answer)}(?!\w)" for answer in longest))
    changed_texts = [pattern.sub(lambda match: substitutions[match[0]], text) for text in texts]
    first_questions, second_questions = list[Question](), list[Question]()
    for question, replacement in zip(questions, replacements, strict=True):
        second = replace(question, answers=(replacement,))
        answer_rows = [row for row, text in enumerate(texts) if answer_matcher(question)(text)]
        if replacement not in question.answers and all(
            answer_matcher(second)(changed_texts[row]) and not answer_matcher(question)(changed_texts[row])
            for row in answer_rows
        ):
            first_questions.append(question)
            second_questions.append(second)
    return (
        first_questions,
        second_questions,
        [(title, text) for (title, _), text in zip(library, changed_texts, strict=True)],
    )


def _rotate_answers(answers: Sequence[str]) -> list[str]:
    """Return for each answer the next one of its kind; the last gets the first."""
    kinds = [_kind(answer) for answer in answers]
    next_answers = list(answers)
    for kind in set(kinds):
        positions = [position for position, answer_kind in enumerate(kinds) if answer_kind == kind]
        for position, following in zip(positions, positions[1:] + positions[:1], strict=True):
            next_answers[position] = answers[following]
    return next_answers


def _kind(answer: str) -> str:
    if any(character.isdigit() for character in answer):
        return "number"
    return "name" if answer[:1].isupper() else "words"
