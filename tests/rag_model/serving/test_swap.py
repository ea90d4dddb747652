"""Swapping snapshots under load: no request fails, and no reply mixes two snapshots."""

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from rag_model.serving.monitoring.observer import Observer
from tests.fixtures.serving import TIMEOUT, Library, make_settings, run_service, wait_until
from tests.fixtures.tiny_rag import save_tiny_rag

CLIENTS = 3
REF_MOVES = 3


class Swaps(Observer):
    """Counts the loaded snapshots that became current."""

    def __init__(self) -> None:
        self.count = 0

    def on_swap(self, loaded_snapshot: object, seconds: float) -> None:
        self.count += 1


def collect_colours(passages: list[dict[str, Any]]) -> set[str]:
    return {passage["title"].split()[0] for passage in passages}


def test_no_request_fails_and_no_reply_mixes_snapshots(library: Library, dest: Path, tmp_path: Path) -> None:
    """Clients search and ask while the ref moves between two snapshots as fast as the service follows it."""
    model = save_tiny_rag(tmp_path / "rag", library.encoder, "sequence")
    swaps, done = Swaps(), threading.Event()
    replies: list[tuple[str, httpx.Response]] = []
    failures: list[BaseException] = []

    with run_service(
        library.url, dest, make_settings(poll_seconds=0.01, workers=2), swaps, model=str(model)
    ) as service:

        def ask(number: int) -> None:
            verb = "answer" if number == 0 else "search"
            try:
                with httpx.Client(base_url=service.url, timeout=TIMEOUT) as client:
                    while not done.is_set():
                        request: dict[str, Any] = {
                            "questions": ["who was the king?", f"river {len(replies)}"][: 1 + number % 2]
                        }
                        request["k"] = 1 if verb == "answer" else 3
                        replies.append((verb, client.post(f"/{verb}", json=request)))
            except BaseException as failure:
                failures.append(failure)

        clients = [threading.Thread(target=ask, args=(number,)) for number in range(CLIENTS)]
        for client in clients:
            client.start()
        try:
            for number in range(REF_MOVES):
                library.move((library.blue, library.red)[number % 2])
                wait_until(lambda change=number: swaps.count >= change + 2)
                # The first reply to each client may still be one from the snapshot before.
                expected = Counter(verb for verb, _ in replies) + Counter(answer=2, search=CLIENTS)
                wait_until(lambda min_counts=expected: failures or Counter(verb for verb, _ in replies) >= min_counts)
        finally:
            done.set()
            for client in clients:
                client.join()
        wait_until(lambda: service.service.slot.loaded_count == 1)

    assert not failures
    assert {reply.status_code for _, reply in replies} == {200}
    assert swaps.count == REF_MOVES + 1
    served_colours = set()
    for verb, reply in replies:
        body = reply.json()
        colour = library.colour(body["snapshot"])
        served_colours.add((verb, colour))
        for result in body["results" if verb == "search" else "answers"]:
            assert collect_colours(result["hits" if verb == "search" else "passages"]) == {colour}
    assert served_colours == {(verb, colour) for verb in ("search", "answer") for colour in ("red", "blue")}
