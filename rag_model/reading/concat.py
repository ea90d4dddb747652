"""Answer questions from one prompt each: all passages at once, numbered, before the question."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rag_model.errors import UsageError
from rag_model.reading.answer import Answer, Support
from rag_model.reading.assembly import Context, assemble
from rag_model.reading.prompts import Concat
from rag_model.reading.reader import Stop, Tell, check_lists, found_by
from rag_model.reading.stages import ASSEMBLY, GENERATION, Marks, timed
from rag_model.reading.writers.writer import Prompt, Writer, Written
from rag_model.retrieve.questions import check_questions
from rag_model.retrieve.retriever import Hit, Retriever

K = 5  # passages a question: as many as `RagSettings`
_SPARE = 8  # tokens: a prompt may have some more than its parts


class ConcatReader:
    """Answers questions with any writer over what a retriever finds."""

    def __init__(
        self,
        retriever: Retriever | None,
        writer: Writer,
        settings: Concat | None = None,
        k: int = K,
        passages: int | None = None,
    ) -> None:
        """Read with `writer` what `retriever` finds; without one, only what it is given.

        Args:
            retriever: any; no inner products are needed.
            writer: continues the prompt.
            settings: how passages become a prompt.
            k: passages a question, unless a caller says otherwise.
            passages: that the retriever can find; where they are fewer than `k`, all are asked for.
        """
        self.retriever, self.writer, self.settings = retriever, writer, settings or Concat()
        self.k = min(k, passages or k)

    @property
    def decides(self) -> dict[str, Any]:
        """Return how passages become a prompt, and what the writer says of itself."""
        return {"concat": asdict(self.settings), **self.writer.decides}

    def answer(
        self, questions: Sequence[str], k: int | None = None, stop: Stop | None = None, tell: Tell | None = None
    ) -> list[Answer]:
        """Return the answer of each question, in order, from its best `k` passages.

        Raises:
            UsageError: as `answer_from`; or `k` is below 1 or above the number of passages, or there is no retriever.
            StoppedError: `stop`, which is called before each token, was true.
        """
        hits = found_by(self.retriever, questions, self.k if k is None else k)
        return self.answer_from(questions, hits, stop, tell)

    def answer_from(
        self,
        questions: Sequence[str],
        hits: Sequence[Sequence[Hit]],
        stop: Stop | None = None,
        tell: Tell | None = None,
    ) -> list[Answer]:
        """Return the answer of each question, in order, from the passages given; closed book if there are none.

        Raises:
            UsageError: a question is empty or leaves no room for a passage, the budget has no room for one, or there
                are not as many lists of passages as questions.
            StoppedError: `stop`, which is called before each token, was true.
        """
        marks = Marks()
        check_lists(questions, hits)
        check_questions(questions)
        contexts = [self.context(*pair) for pair in zip(questions, hits, strict=True)]
        prompts = [self.prompt(*pair) for pair in zip(questions, contexts, strict=True)]
        marks.end(ASSEMBLY)
        written = self.writer.write(prompts, stop, tell)
        answers = [_answer(*one) for one in zip(questions, hits, contexts, written, strict=True)]
        marks.end(GENERATION)
        return timed(answers, marks)

    def log_likelihood(
        self, questions: Sequence[str], hits: Sequence[Sequence[Hit]], texts: Sequence[str]
    ) -> list[float]:
        """Return log p(text|question, passages) of each in nats, the end token included; closed book without passages.

        Raises:
            UsageError: as `answer_from`; or the writer's model does not tell likelihoods.
        """
        check_lists(questions, hits)
        contexts = [self.context(*pair) for pair in zip(questions, hits, strict=True)]
        prompts = [self.prompt(*pair) for pair in zip(questions, contexts, strict=True)]
        return self.writer.log_likelihood(prompts, texts)

    def context(self, question: str, hits: Sequence[Hit]) -> Context:
        """Return the passages as the prompt has them: at most the budget, and at most what the writer has room for.

        Raises:
            UsageError: there is no room for one.
        """
        alone = Prompt(self.settings.system(closed=False), self.settings.user(" ", question))
        left = self.writer.room - sum(self.writer.count([alone.system, alone.user])) - _SPARE
        if left < 1:
            raise UsageError(
                f"the question has no room in a prompt of {self.writer.room} tokens, which is what {self.writer.id} "
                "reads before an answer: ask a shorter question, or for a shorter answer"
            )
        budget = left if self.settings.budget is None else min(left, self.settings.budget)
        return assemble(hits, self.writer.count, budget, self.settings.order, dated=self.settings.dated)

    def prompt(self, question: str, context: Context) -> Prompt:
        """Return what the writer continues."""
        closed = not context.excerpts
        return Prompt(self.settings.system(closed=closed), self.settings.user(context.text, question))


def _answer(question: str, hits: Sequence[Hit], context: Context, written: Written) -> Answer:
    support = tuple(Support(hit) for hit in hits)
    return Answer(
        question,
        written.text,
        written.log_likelihood,
        support,
        ended=written.ended,
        usage=written.usage,
        context=context.excerpts,
    )
