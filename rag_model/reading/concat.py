"""Answer a question with one prompt, which contains all passages, numbered, and the question."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rag_model.errors import UsageError
from rag_model.reading.answer import Answer, SupportingPassage
from rag_model.reading.assembly import PromptContext, assemble_context
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

CONCAT_K = 5  # default passages per question, as in `RagSettings`
_SPARE_TOKENS = 8  # spare tokens, because a prompt may have more tokens than its parts together


class ConcatReader(RetrievingReader):
    """A `Reader` that lets a `Writer` complete one prompt per question."""

    def __init__(
        self,
        retriever: Retriever | None,
        writer: Writer,
        settings: PromptSettings | None = None,
        k: int = CONCAT_K,
        max_passages: int | None = None,
    ) -> None:
        """Create a reader.

        Args:
            retriever: the retriever of passages, with or without inner products; None: only
                `answer_from` can be called.
            writer: the model that completes the prompt.
            settings: the format of the prompt.
            k: default number of passages per question.
            max_passages: maximum number of passages that the retriever returns; `k` is limited to
                it.
        """
        self.retriever, self.writer, self.settings = retriever, writer, settings or PromptSettings()
        self.k = min(k, max_passages or k)

    @property
    def decides(self) -> dict[str, Any]:
        """The settings of the prompt and of the model that writes the answers, for memo keys."""
        return {"concat": asdict(self.settings), **self.writer.decides}

    def answer_from(
        self, questions: Sequence[str], hits: Sequence[Sequence[Hit]], callbacks: AnswerCallbacks = NO_CALLBACKS
    ) -> list[Answer]:
        """Return the answer to each question, in order, from the given hits; a question without
        hits is answered without passages.

        Raises:
            UsageError: a question is empty, no passage fits into the prompt beside a question or
                into the budget, or the number of hit lists differs from the number of questions.
            StoppedError: `callbacks.should_stop`, which is called before each token, returned True.
        """
        timer = AnswerTimer()
        check_hit_lists(questions, hits)
        check_queries(questions)
        contexts = [self.build_context(*question_and_hits) for question_and_hits in zip(questions, hits, strict=True)]
        prompts = [self.build_prompt(*pair) for pair in zip(questions, contexts, strict=True)]
        timer.end_stage(ASSEMBLY)
        completions = self.writer.write(prompts, callbacks.should_stop, callbacks.on_text)
        answers = [_build_answer(*parts) for parts in zip(questions, hits, contexts, completions, strict=True)]
        timer.end_stage(GENERATION)
        return add_stage_seconds(answers, timer)

    def log_likelihood(
        self, questions: Sequence[str], hits: Sequence[Sequence[Hit]], texts: Sequence[str]
    ) -> list[float]:
        """Return log p(text|question, passages) of each text in nats, with the end token.

        Without hits it is log p(text|question).

        Raises:
            UsageError: as for `answer_from`; or the writer's model does not compute likelihoods.
        """
        check_hit_lists(questions, hits)
        contexts = [self.build_context(*pair) for pair in zip(questions, hits, strict=True)]
        prompts = [self.build_prompt(*pair) for pair in zip(questions, contexts, strict=True)]
        return self.writer.log_likelihood(prompts, texts)

    def build_context(self, question: str, hits: Sequence[Hit]) -> PromptContext:
        """Return the passages that fit into the budget and into the writer's longest prompt.

        Raises:
            UsageError: no passage fits into the prompt.
        """
        system_message = self.settings.build_system_message(closed_book=False)
        token_counts = self.writer.count_tokens([system_message, self.settings.build_user_message(" ", question)])
        capacity = self.writer.max_prompt_tokens - sum(token_counts) - _SPARE_TOKENS
        if capacity < 1:
            raise UsageError(
                f"the question does not fit into the {self.writer.max_prompt_tokens} prompt tokens "
                f"of {self.writer.id}: ask a shorter question, or request a shorter answer"
            )
        budget = capacity if self.settings.budget is None else min(capacity, self.settings.budget)
        return assemble_context(
            hits, self.writer.count_tokens, budget, self.settings.order, with_dates=self.settings.is_dated
        )

    def build_prompt(self, question: str, context: PromptContext) -> Prompt:
        """Return the prompt for the writer."""
        return Prompt(
            self.settings.build_system_message(closed_book=not context.entries),
            self.settings.build_user_message(context.text, question),
        )


def _build_answer(question: str, hits: Sequence[Hit], context: PromptContext, completion: Completion) -> Answer:
    support = tuple(SupportingPassage(hit) for hit in hits)
    return Answer(
        question,
        completion.text,
        completion.log_likelihood,
        support,
        ended=completion.ended,
        usage=completion.usage,
        context=context.entries,
        problem=completion.problem,
    )
