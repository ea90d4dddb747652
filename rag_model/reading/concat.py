"""Answer each question from one prompt, with all passages, numbered, before the question."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rag_model.errors import UsageError
from rag_model.reading.answer import Answer, SupportingPassage
from rag_model.reading.assembly import PromptContext, assemble
from rag_model.reading.reader import (
    ASSEMBLY,
    GENERATION,
    NO_CALLBACKS,
    AnswerCallbacks,
    AnswerTimer,
    RetrievingReader,
    add_stage_seconds,
    check_hit_lists,
)
from rag_model.reading.settings import PromptSettings
from rag_model.reading.writers.writer import Completion, Prompt, Writer
from rag_model.retrieve.hits import Hit, Retriever
from rag_model.retrieve.retriever import check_queries

K = 5  # default passages per question, as in `RagSettings`
_SPARE_TOKENS = 8  # a prompt may have a few more tokens than its parts


class ConcatReader(RetrievingReader):
    """Answers questions with any writer, from the passages of a retriever."""

    def __init__(
        self,
        retriever: Retriever | None,
        writer: Writer,
        settings: PromptSettings | None = None,
        k: int = K,
        passages: int | None = None,
    ) -> None:
        """Create a reader.

        Args:
            retriever: any retriever, inner products are not needed; None: answer from given
                passages only.
            writer: continues the prompt.
            settings: the format of the prompt.
            k: default number of passages per question.
            passages: passages that the retriever can return, an upper bound of `k`.
        """
        self.retriever, self.writer, self.settings = retriever, writer, settings or PromptSettings()
        self.k = min(k, passages or k)

    @property
    def decides(self) -> dict[str, Any]:
        """The settings of the prompt and of the writer, for memo keys."""
        return {"concat": asdict(self.settings), **self.writer.decides}

    def answer_from(
        self, questions: Sequence[str], hits: Sequence[Sequence[Hit]], callbacks: AnswerCallbacks = NO_CALLBACKS
    ) -> list[Answer]:
        """Return the answer of each question, in order, from the given hits; closed book without
        hits.

        Raises:
            UsageError: a question is empty, a question or the budget leaves no room for a passage,
                or the number of hit lists differs from the number of questions.
            StoppedError: `callbacks.should_stop`, which is called before each token, returned True.
        """
        timer = AnswerTimer()
        check_hit_lists(questions, hits)
        check_queries(questions)
        contexts = [self.build_context(*pair) for pair in zip(questions, hits, strict=True)]
        prompts = [self.build_prompt(*pair) for pair in zip(questions, contexts, strict=True)]
        timer.end_stage(ASSEMBLY)
        written = self.writer.write(prompts, callbacks.should_stop, callbacks.on_text)
        answers = [_build_answer(*parts) for parts in zip(questions, hits, contexts, written, strict=True)]
        timer.end_stage(GENERATION)
        return add_stage_seconds(answers, timer)

    def log_likelihood(
        self, questions: Sequence[str], hits: Sequence[Sequence[Hit]], texts: Sequence[str]
    ) -> list[float]:
        """Return log p(text|question, passages) of each text in nats, with the end token.

        Without hits the likelihood is that of the closed book.

        Raises:
            UsageError: as in `answer_from`; or the writer's model does not give likelihoods.
        """
        check_hit_lists(questions, hits)
        contexts = [self.build_context(*pair) for pair in zip(questions, hits, strict=True)]
        prompts = [self.build_prompt(*pair) for pair in zip(questions, contexts, strict=True)]
        return self.writer.log_likelihood(prompts, texts)

    def build_context(self, question: str, hits: Sequence[Hit]) -> PromptContext:
        """Return the context of a prompt, which fits into the budget and into the writer's
        capacity.

        Raises:
            UsageError: there is no room for a passage.
        """
        bare_prompt = Prompt(self.settings.system(closed=False), self.settings.user(" ", question))
        capacity = (
            self.writer.max_prompt_tokens
            - sum(self.writer.count_tokens([bare_prompt.system, bare_prompt.user]))
            - _SPARE_TOKENS
        )
        if capacity < 1:
            raise UsageError(
                f"the question does not fit into the {self.writer.max_prompt_tokens} prompt tokens "
                f"of {self.writer.id}: ask a shorter question, or for a shorter answer"
            )
        budget = capacity if self.settings.budget is None else min(capacity, self.settings.budget)
        return assemble(hits, self.writer.count_tokens, budget, self.settings.order, dated=self.settings.is_dated)

    def build_prompt(self, question: str, context: PromptContext) -> Prompt:
        """Return the prompt that the writer continues."""
        closed = not context.excerpts
        return Prompt(self.settings.system(closed=closed), self.settings.user(context.text, question))


def _build_answer(question: str, hits: Sequence[Hit], context: PromptContext, written: Completion) -> Answer:
    support = tuple(SupportingPassage(hit) for hit in hits)
    return Answer(
        question,
        written.text,
        written.log_likelihood,
        support,
        ended=written.ended,
        usage=written.usage,
        context=context.excerpts,
        problem=written.problem,
    )
