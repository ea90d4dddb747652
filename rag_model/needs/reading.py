"""The cost of reading passages with a model: formulas that trainings and evaluations share.

They are upper bounds: every passage counts as a long one.
"""

from rag_model.encoders.architecture import Architecture
from rag_model.retrieve.indexes import sizes_of
from rag_model.retrieve.survey import survey
from rag_model.store.versions.snapshot import Snapshot

QUESTION = 32  # tokens of a question
PASSAGE = 160  # tokens of a passage and its title
PROMPT = QUESTION + PASSAGE + 32  # tokens of a generator's input without the answer
NUMBER = 4  # bytes of a float32


def weights(*models: Architecture) -> int:
    """Return the bytes of models' weights in float32."""
    return NUMBER * sum(model.parameters for model in models)


def retriever_bytes(snapshot: Snapshot, retriever: str | None) -> int:
    """Return the bytes of a retriever's indexes in memory: their files', and those of the vectors that rank.

    `retriever` is an expression; None: the snapshot's default. A model that reranks is not counted.

    Raises:
        UsageError: the expression is wrong, or the snapshot has no such index.
    """
    return sum(sum(sizes_of(snapshot, index).values()) for index in survey(snapshot, retriever).indexes)


def decoding_bytes(generator: Architecture, texts: int, answer: int) -> int:
    """Estimate the bytes to decode answers of `answer` tokens for `texts` prompts at once."""
    kept = 2 * generator.layers * generator.hidden * (PROMPT + answer)  # a key and a value
    return NUMBER * texts * (2 * kept + 2 * generator.vocabulary + 8 * generator.hidden * PROMPT)
