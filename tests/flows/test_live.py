"""Words on a terminal as they come: the reply is on it once, whatever came before."""

import io
from typing import Any

import pytest

from flows.command.live import live
from flows.command.reply import Common


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    opened = Terminal()
    monkeypatch.setattr("sys.stdout", opened)
    return opened


def test_the_first_answer_grows_and_the_reply_follows_it(terminal: Terminal) -> None:
    with live("who?\n  ", None) as shown:
        assert shown is not None
        shown(0, "two")
        shown(1, "another one's")
        assert terminal.getvalue() == "who?\n  two"
        shown(0, " wo\x1brds")
    rest = shown.rest("who?\n  two wo\x1brds …\n  [1] A title")
    assert (terminal.getvalue(), rest) == ("who?\n  two wo\\u001brds", " …\n  [1] A title")


def test_an_answer_that_changed_is_shown_whole(terminal: Terminal) -> None:
    with live("who?\n  ", None) as shown:
        assert shown is not None
        shown(0, "one")
    assert shown.rest("who?\n  another") == "\n\nwho?\n  another"


def test_without_a_word_the_reply_is_all(terminal: Terminal) -> None:
    with live("who?\n  ", None) as shown:
        assert shown is not None
    assert (shown.rest("who?\n  (nothing)"), terminal.getvalue()) == ("who?\n  (nothing)", "")


def test_a_failure_stands_in_a_line_of_its_own(terminal: Terminal) -> None:
    def fail(shown: Any) -> None:
        shown(0, "half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), live("who?\n  ", None) as shown:
        fail(shown)
    assert terminal.getvalue() == "who?\n  half\n"


@pytest.mark.parametrize("piped", [True, False])
def test_programs_get_the_reply_alone(piped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", io.StringIO() if piped else Terminal())
    with live("who?\n  ", Common(json=not piped)) as shown:
        assert shown is None
