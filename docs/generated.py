"""What the pages take from the code: the help of each command, and docstrings."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from cyclopts.docs.markdown import generate_markdown_docs

from flows.cli import app, select_environment_options
from rag_model.training.objectives.objective import Objective, get_objective, list_objective_names
from rag_model.training.settings import parse_field_comments, render_value

_HEAD = """# Commands

This page is generated from the help texts of the command line: `bookwheel COMMAND --help` prints the same.

Settings come from the flag, then the environment (`BOOKWHEEL_STORE`, …), then `bookwheel.toml` in the working folder
or a parent folder, then the default. Every command takes `--json`: one JSON document on standard output, progress on
standard error. The document of a failure has the sentence `error` and the `exit_code`. Exit codes:
0 ok, 1 failure, 2 usage, 3 a gate or a verification failed.
"""
_DEVIATIONS_HEAD = """# Deviations from the papers

This page is generated from the comments of the settings, which `bookwheel finetune OBJECTIVE --print-settings` prints
too. All other defaults are those of the paper or of its authors' code.

| objective | setting | default | paper or code | reason |
| --- | --- | --- | --- | --- |"""
_DEVIATION = re.compile(r"(?:^|; )([^;]*?),? ?instead of ([^;]*?), because ([^;]*)")
_ENVIRONMENT_HEAD = """# Options in the environment

This page is generated from the command line. Each variable sets an option of the commands in its row; a flag takes
precedence. An empty default means that the option is not set. [Environment
variables](../howto/install.md#environment-variables) has the variables that are not options.

| variable | default | commands | meaning |
| --- | --- | --- | --- |"""
_MANY_VERBS = 20  # an option of more commands is one of all, but for a few that need no store
_CODE_SPAN = re.compile(r"(`+[^`]*`+)")
_ITEM = re.compile(r"\s*([*-]|\d+\.)\s")


def write_commands(path: Path) -> None:
    """Write a page with the help of every command, each with the docstring of its function.

    Args:
        path: the Markdown file; it is not touched when nothing has changed, so that the next build reuses the page.
    """
    _write_if_changed(path, "\n".join([_HEAD, *(_help(verb) for verb in app if not verb.startswith("-"))]))


def _write_if_changed(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def write_deviations(path: Path) -> None:
    """Write a page with the defaults of all objectives that differ from a paper or its code.

    The comments of the settings are the source. Objectives with equal rows share one.
    """
    rows: dict[tuple[str, str, str], tuple[list[str], list[str]]] = {}
    names = list_objective_names()
    for name in names:
        for deviation in list_deviations(get_objective(name)):
            key = deviation.name, deviation.published, deviation.reason
            objectives, values = rows.setdefault(key, ([], []))
            objectives.extend([name] if name not in objectives else [])
            values.extend([deviation.value] if deviation.value not in values else [])
    lines = [
        f"| {_list_objectives(objectives, names)} | `{setting}` | {'; '.join(values)} | {published} | {reason} |"
        for (setting, published, reason), (objectives, values) in rows.items()
    ]
    _write_if_changed(path, "\n".join([_DEVIATIONS_HEAD, *lines]) + "\n")


@dataclass(frozen=True, slots=True)
class Deviation:
    """A default of an objective that differs from its paper or the authors' code."""

    name: str  # name of the setting
    value: str  # the default
    published: str  # the value of the paper or the code
    reason: str


def list_deviations(objective: Objective[Any]) -> list[Deviation]:
    """Return the deviations that the comments of an objective's settings give.

    A comment has a clause `VALUE instead of PUBLISHED, because REASON`; clauses end at a semicolon.
    Without VALUE the value is the field's default. In a table's comment, VALUE is `NAME = VALUE`.
    """
    return list(_iter_deviations(objective.settings()))


def _iter_deviations(settings: Any) -> Iterator[Deviation]:
    comments = parse_field_comments(type(settings))
    for setting in fields(settings):
        value = getattr(settings, setting.name)
        for default, published, reason in _DEVIATION.findall(comments.get(setting.name, "")):
            if is_dataclass(value):
                name, _, table_value = default.partition(" = ")
                yield Deviation(name, table_value, published, reason)
            else:
                yield Deviation(setting.name, default or render_value(value), published, reason)
        if is_dataclass(value):
            yield from _iter_deviations(value)


def write_environment(path: Path) -> None:
    """Write a page with the environment variables of all options of the commands.

    Options of several commands share a row. The defaults and the help of the first one are shown.
    """
    rows: dict[str, tuple[Any, list[str]]] = {}
    for verb in (name for name in app if not name.startswith("-")):
        arguments = app[verb].assemble_argument_collection(parse_docstring=True)
        for argument in select_environment_options((verb,), arguments):
            if argument.show and argument.name.startswith("--"):
                rows.setdefault(name_variable(argument.name), (argument, []))[1].append(verb)
    lines = [
        f"| `{variable}` | {_format_default(argument)}| {_list_verbs(verbs)} | {_as_cell(argument.parameter.help)} |"
        for variable, (argument, verbs) in sorted(rows.items())
    ]
    _write_if_changed(path, "\n".join([_ENVIRONMENT_HEAD, *lines]) + "\n")


def name_variable(option: str) -> str:
    """Return the environment variable of an option.

    >>> name_variable("--max-queries")
    'BOOKWHEEL_MAX_QUERIES'
    """
    return f"BOOKWHEEL_{option.removeprefix('--').replace('-', '_').upper()}"


def _format_default(argument: Any) -> str:
    default = argument.field_info.default
    if argument.required:
        return "required "
    return "" if default is None or default is False or default in ((), "") else f"`{default}` "


def _list_verbs(verbs: list[str]) -> str:
    return "all commands" if len(verbs) > _MANY_VERBS else ", ".join(f"`{verb}`" for verb in verbs)


def _as_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _list_objectives(objectives: list[str], names: tuple[str, ...]) -> str:
    return "all" if len(objectives) == len(names) else ", ".join(f"`{name}`" for name in objectives)


def _help(verb: str) -> str:
    command = app[verb]
    # Without the app in the stack, flags would be listed with negative forms, which the command line refuses.
    with command.app_stack([app, command]):
        page = generate_markdown_docs(command, heading_level=2, command_chain=["bookwheel", verb])
    docstring = inspect.getdoc(command.default_command) or ""
    more = docstring.partition("\n\n")[2].partition("Args:\n")[0].strip()
    before, separator, parameters = page.partition("\n**")
    return f"{before}\n{more}\n{separator}{parameters}" if more else page


def as_restructured_text(app: Any, what: str, name: str, thing: object, options: Any, lines: list[str]) -> None:
    """Rewrite a docstring, in place, from Markdown to the reStructuredText that autodoc reads.

    Outside of code spans `|` and `*` are escaped, as in p(z|x); a list gets an empty line before it; the rows of a
    table become lines of a line block.
    """
    made: list[str] = []
    for line in lines:
        item = _ITEM.match(line)
        if item and made and made[-1].strip() and not _ITEM.match(made[-1]) and not made[-1].startswith(" "):
            made.append("")
        mark = item[0] if item else ""
        made += _row(line) if line.startswith("|") else [mark + _escaped(line.removeprefix(mark))]
    lines[:] = made


def _row(line: str) -> list[str]:
    cells = [_escaped(cell.strip()) for cell in line.strip("|").split("|")]
    return [] if set(line) <= set("|-: ") else [f"| {': '.join(cells)}"]


def _escaped(line: str) -> str:
    pieces = _CODE_SPAN.split(line)
    return "".join(piece if piece.startswith("`") else re.sub(r"([|*])", r"\\\1", piece) for piece in pieces)
