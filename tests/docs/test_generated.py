"""What the pages take from the code: every command with its options, and docstrings that autodoc reads as meant."""

from pathlib import Path

import pytest

from docs.generated import as_restructured_text, write_commands
from flows.cli import app


def test_the_page_of_commands_has_every_command_and_option(tmp_path: Path) -> None:
    page = tmp_path / "reference" / "commands.md"
    write_commands(page)
    text = page.read_text(encoding="utf-8")
    for verb in (name for name in app if not name.startswith("-")):
        section = text.partition(f"\n## bookwheel {verb}\n")[2].partition("\n## ")[0]
        options = app[verb].assemble_argument_collection(parse_docstring=True)
        assert options
        for option in (option for option in options if option.parameter.show and option.name.startswith("--")):
            assert f"`{option.name}" in section, f"{verb} {option.name}"


def test_a_page_that_would_not_change_is_not_written_again(tmp_path: Path) -> None:
    page = tmp_path / "commands.md"
    write_commands(page)
    page.chmod(0o444)
    before = page.stat().st_mtime_ns
    write_commands(page)
    assert page.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("markdown", "restructured"),
    [
        (["p(z|x), not `p(z|x)`"], [r"p(z\|x), not `p(z|x)`"]),
        (["facebook/rag-* and `dpr-*`"], [r"facebook/rag-\* and `dpr-*`"]),
        (["Three:", "* one", "  and more", "* two"], ["Three:", "", "* one", "  and more", "* two"]),
        (["| to | take |", "| --- | --- |", "| a*b | `c` |"], ["| to: take", r"| a\*b: `c`"]),
    ],
)
def test_a_docstring_is_read_as_markdown(markdown: list[str], restructured: list[str]) -> None:
    lines = list(markdown)
    as_restructured_text(None, "function", "name", None, None, lines)
    assert lines == restructured
