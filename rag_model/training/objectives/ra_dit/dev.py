"""What both stages of RA-DIT measure on the dev set: the likelihood of answers, and the passages that are found."""

from collections.abc import Sequence

import torch

from rag_model.encoders.trainable import TrainableEncoder
from rag_model.errors import UsageError
from rag_model.evaluation.answers.collapse import measure
from rag_model.evaluation.questions.match import Answers
from rag_model.generate.generator import Generator
from rag_model.generate.likelihood import log_prior, sequence_likelihood, target_log_p
from rag_model.training.data.examples import Example
from rag_model.training.data.memory import Memory, Recalled
from rag_model.training.objectives.ra_dit.recipe import RaDitRecipe


class DevSet:
    """Dev questions, answered by a question encoder and a generator over a snapshot."""

    def __init__(self, memory: Memory, dev: Sequence[Example], recipe: RaDitRecipe) -> None:
        """Take the questions that have an answer.

        Raises:
            UsageError: none has an answer.
        """
        self.examples = [one for one in dev if one.answers]
        if not self.examples:
            raise UsageError("no dev example has an answer to select the best weights: give a dev file with answers")
        self._memory, self._recipe = memory, recipe

    def measure(self, question: TrainableEncoder, generator: Generator) -> dict[str, float]:
        """Return the measures, from the passages that the encoder finds now.

        `nll`: the mean of -log Σ_c p_R(c|x) p_LM(y|c∘x) in nats, of first answers (eq. 2). `Success@k`: the share of
        questions with an answer in their passages. `distinct` and `spread`: signs of collapse.

        Raises:
            CollapsedError: all questions get the same passages, and the recipe refuses that.
        """
        questions = [one.question for one in self.examples]
        recalled = self._memory.recall(questions, question.encode_questions(questions), self._recipe.k)
        collapse = measure([[hit.passage.id for hit in some] for some in recalled.hits], self._memory.snapshot.n)
        if self._recipe.refuse_collapse:
            collapse.check(self._recipe.limits)
        found = [
            any(Answers(one.answers).are_in(hit.passage.text) for hit in some)
            for one, some in zip(self.examples, recalled.hits, strict=True)
        ]
        return {
            "nll": sum(self.losses(generator, recalled)) / len(questions),
            f"Success@{len(recalled.hits[0])}": sum(found) / len(found),
            "distinct": float(collapse.distinct),
            "spread": collapse.spread,
        }

    @torch.no_grad()
    def losses(self, generator: Generator, recalled: Recalled) -> list[float]:
        """Return -log p(y|x) of each question's first answer, with the passages given and their inner products."""
        every = zip(self.examples, recalled.hits, recalled.passages, strict=True)
        values = list[float]()
        for one, hits, passages in every:
            targets = generator.targets([one.answers[0]])
            log_p, _ = target_log_p(
                generator.logits(generator.contexts([one.question], [passages]), targets), targets.tokens
            )
            products = torch.tensor([[hit.inner_product for hit in hits]], device=log_p.device)  # (1, k)
            prior = log_prior(products, self._recipe.temperature)
            values.append(-float(sequence_likelihood(prior, log_p, targets.mask).log_p))
        return values
