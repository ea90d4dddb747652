"""The protocol of readers: questions in, answers out, from what a retriever finds or from passages that are given."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from rag_model.errors import UsageError
from rag_model.reading.answer import Answer
from rag_model.retrieve.retriever import Hit, Retriever

ReaderName = Literal["marginal", "concat", "extractive"]
Stop = Callable[[], bool]  # asked between two tokens: True once no caller waits for the answer any more
Tell = Callable[[int, str], None]  # the place of a question in its batch, and the characters that its answer grew by


class Reader(Protocol):
    """Answers questions; `rag_model.reading.opening.open_reader` opens one."""

    @property
    def retriever(self) -> Retriever | None:
        """Return what finds passages; None: this reader reads only what it is given."""
        ...

    @property
    def k(self) -> int:
        """Return the passages a question, unless a caller says otherwise."""
        ...

    @property
    def decides(self) -> dict[str, Any]:
        """Return the settings that determine an answer, besides the model's weights, for memo keys."""
        ...

    def answer(
        self, questions: Sequence[str], k: int | None = None, stop: Stop | None = None, tell: Tell | None = None
    ) -> list[Answer]:
        """Return the answer of each question, in order, from its best `k` passages.

        `stop` is called between tokens. `tell` is given each answer's text as it grows, where the reader writes word by
        word, and the whole text at its end where it does not.

        Raises:
            UsageError: a question is empty, `k` is below 1 or above the number of passages, or there is no retriever.
            StoppedError: `stop` was true.
        """
        ...

    def answer_from(
        self,
        questions: Sequence[str],
        hits: Sequence[Sequence[Hit]],
        stop: Stop | None = None,
        tell: Tell | None = None,
    ) -> list[Answer]:
        """Return the answer of each question, in order, from the passages given; closed book if there are none.

        Raises:
            UsageError: there are not as many lists of passages as questions.
            StoppedError: `stop` was true.
        """
        ...


def found_by(retriever: Retriever | None, questions: Sequence[str], k: int) -> list[list[Hit]]:
    """Return the best `k` passages of each question; refuse where nothing finds any."""
    if retriever is None:
        raise UsageError("this reader has no retriever: give it one, or answer from passages of your own")
    return retriever.search(questions, k)


def check_lists(questions: Sequence[str], hits: Sequence[Sequence[Hit]]) -> None:
    """Refuse questions and lists of passages that do not go together."""
    if len(questions) != len(hits):
        raise UsageError(f"{len(questions)} questions and {len(hits)} lists of passages: give one list a question")
