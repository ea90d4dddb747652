"""What token vectors cost a passage, before any is made: bytes from the plan alone, seconds from a trial here."""

from dataclasses import dataclass
from time import process_time

import numpy as np

from rag_model.index.files.engine import Vectors
from rag_model.index.tokens import centroids
from rag_model.index.tokens.bits import ResidualBits
from rag_model.index.tokens.build import TokenPlan
from rag_model.index.tokens.codec import Codec, form_of
from rag_model.index.tokens.kind import TOKENS, bytes_a_token
from rag_model.index.tokens.products import ResidualProducts

_TRIED = 1_024  # tokens that are coded to measure
_FLOAT16 = 2  # bytes of a component as it is stored


@dataclass(frozen=True, slots=True)
class TokenCost:
    """The cost of one passage, of 100 words and a title."""

    tokens: int  # vectors
    vector_bytes: int  # of the representation: float16 on disk; readers need not pull it
    code_bytes: int  # of the index: what is searched
    coding_seconds: float  # of one core, to turn its vectors into codes
    centroids: int


def cost_of(plan: TokenPlan) -> TokenCost:
    """Return what a passage costs under a plan; codes some random vectors on this machine."""
    tokens = plan.n * TOKENS
    count = centroids.affordable(tokens, plan.train_sample or centroids.sample_size(tokens))
    vectors = centroids.unit(np.random.default_rng(0).standard_normal((_TRIED, plan.d), np.float32))
    codec = _untrained(plan, count)
    codec.encode(vectors[:64])  # the first call prepares threads and memory
    began = process_time()
    codec.encode(vectors)
    seconds = (process_time() - began) / _TRIED
    size = _FLOAT16 * plan.d * TOKENS
    return TokenCost(TOKENS, size, bytes_a_token(plan) * TOKENS + 8, seconds * TOKENS, count)


def _untrained(plan: TokenPlan, count: int) -> Codec:
    """Return a codec of the plan's sizes with random numbers: its speed does not depend on what it has learnt."""
    form, random = form_of(plan.factory, plan.d), np.random.default_rng(1)

    def drawn(*shape: int) -> Vectors:
        return random.standard_normal(shape, np.float32)

    cells = centroids.unit(drawn(count, plan.d))
    if form.bits:
        return ResidualBits(cells, np.sort(drawn((1 << form.bits) - 1)), np.sort(drawn(1 << form.bits)))
    books = drawn(form.pieces, 1 << form.piece_bits, plan.d // form.pieces)
    return ResidualProducts.of({"centroids": cells, "books": books})
