"""Changing editions under load: nobody fails, and no reply mixes two snapshots."""

import threading
from pathlib import Path
from typing import Any

import httpx

from rag_model.serving.monitoring.observer import Observer
from tests.fixtures.serving import PATIENCE, Library, serving, until, with_limits
from tests.fixtures.tiny_rag import save_tiny_rag

CLIENTS = 3
CHANGES = 6


class Swaps(Observer):
    """Counts the editions that served."""

    def __init__(self) -> None:
        self.count = 0

    def on_swap(self, edition: object, seconds: float) -> None:
        self.count += 1


def colours_of(passages: list[dict[str, Any]]) -> set[str]:
    return {passage["title"].split()[0] for passage in passages}


def test_nobody_fails_and_nothing_is_mixed(library: Library, dest: Path, tmp_path: Path) -> None:
    """Searches and answers go on while the ref moves to and fro as fast as it is followed."""
    model = save_tiny_rag(tmp_path / "rag", library.encoder, "sequence")
    swaps, done = Swaps(), threading.Event()
    replies: list[tuple[str, httpx.Response]] = []
    failures: list[BaseException] = []

    with serving(library.url, dest, with_limits(poll_seconds=0.01, workers=2), swaps, model=str(model)) as found:

        def ask(number: int) -> None:
            verb = "answer" if number == 0 else "search"
            try:
                with httpx.Client(base_url=found.url, timeout=PATIENCE) as client:
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
            for number in range(CHANGES):
                asked = len(replies)
                library.move((library.blue, library.red)[number % 2])
                until(lambda change=number: swaps.count >= change + 2)
                until(lambda before=asked: len(replies) > before + CLIENTS or failures)
        finally:
            done.set()
            for client in clients:
                client.join()
        until(lambda: found.service.slot.loaded_count == 1)

    assert not failures
    assert {reply.status_code for _, reply in replies} == {200}
    assert swaps.count == CHANGES + 1
    seen = set()
    for verb, reply in replies:
        told = reply.json()
        colour = library.colour(told["snapshot"])
        seen.add((verb, colour))
        for one in told["results" if verb == "search" else "answers"]:
            assert colours_of(one["hits" if verb == "search" else "passages"]) == {colour}
    assert seen == {(verb, colour) for verb in ("search", "answer") for colour in ("red", "blue")}
