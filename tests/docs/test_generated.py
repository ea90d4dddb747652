"""Generated pages have every command and option, and autodoc reads docstrings as Markdown."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
from cyclopts import CycloptsError

from docs.generated import (
    as_restructured_text,
    list_deviations,
    name_variable,
    write_commands,
    write_deviations,
    write_environment,
)
from flows.cli import app
from rag_model.training.objectives.objective import list_objectives


def test_the_page_of_commands_has_every_command_and_option(tmp_path: Path) -> None:
    page = tmp_path / "reference" / "commands.md"
    write_commands(page)
    text = page.read_text(encoding="utf-8")
    for verb in (name for name in app if not name.startswith("-")):
        section = text.partition(f"\n## bookwheel {verb}\n")[2].partition("\n## ")[0]
        options = app[verb].assemble_argument_collection(parse_docstring=True)
        assert options
        for option in (option for option in options if option.show and option.name.startswith("--")):
            assert f"`{option.name}" in section, f"{verb} {option.name}"


def test_the_page_of_commands_lists_no_negative_flags(tmp_path: Path) -> None:
    """The command line refuses them, as `--no-json`; names such as `--no-mapped` would be negated twice."""
    with pytest.raises(CycloptsError, match="Unknown option"):
        app.parse_args(["show", "latest", "--store", "s", "--no-json"], exit_on_error=False, print_error=False)
    write_commands(tmp_path / "commands.md")
    text = (tmp_path / "commands.md").read_text(encoding="utf-8")
    assert "`--no-mapped`" in text
    assert not re.findall(r"`--[\w-]+, --no-[\w-]+`", text)


def test_the_page_of_options_has_the_variables_that_the_command_line_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_environment(tmp_path / "environment.md")
    rows = (tmp_path / "environment.md").read_text(encoding="utf-8").splitlines()
    serve = next(row for row in rows if row.startswith(f"| `{name_variable('--max-queries')}` | `4096` |"))
    assert "| `serve` |" in serve
    monkeypatch.setenv(name_variable("--max-queries"), "7")
    bound_arguments = app.parse_args(["serve", "--store", "s"], exit_on_error=False, print_error=False)[1]
    assert bound_arguments.arguments["max_queries"] == 7
    commands = {row.split(" | ")[0]: row.split(" | ")[2] for row in rows if row.startswith("| `")}
    assert "`index`" not in commands["| `BOOKWHEEL_INDEX`"].split(", ")
    assert len(commands) > 100


def test_the_page_of_deviations_has_the_defaults_of_the_settings(tmp_path: Path) -> None:
    page = tmp_path / "deviations.md"
    write_deviations(page)
    rows = page.read_text(encoding="utf-8").partition("| --- |")[2].splitlines()[1:]
    for objective in list_objectives():
        settings = objective.settings()
        tables = [getattr(settings, table.name) for table in fields(settings)]
        deviations = list_deviations(objective)
        assert {deviation.name for deviation in deviations} >= {"warmup_share", "precision"}, "the training loop's"
        for deviation in deviations:
            values = [getattr(table, deviation.name) for table in tables if hasattr(table, deviation.name)]
            assert values, deviation
            number = deviation.value.split()[0].strip('"')
            assert not number[0].isdigit() or "unit length" in deviation.value or float(number) in values, deviation
            cells = f"| `{deviation.name}` |", deviation.value, deviation.published, deviation.reason
            (row,) = [row for row in rows if all(cell in row for cell in cells)]
            assert row.startswith("| all |") or f"`{objective.name}`" in row


def test_an_unchanged_page_is_not_written_again(tmp_path: Path) -> None:
    page = tmp_path / "commands.md"
    write_commands(page)
    page.chmod(0o444)
    modified = page.stat().st_mtime_ns
    write_commands(page)
    assert page.stat().st_mtime_ns == modified


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
