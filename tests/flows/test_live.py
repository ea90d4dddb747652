"""Words on a terminal as they come: the reply is on it once, whatever came before."""

import io
from contextlib import redirect_stdout

import pytest

from flows.command.console import LiveAnswer, show_live_answer
from flows.command.reply import Common


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(*pieces: tuple[int, str]) -> tuple[LiveAnswer, str]:
    """Show pieces on a terminal; return what showed them, and what is on the terminal."""
    with redirect_stdout(Terminal()) as terminal, show_live_answer("who?\n  ", None) as words:
        assert words is not None
        for piece in pieces:
            words(*piece)
    return words, terminal.getvalue()


def test_the_first_answer_grows_and_the_reply_follows_it() -> None:
    words, on_it = shown((0, "two"), (1, "another one's"), (0, " wo\x1brds"))
    assert on_it == "who?\n  two wo\\u001brds"
    assert words.rest("who?\n  two wo\x1brds …\n  [1] A title") == " …\n  [1] A title"


def test_an_answer_that_changed_is_shown_whole() -> None:
    words, _ = shown((0, "one"))
    assert words.rest("who?\n  another") == "\n\nwho?\n  another"


def test_without_a_word_the_reply_is_all() -> None:
    words, on_it = shown()
    assert (words.rest("who?\n  (nothing)"), on_it) == ("who?\n  (nothing)", "")


def test_a_failure_stands_in_a_line_of_its_own() -> None:
    def fail() -> None:
        with show_live_answer("who?\n  ", None) as words:
            assert words is not None
            words(0, "half")
            raise KeyboardInterrupt

    with redirect_stdout(Terminal()) as terminal, pytest.raises(KeyboardInterrupt):
        fail()
    assert terminal.getvalue() == "who?\n  half\n"


@pytest.mark.parametrize("piped", [True, False])
def test_programs_get_the_reply_alone(piped: bool) -> None:
    stdout = io.StringIO() if piped else Terminal()
    with redirect_stdout(stdout), show_live_answer("who?\n  ", Common(json=not piped)) as words:
        assert words is None
