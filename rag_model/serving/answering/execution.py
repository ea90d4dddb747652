"""Execute a batch of search or answer requests on one loaded snapshot."""

import time
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from typing import Any, TypeVar

from rag_model.errors import BookwheelError, StoppedError, UsageError
from rag_model.reading.answer import Answer
from rag_model.reading.reader import AnswerCallbacks
from rag_model.retrieve.hits import Hit
from rag_model.retrieve.retriever import Queries
from rag_model.serving.answering.batcher import AnswerDelta, ClientGoneError, QueuedRequest, RetrievedPassages
from rag_model.serving.answering.loaded_snapshot import LoadedSnapshot
from rag_model.serving.following.snapshot_slot import SnapshotSlot
from rag_model.serving.monitoring.observer import Observer, SearchBatch, notify
from rag_model.serving.monitoring.tracing import add_answer_stages, add_search_stages

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Passages for the questions of one request; all are from the same snapshot."""

    snapshot: str
    hits: list[list[Hit]]  # hits of each question, best first


@dataclass(frozen=True, slots=True)
class AnswerResult:
    """Answers to the questions of one request; all are from the same snapshot and model."""

    snapshot: str
    model: str
    answers: list[Answer]


class _ProgressReporter:
    """Passes retrieved passages and new text on to those requests of a batch that stream."""

    def __init__(self, snapshot: str, model_id: str, requests: Sequence[QueuedRequest[AnswerResult]]) -> None:
        self._snapshot, self._model = snapshot, model_id
        recipients = [(request.progress, i) for request in requests for i in range(len(request.questions))]
        # for each question of the batch: the progress of its request, and its position there
        self._recipients = recipients
        self.has_listeners = any(progress is not None for progress, _ in recipients)

    def report_passages(self, hits: Sequence[Sequence[Hit]]) -> None:
        """Pass the passages of each question to its request."""
        for progress, position in self._recipients:
            if progress is not None and position == 0:
                request_hits = [
                    passages
                    for (recipient, _), passages in zip(self._recipients, hits, strict=True)
                    if recipient is progress
                ]
                progress.set_passages(RetrievedPassages(self._snapshot, self._model, request_hits))

    def report_text(self, row: int, text: str) -> None:
        """Pass new text of the answer to question `row` of the batch."""
        progress, position = self._recipients[row]
        if progress is not None:
            progress.append_delta(AnswerDelta(position, text))


def search_batch(
    slot: SnapshotSlot, observer: Observer, requests: Sequence[QueuedRequest[SearchResult]]
) -> list[SearchResult | BookwheelError]:
    """Search for all requests of a batch; those with the same retriever are searched together."""
    reply_by_position: dict[int, SearchResult | BookwheelError] = {}
    with ExitStack() as stack:
        if any(request.loaded_snapshot is None for request in requests):
            current_snapshot = stack.enter_context(slot.acquire())
        snapshots = [request.loaded_snapshot or current_snapshot for request in requests]
        keys = zip(map(id, snapshots), (request.retriever for request in requests), strict=True)
        for (_, retriever), positions in _group_positions(list(keys)).items():
            group_requests = [requests[position] for position in positions]
            request_results = _search_with_retriever(snapshots[positions[0]], observer, retriever, group_requests)
            reply_by_position.update(zip(positions, request_results, strict=True))
    return [reply_by_position[position] for position in range(len(requests))]


def answer_batch(
    slot: SnapshotSlot, observer: Observer, requests: Sequence[QueuedRequest[AnswerResult]]
) -> list[AnswerResult | BookwheelError]:
    """Answer all requests of a batch; requests with the same retriever and depth run together.

    Decoding stops between two tokens once all clients have disconnected. Requests with a `progress`
    receive the passages and the text as soon as they exist.
    """
    with slot.acquire() as loaded_snapshot:
        model_id = "" if loaded_snapshot.model is None else loaded_snapshot.model.id
        reply_by_position: dict[int, AnswerResult | BookwheelError] = {}
        for (retriever, k), positions in _group_positions(
            [(request.retriever, request.k) for request in requests]
        ).items():
            group_requests = [requests[position] for position in positions]
            start_ns = time.time_ns()
            try:
                reporter = _ProgressReporter(loaded_snapshot.id, model_id, group_requests)
                listeners = (reporter.report_text, reporter.report_passages) if reporter.has_listeners else ()
                callbacks = AnswerCallbacks(partial(_are_abandoned, group_requests), *listeners)
                batch_answers = loaded_snapshot.answer(_list_questions(group_requests), k, retriever, callbacks)
            except UsageError as error:
                if len(positions) > 1:
                    # The batcher then repeats the requests one by one, so that only the faulty
                    # request fails.
                    raise
                reply_by_position[positions[0]] = error
                continue
            except StoppedError as stopped:
                reply_by_position.update(dict.fromkeys(positions, ClientGoneError(str(stopped))))
                continue
            notify(observer.on_answer, loaded_snapshot, batch_answers)
            attributes = {
                "bookwheel.snapshot": loaded_snapshot.id,
                "bookwheel.model": model_id,
                "bookwheel.batch": len(batch_answers),
            }
            notify(add_answer_stages, group_requests, start_ns, attributes)
            remaining_answers = iter(batch_answers)
            for position in positions:
                reply_by_position[position] = AnswerResult(
                    loaded_snapshot.id, model_id, [next(remaining_answers) for _ in requests[position].questions]
                )
        return [reply_by_position[position] for position in range(len(requests))]


def _search_with_retriever(
    snapshot: LoadedSnapshot,
    observer: Observer,
    retriever: str | None,
    requests: Sequence[QueuedRequest[SearchResult]],
) -> list[SearchResult | BookwheelError]:
    """Search with one retriever: encode all questions together, and search once for each `k`."""
    start_time, start_ns = time.perf_counter(), time.time_ns()
    queries = Queries(_list_questions(requests))
    first_rows = [0, *accumulate(len(request.questions) for request in requests)]
    reply_by_position: dict[int, SearchResult | BookwheelError] = {}
    for k, positions in _group_positions([request.k for request in requests]).items():
        if _are_abandoned(requests[position] for position in positions):
            reply_by_position.update(dict.fromkeys(positions, ClientGoneError("the client has disconnected")))
            continue
        rows = [row for position in positions for row in range(first_rows[position], first_rows[position + 1])]
        try:
            hits = iter(snapshot.search(queries if len(rows) == len(queries) else queries.subset(rows), k, retriever))
        except UsageError as error:  # unknown retriever, or fewer than k passages
            reply_by_position.update(dict.fromkeys(positions, error))
            continue
        for position in positions:
            reply_by_position[position] = SearchResult(snapshot.id, [next(hits) for _ in requests[position].questions])
    results = [reply_by_position[position] for position in range(len(requests))]
    if any(request.trace is not None for request in requests):
        attributes = {
            "bookwheel.snapshot": snapshot.id,
            "bookwheel.retriever": snapshot.retrievers[0] if retriever is None else retriever,
            "bookwheel.batch": len(queries),
        }
        notify(add_search_stages, requests, start_ns, queries.encoding_seconds, queries.reading_seconds, attributes)
    if batch_record := _describe_batch(
        snapshot, retriever, requests, queries, results, time.perf_counter() - start_time
    ):
        notify(observer.on_search, batch_record)
    return results


def _describe_batch(
    loaded_snapshot: LoadedSnapshot,
    retriever: str | None,
    requests: Sequence[QueuedRequest[SearchResult]],
    queries: Queries,
    replies: Sequence[SearchResult | BookwheelError],
    seconds: float,
) -> SearchBatch | None:
    """Describe the successful requests of a batch for observers; None if no request succeeded."""
    answered_requests = [
        (request, reply) for request, reply in zip(requests, replies, strict=True) if isinstance(reply, SearchResult)
    ]
    if not answered_requests:
        return None
    query_vectors = queries.find_vectors(loaded_snapshot.question_encoder)
    if query_vectors is not None and len(answered_requests) < len(requests):
        query_vectors = query_vectors[
            [
                isinstance(reply, SearchResult)
                for request, reply in zip(requests, replies, strict=True)
                for _ in request.questions
            ]
        ]
    return SearchBatch(
        loaded_snapshot=loaded_snapshot,
        retriever=loaded_snapshot.retrievers[0] if retriever is None else retriever,
        questions=_list_questions([request for request, _ in answered_requests]),
        vectors=query_vectors,
        ks=[request.k for request, reply in answered_requests for _ in reply.hits],
        hits=[hits for _, reply in answered_requests for hits in reply.hits],
        encode_seconds=queries.encoding_seconds,
        search_seconds=seconds - queries.encoding_seconds,
    )


def _are_abandoned(requests: Iterable[QueuedRequest[Any]]) -> bool:
    """Return whether all clients have disconnected."""
    return all(request.is_abandoned for request in requests)


def _list_questions(requests: Sequence[QueuedRequest[Any]]) -> list[str]:
    return list(chain.from_iterable(request.questions for request in requests))


def _group_positions(keys: Sequence[_Key]) -> dict[_Key, list[int]]:
    """Return, for each distinct key, the positions at which it occurs."""
    positions: defaultdict[_Key, list[int]] = defaultdict(list)
    for position, key in enumerate(keys):
        positions[key].append(position)
    return positions
