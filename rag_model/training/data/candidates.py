"""Candidates of a stale index, chosen among with the passage encoder as it is now."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from rag_model.corpus.records import Passage
from rag_model.encoders.encoder import Vectors
from rag_model.evaluation.questions.match import Answers
from rag_model.training.data.memory import Recalled

Encode = Callable[[Sequence[Passage]], Vectors]  # m passages -> (m, d) float32


def reranked(recalled: Recalled, asked: Vectors, encode: Encode, k: int) -> Recalled:
    """Return each question's best `k` passages by the inner product with the vectors that `encode` gives, best first.

    `asked`: (b, d) float32. Each passage is encoded once; ties keep the order of `recalled`. The vectors and the hits'
    scores are then those of `encode`.
    """
    every = {hit.passage.hash: hit.passage for some in recalled.hits for hit in some}
    places = {key: place for place, key in enumerate(every)}
    rows = np.array([[places[hit.passage.hash] for hit in some] for some in recalled.hits])  # (b, c)
    vectors = encode(list(every.values()))[rows]  # (m, d) -> (b, c, d)
    scores = np.einsum("bd,bcd->bc", asked, vectors)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]  # (b, k)
    chosen = zip(recalled.hits, order.tolist(), scores.tolist(), strict=True)
    hits = [
        [
            replace(some[place], rank=rank, score=own[place], inner_product=own[place])
            for rank, place in enumerate(best, start=1)
        ]
        for some, best, own in chosen
    ]
    return Recalled(hits, np.take_along_axis(vectors, order[:, :, None], axis=1))


def without_source(recalled: Recalled, statements: Sequence[str]) -> tuple[list[int], Recalled]:
    """Leave out the passages that hold a statement word for word, of each statement's own; equally many stay for each.

    Returns the places of the statements that still have a passage, and the passages of these.
    """
    kept = [
        [place for place, hit in enumerate(some) if not Answers((text,)).are_in(hit.passage.text)]
        for some, text in zip(recalled.hits, statements, strict=True)
    ]
    alive = [place for place, some in enumerate(kept) if some]
    count = min((len(kept[place]) for place in alive), default=0)
    hits = [[recalled.hits[place][at] for at in kept[place][:count]] for place in alive]
    vectors = [recalled.vectors[place][kept[place][:count]] for place in alive]
    return alive, Recalled(hits, np.stack(vectors) if vectors else recalled.vectors[:0])
