"""Server-sent events, whose bytes arrive in any pieces."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as some

from rag_model.reading.writers.chat_events import EventParser

DATA = ["{}", "été 🗼", "[DONE]", "two\nlines"]
STREAM = "".join(f": alive\r\n{''.join(f'data: {line}{end}' for line in data.splitlines())}{end}"
               for data, end in zip(DATA, ["\n", "\r\n", "\n", "\n"], strict=True)).encode()  # fmt: skip


@given(some.lists(some.integers(0, len(STREAM)), max_size=8))
def test_data_does_not_depend_on_the_pieces(cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), len(STREAM)]
    events = EventParser()
    received = [data for start, end in pairwise(bounds) for data in events.feed(STREAM[start:end])]
    assert [*received, *events.finish()] == DATA


def test_last_event_needs_no_empty_line() -> None:
    events = EventParser()
    assert list(events.feed(b"data: one\n\ndata: two")) == ["one"]
    assert list(events.finish()) == ["two"]
