"""A terminal shows an answer while it is generated, and the reply continues it without repeating it."""

import io
from contextlib import redirect_stdout

import pytest

from flows.command.console import LiveAnswer, show_live_answer
from flows.command.reply import Common


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show_pieces(*pieces: tuple[int, str]) -> tuple[LiveAnswer, str]:
    """Stream pieces of answers; return the `LiveAnswer` and the text of the terminal."""
    with redirect_stdout(Terminal()) as terminal, show_live_answer("who?\n  ", None) as live_answer:
        assert live_answer is not None
        for piece in pieces:
            live_answer(*piece)
    return live_answer, terminal.getvalue()


def test_first_answer_grows_and_reply_continues_it() -> None:
    live_answer, terminal_text = show_pieces((0, "two"), (1, "another one's"), (0, " wo\x1brds"))
    assert terminal_text == "who?\n  two wo\\u001brds"
    assert live_answer.remove_shown_text("who?\n  two wo\x1brds …\n  [1] A title") == " …\n  [1] A title"


def test_changed_answer_is_shown_again() -> None:
    live_answer, _ = show_pieces((0, "one"))
    assert live_answer.remove_shown_text("who?\n  another") == "\n\nwho?\n  another"


def test_reply_is_shown_if_nothing_was_streamed() -> None:
    live_answer, terminal_text = show_pieces()
    assert (live_answer.remove_shown_text("who?\n  (nothing)"), terminal_text) == ("who?\n  (nothing)", "")


def test_failure_starts_new_line() -> None:
    def fail() -> None:
        with show_live_answer("who?\n  ", None) as live_answer:
            assert live_answer is not None
            live_answer(0, "half")
            raise KeyboardInterrupt

    with redirect_stdout(Terminal()) as terminal, pytest.raises(KeyboardInterrupt):
        fail()
    assert terminal.getvalue() == "who?\n  half\n"


@pytest.mark.parametrize("piped", [True, False])
def test_pipe_and_json_get_no_live_answer(piped: bool) -> None:
    stdout = io.StringIO() if piped else Terminal()
    with redirect_stdout(stdout), show_live_answer("who?\n  ", Common(json=not piped)) as live_answer:
        assert live_answer is None
