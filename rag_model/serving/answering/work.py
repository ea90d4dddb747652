"""Turn a batch of requests into passages or answers. Each batch runs on one edition, from first to last step."""

import time
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from typing import Any, TypeVar

from rag_model.errors import BookwheelError, StoppedError, UsageError
from rag_model.reading.answer import Answer
from rag_model.retrieve.questions import Questions
from rag_model.retrieve.retriever import Hit
from rag_model.serving.answering.batcher import LeftError
from rag_model.serving.answering.edition import Edition
from rag_model.serving.answering.growing import Piece, Sources
from rag_model.serving.answering.waiting import Ask
from rag_model.serving.following.desk import Desk
from rag_model.serving.watching.observer import Batch, Observer, tell

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


class _Watch:
    """Tells the requests of a batch what is found and written for their own questions."""

    def __init__(self, snapshot: str, model: str, asks: Sequence[Ask[Answered]]) -> None:
        self._snapshot, self._model = snapshot, model
        own = [(ask.growing, place) for ask in asks for place in range(len(ask.questions))]
        self._own = own  # of each question of the batch: whom to tell, and its place in that request
        self.wanted = any(growing is not None for growing, _ in own)

    def found(self, hits: Sequence[Sequence[Hit]]) -> None:
        """Tell the passages."""
        for growing, place in self._own:
            if growing is not None and place == 0:
                of_it = [some for (one, _), some in zip(self._own, hits, strict=True) if one is growing]
                growing.found(Sources(self._snapshot, self._model, of_it))

    def grew(self, row: int, text: str) -> None:
        """Tell a piece of an answer."""
        growing, place = self._own[row]
        if growing is not None:
            growing.grew(Piece(place, text))


def search(desk: Desk, observer: Observer, asks: Sequence[Ask[Found]]) -> list[Found | BookwheelError]:
    """Find passages for all questions of a batch; those with the same retriever are searched together."""
    with desk.edition() as edition:
        replies: dict[int, Found | BookwheelError] = {}
        for retriever, places in _alike([ask.retriever for ask in asks]).items():
            found = _searched(edition, observer, retriever, [asks[place] for place in places])
            replies.update(zip(places, found, strict=True))
        return [replies[place] for place in range(len(asks))]


def answer(desk: Desk, observer: Observer, asks: Sequence[Ask[Answered]]) -> list[Answered | BookwheelError]:
    """Answer all questions of a batch; those with the same retriever and depth are answered together.

    Decoding stops between two tokens once all callers of the questions have left. What is found and written is told
    to those callers that do not wait for the whole.
    """
    with desk.edition() as edition:
        model = "" if edition.model is None else edition.model.id
        replies: dict[int, Answered | BookwheelError] = {}
        for (retriever, k), places in _alike([(ask.retriever, ask.k) for ask in asks]).items():
            together = [asks[place] for place in places]
            try:
                watch = _Watch(edition.id, model, together)
                told = (watch.found, watch.grew) if watch.wanted else (None, None)
                found = edition.answer(_questions(together), k, retriever, partial(_left, together), *told)
            except UsageError as wrong:
                if len(places) > 1:
                    raise  # of which question is not known: each request is answered by itself
                replies[places[0]] = wrong
                continue
            except StoppedError as stopped:
                replies.update(dict.fromkeys(places, LeftError(str(stopped))))
                continue
            tell(observer.answered, edition, found)
            answers = iter(found)
            for place in places:
                replies[place] = Answered(edition.id, model, [next(answers) for _ in asks[place].questions])
        return [replies[place] for place in range(len(asks))]


def _searched(
    edition: Edition, observer: Observer, retriever: str | None, asks: Sequence[Ask[Found]]
) -> list[Found | BookwheelError]:
    """Search with one retriever: the questions of all asks are encoded at once, and searched depth by depth."""
    began = time.perf_counter()
    asked = Questions(_questions(asks))
    starts = [0, *accumulate(len(ask.questions) for ask in asks)]
    replies: dict[int, Found | BookwheelError] = {}
    for k, places in _alike([ask.k or 1 for ask in asks]).items():
        if _left(asks[place] for place in places):
            replies.update(dict.fromkeys(places, LeftError("its caller has left")))
            continue
        rows = [row for place in places for row in range(starts[place], starts[place + 1])]
        try:
            hits = iter(edition.search(asked if len(rows) == len(asked) else asked.some(rows), k, retriever))
        except UsageError as wrong:  # no such retriever, or one that gives fewer passages
            replies.update(dict.fromkeys(places, wrong))
            continue
        for place in places:
            replies[place] = Found(edition.id, [next(hits) for _ in asks[place].questions])
    told = [replies[place] for place in range(len(asks))]
    if batch := _batch(edition, retriever, asks, asked, told, time.perf_counter() - began):
        tell(observer.searched, batch)
    return told


def _batch(
    edition: Edition,
    retriever: str | None,
    asks: Sequence[Ask[Found]],
    asked: Questions,
    replies: Sequence[Found | BookwheelError],
    seconds: float,
) -> Batch | None:
    """Describe what was found; asks that were refused are left out. None: all were."""
    found = [(ask, reply) for ask, reply in zip(asks, replies, strict=True) if isinstance(reply, Found)]
    if not found:
        return None
    vectors = asked.known(edition.asker)
    if vectors is not None and len(found) < len(asks):
        vectors = vectors[
            [isinstance(one, Found) for ask, one in zip(asks, replies, strict=True) for _ in ask.questions]
        ]
    return Batch(
        edition=edition,
        retriever=edition.retrievers[0] if retriever is None else retriever,
        questions=_questions([ask for ask, _ in found]),
        vectors=vectors,
        ks=[ask.k or 1 for ask, _ in found for _ in ask.questions],
        hits=[hits for _, reply in found for hits in reply.hits],
        encode_seconds=asked.seconds,
        search_seconds=seconds - asked.seconds,
    )


def _left(asks: Iterable[Ask[Any]]) -> bool:
    """Return whether no caller waits any more."""
    return all(ask.left for ask in asks)


def _questions(asks: Sequence[Ask[Any]]) -> list[str]:
    return list(chain.from_iterable(ask.questions for ask in asks))


def _alike(keys: Sequence[_Key]) -> dict[_Key, list[int]]:
    """Return the positions of each key."""
    places: defaultdict[_Key, list[int]] = defaultdict(list)
    for place, key in enumerate(keys):
        places[key].append(place)
    return places
