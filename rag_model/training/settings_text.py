"""The settings of a training as a TOML file: every table, with each default and what the code says about it.

A file that is not edited trains exactly as no file does: a setting without a value in TOML (None), and one whose
default depends on the encoder, is a comment.
"""

import ast
import inspect
import io
import textwrap
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

import tomli_w

from rag_model.training.objectives.objective import Objective

_WIDTH = 44  # columns before a comment


def settings_text(objective: Objective[Any]) -> str:
    """Return the settings file of an objective, in TOML, with all defaults."""
    unit = objective.defaults(unit_vectors=True)
    head = f"# Settings of `bookwheel finetune {objective.name}`, with their defaults and the sources of these."
    return "\n".join([head, *_tables(objective.settings(), (), unit)]) + "\n"


def comments_of(kind: type[Any]) -> dict[str, str]:
    """Return the comment at the end of each field's line, else those above it; also of inherited fields.

    Without source files there are none.
    """
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if is_dataclass(one):
            found |= _own_comments(one)
    return found


def _own_comments(kind: type[Any]) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except (OSError, TypeError):
        return {}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    at = {token.start[0]: token for token in tokens if token.type == tokenize.COMMENT}
    (body,) = ast.parse(source).body
    found: dict[str, str] = {}
    for node in getattr(body, "body", ()):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            lines = [node.end_lineno] if node.end_lineno in at else _above(node.lineno, at)
            found[node.target.id] = " ".join(at[line].string.lstrip("# ") for line in lines)
    return {name: said for name, said in found.items() if said}


def _above(line: int, at: Mapping[int, tokenize.TokenInfo]) -> list[int]:
    """Return the lines of comments directly above a line."""
    first = line
    while first - 1 in at and not at[first - 1].line[: at[first - 1].start[1]].strip():
        first -= 1
    return list(range(first, line))


def _tables(settings: Any, path: tuple[str, ...], unit: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a record: its own settings, then its tables."""
    said, standard = comments_of(type(settings)), type(settings)()
    choices = {name: get_args(kind) for name, kind in get_type_hints(type(settings)).items() if _is_choice(kind)}
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    inner = {name: value for name, value in values.items() if is_dataclass(value)}
    for name, value in values.items():
        if name not in inner:
            known = f"one of {', '.join(map(str, choices[name]))}" if name in choices else ""
            comment = "; ".join(filter(None, (known, said.get(name, ""))))
            yield _line(name, value, getattr(standard, name), comment, unit.get(name))
    for name, value in inner.items():
        yield from ("", f"[{'.'.join((*path, name))}]", *([f"# {said[name]}"] if name in said else []))
        yield from _tables(value, (*path, name), unit.get(name, {}))


def _is_choice(kind: Any) -> bool:
    return get_origin(kind) is Literal


def _line(name: str, value: Any, standard: Any, said: str, unit: Any) -> str:
    own = f"instead of {_written(standard)} elsewhere" if value != standard else ""
    varying = f"{_written(unit)} if the encoder's vectors have length 1" if unit not in (None, value) else ""
    comment = "; ".join(part for part in (own, varying, said) if part)
    setting = f"{name} = {_written(value)}"
    if value is None or varying:
        setting = f"# {setting}" if value is not None else f"# {name} ="
    return f"{setting:<{_WIDTH}}  # {comment}" if comment else setting


def _written(value: Any) -> str:
    return tomli_w.dumps({"x": value}).partition("=")[2].strip() if value is not None else "none"
