"""Server-sent events, cut anywhere."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as some

from rag_model.reading.writers.chat_events import EventParser

DATA = ["{}", "été 🗼", "[DONE]", "two\nlines"]
SENT = "".join(f": alive\r\n{''.join(f'data: {line}{end}' for line in data.splitlines())}{end}"
               for data, end in zip(DATA, ["\n", "\r\n", "\n", "\n"], strict=True)).encode()  # fmt: skip


@given(some.lists(some.integers(0, len(SENT)), max_size=8))
def test_the_data_does_not_depend_on_how_the_bytes_come(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(SENT)]
    events = EventParser()
    found = [data for start, end in pairwise(places) for data in events.feed(SENT[start:end])]
    assert [*found, *events.finish()] == DATA


def test_the_last_event_needs_no_empty_line() -> None:
    events = EventParser()
    assert list(events.feed(b"data: one\n\ndata: two")) == ["one"]
    assert list(events.finish()) == ["two"]
