"""What a batch is made into: passages, or answers. Each batch runs on one edition, from the first to the last step."""

import time
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, TypeVar

from rag_model.errors import BookwheelError, UsageError
from rag_model.generate.reader import Answer
from rag_model.index.files.engine import Vectors
from rag_model.retrieve.retriever import Hit
from rag_model.serving.batcher import Ask
from rag_model.serving.desk import Desk
from rag_model.serving.edition import Edition
from rag_model.serving.observer import Batch, Observer, tell

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Found:
    """Passages for the questions of one request, all of one snapshot."""

    snapshot: str
    hits: list[list[Hit]]  # of each question, best first


@dataclass(frozen=True, slots=True)
class Answered:
    """Answers to the questions of one request, all from one snapshot and by one model."""

    snapshot: str
    model: str
    answers: list[Answer]


def search(desk: Desk, observer: Observer, asks: Sequence[Ask[Found]]) -> list[Found | BookwheelError]:
    """Encode all questions of a batch together, then search those of one index and depth together."""
    with desk.edition() as edition:
        began = time.perf_counter()
        vectors = edition.encode(_questions(asks))
        encoded = time.perf_counter()
        replies = _searched(edition, asks, vectors)
        seconds = encoded - began, time.perf_counter() - encoded
        tell(observer.searched, _batch(edition, asks, vectors, replies, *seconds))
        return replies


def answer(desk: Desk, observer: Observer, asks: Sequence[Ask[Answered]]) -> list[Answered | BookwheelError]:
    """Answer all questions of a batch, those of one depth together."""
    with desk.edition() as edition:
        model = "" if edition.model is None else edition.model.id
        replies: dict[int, Answered | BookwheelError] = {}
        for k, places in _alike([ask.k for ask in asks]).items():
            try:
                found = edition.answer(_questions([asks[place] for place in places]), k)
            except UsageError as wrong:
                replies.update(dict.fromkeys(places, wrong))
                continue
            tell(observer.answered, edition, found)
            answers = iter(found)
            for place in places:
                replies[place] = Answered(edition.id, model, [next(answers) for _ in asks[place].questions])
        return [replies[place] for place in range(len(asks))]


def _searched(edition: Edition, asks: Sequence[Ask[Found]], vectors: Vectors) -> list[Found | BookwheelError]:
    starts = [0, *accumulate(len(ask.questions) for ask in asks)]
    replies: dict[int, Found | BookwheelError] = {}
    for (index, k), places in _alike([(_index(edition, ask), ask.k or 1) for ask in asks]).items():
        rows = [row for place in places for row in range(starts[place], starts[place + 1])]
        try:
            hits = iter(edition.search(vectors[rows], k, index))
        except UsageError as wrong:  # no such index, or a snapshot of fewer passages
            replies.update(dict.fromkeys(places, wrong))
            continue
        for place in places:
            replies[place] = Found(edition.id, [next(hits) for _ in asks[place].questions])
    return [replies[place] for place in range(len(asks))]


def _batch(
    edition: Edition,
    asks: Sequence[Ask[Found]],
    vectors: Vectors,
    replies: Sequence[Found | BookwheelError],
    encode_seconds: float,
    search_seconds: float,
) -> Batch:
    """Describe what was found; asks that were refused are left out."""
    found = [(ask, reply) for ask, reply in zip(asks, replies, strict=True) if isinstance(reply, Found)]
    kept = [isinstance(reply, Found) for ask, reply in zip(asks, replies, strict=True) for _ in ask.questions]
    return Batch(
        edition=edition,
        questions=_questions([ask for ask, _ in found]),
        vectors=vectors if all(kept) else vectors[kept],
        indexes=[_index(edition, ask) for ask, _ in found for _ in ask.questions],
        ks=[ask.k or 1 for ask, _ in found for _ in ask.questions],
        hits=[hits for _, reply in found for hits in reply.hits],
        encode_seconds=encode_seconds,
        search_seconds=search_seconds,
    )


def _questions(asks: Sequence[Ask[Any]]) -> list[str]:
    return list(chain.from_iterable(ask.questions for ask in asks))


def _index(edition: Edition, ask: Ask[Found]) -> str:
    return ask.index or edition.indexes[0]


def _alike(keys: Sequence[_Key]) -> dict[_Key, list[int]]:
    """Return the places of each key."""
    places: defaultdict[_Key, list[int]] = defaultdict(list)
    for place, key in enumerate(keys):
        places[key].append(place)
    return places
