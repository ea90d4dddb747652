"""Ask a model which memory answered: the weights alone, or the passages read (`grounding`)."""

from dataclasses import dataclass
from typing import Protocol

from rag_model.reading.answer import Answer, Usage
from rag_model.reading.confidence import Scores
from rag_model.reading.reader import Reader, Stop
from rag_model.serving.answering.asking import ServedModel
from rag_model.serving.watching.grounding import is_remembered, is_repeated


@dataclass(frozen=True, slots=True)
class Checked:
    """What a check of one answer found."""

    override: bool
    usage: Usage | None = None  # what an endpoint was asked for it; None: nothing was asked


class Memory(Protocol):
    """Checks answers that no passage read supports."""

    def check(self, answer: Answer, stop: Stop) -> Checked:
        """Return whether the weights alone gave `answer`.

        Raises:
            StoppedError: `stop` was true.
            BookwheelError: the model could not be asked.
        """
        ...


@dataclass(frozen=True, slots=True)
class Weighed:
    """Compares the likelihoods of the answer; writes nothing, and takes no heed of `stop`."""

    scores: Scores

    def check(self, answer: Answer, stop: Stop) -> Checked:
        """Return `is_remembered`."""
        return Checked(is_remembered(self.scores, answer))


@dataclass(frozen=True, slots=True)
class AskedAgain:
    """Asks the question once more, closed book."""

    reader: Reader

    def check(self, answer: Answer, stop: Stop) -> Checked:
        """Return `is_repeated` of the closed-book answer, and its tokens."""
        (alone,) = self.reader.answer_from([answer.question], [()], stop)
        return Checked(is_repeated(answer, alone), alone.usage)


def has_memory(model: ServedModel | None) -> bool:
    """Return whether a model can be asked: one behind an endpoint, or one that tells likelihoods."""
    return model is not None and (model.tells_likelihoods or not model.is_here)


def memory_of(model: ServedModel) -> Memory:
    """Return what checks the answers of a model.

    Raises:
        UsageError: it is in memory, and tells no likelihoods: `has_memory` is false.
    """
    return Weighed(model.scores()) if model.is_here else AskedAgain(model.uncited())
