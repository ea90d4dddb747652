"""Settings of an objective: parse them from tables, and render them as a commented TOML file.

Each objective has one settings record, a dataclass with one dataclass per TOML table. The command
line, the flow and the training share it:

```toml
[loop]
learning_rate = 2e-5

[dpr]               # or [cross_encoder], [margin_mse], [rag], or a table of another objective
batch_size = 32

# For dpr, colbert, cross-encoder and margin-mse; ra-dit has [ra_dit], [lm], [retriever], [lm_loop].
[negatives]
search = "bm25"
```

A training with the unedited output of `render_settings` equals a training without a settings file.
Therefore a setting is written as a comment if its value is None, which TOML cannot express, or if
its default depends on the encoder.
"""

import ast
import inspect
import io
import textwrap
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

import tomli_w

from rag_model.errors import UsageError
from rag_model.toml import from_table
from rag_model.training.objectives.objective import Objective, TrainingSettings, find_loop_settings, get_objective

Tables = Mapping[str, Mapping[str, Any]]  # settings by table

_COMMENT_COLUMN = 44  # column in which comments start


def parse_settings(
    objective_name: str, tables: Tables, max_steps: int | None, *, unit_vectors: bool
) -> TrainingSettings:
    """Create the settings of an objective from tables; omitted settings keep their defaults.

    If the encoder's vectors have length 1 (`unit_vectors`), scores differ little. The default of
    the temperature is then 0.05 instead of 1 as in the papers. `max_steps` overrides the number of
    steps in the tables of all stages.

    Raises:
        UsageError: there is no such objective, a table or a setting is unknown, or a setting has a
            wrong value; the message names the setting.
    """
    objective = get_objective(objective_name)
    _check_tables(objective, tables)
    recipe: dict[str, Any] = {name: asdict(loop) for name, loop in find_loop_settings(objective.settings()).items()}
    for name, table in [*objective.defaults(unit_vectors=unit_vectors).items(), *tables.items()]:
        recipe[name] = {**recipe.get(name, {}), **table}
    settings: Any = from_table(objective.settings, recipe, f"the recipe of finetune {objective.name}")
    if max_steps is not None:
        loop_tables = find_loop_settings(settings)
        settings = replace(settings, **{name: replace(loop, max_steps=max_steps) for name, loop in loop_tables.items()})
    return settings  # type: ignore[no-any-return]


def _check_tables(objective: Objective[Any], tables: Mapping[str, Any]) -> None:
    """Check that each known setting is in the right table.

    Raises:
        UsageError: a setting is in no table or in a wrong table; the message names the right table.
    """
    defaults = objective.settings()
    names_by_table = {table.name: _list_setting_names(getattr(defaults, table.name)) for table in fields(defaults)}
    all_names = frozenset[str]().union(*names_by_table.values())
    for name, table in tables.items():
        if isinstance(table, Mapping):
            locations = {key: f"[{name}]" for key in table if key in all_names - names_by_table.get(name, all_names)}
        else:
            locations = {name: "no table"}
        for key, location in locations.items():
            table_names = " or ".join(f"[{table_name}]" for table_name, names in names_by_table.items() if key in names)
            advice = (
                f"put it below {table_names}"
                if table_names
                else f"the tables are {', '.join(f'[{owner}]' for owner in names_by_table)}"
            )
            raise UsageError(
                f"the recipe's {key!r} is in {location}: {advice} (`bookwheel finetune "
                f"{objective.name} --print-settings` shows all)"
            )


def _list_setting_names(table: Any) -> frozenset[str]:
    return frozenset(setting.name for setting in fields(table)) if is_dataclass(table) else frozenset()


def render_settings(objective: Objective[Any]) -> str:
    """Return a settings file in TOML with the defaults of all settings of an objective."""
    unit_defaults = objective.defaults(unit_vectors=True)
    heading = f"# Settings of `bookwheel finetune {objective.name}`, with their defaults and the sources of these."
    return "\n".join([heading, *_render_tables(objective.settings(), (), unit_defaults)]) + "\n"


def parse_field_comments(settings_type: type[Any]) -> dict[str, str]:
    """Return for each field the comment at the end of its line or, if there is none, above it.

    Inherited fields are included. The result is empty if the source code is not available.
    """
    comments: dict[str, str] = {}
    for record_type in reversed(settings_type.__mro__):
        if is_dataclass(record_type):
            comments |= _parse_own_comments(record_type)
    return comments


@cache  # Forms and settings files need the comments of each record several times.
def _parse_own_comments(record_type: type[Any]) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(record_type))
    except (OSError, TypeError):
        return {}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token for token in tokens if token.type == tokenize.COMMENT}
    (class_node,) = ast.parse(source).body
    comments_by_field: dict[str, str] = {}
    for node in getattr(class_node, "body", ()):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            lines = [node.end_lineno] if node.end_lineno in comments else _find_comments_above(node.lineno, comments)
            comments_by_field[node.target.id] = " ".join(comments[line].string.lstrip("# ") for line in lines)
    return {name: comment for name, comment in comments_by_field.items() if comment}


def _find_comments_above(line: int, comments: Mapping[int, tokenize.TokenInfo]) -> list[int]:
    """Return the line numbers of the comments directly above a line."""
    first_line = line
    while first_line - 1 in comments and not comments[first_line - 1].line[: comments[first_line - 1].start[1]].strip():
        first_line -= 1
    return list(range(first_line, line))


def _render_tables(settings: Any, path: tuple[str, ...], unit_defaults: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a settings record in TOML: first single settings, then nested tables."""
    comments, defaults = parse_field_comments(type(settings)), type(settings)()
    hints = get_type_hints(type(settings))
    choices = {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}
    setting_values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    subtables = {name: setting for name, setting in setting_values.items() if is_dataclass(setting)}
    for name, setting in setting_values.items():
        if name not in subtables:
            choice_text = f"one of {', '.join(map(str, choices[name]))}" if name in choices else ""
            comment = "; ".join(filter(None, (choice_text, comments.get(name, ""))))
            yield _render_setting(name, setting, getattr(defaults, name), comment, unit_defaults.get(name))
    for name, setting in subtables.items():
        yield from ("", f"[{'.'.join((*path, name))}]", *([f"# {comments[name]}"] if name in comments else []))
        yield from _render_tables(setting, (*path, name), unit_defaults.get(name, {}))


def _render_setting(name: str, value: Any, default: Any, description: str, unit_value: Any) -> str:
    override_note = f"instead of {render_value(default)} elsewhere" if value != default else ""
    unit_note = (
        f"{render_value(unit_value)} if the encoder's vectors have length 1" if unit_value not in (None, value) else ""
    )
    comment = "; ".join(part for part in (override_note, unit_note, description) if part)
    setting = f"{name} = {render_value(value)}"
    if value is None or unit_note:
        setting = f"# {setting}" if value is not None else f"# {name} ="
    return f"{setting:<{_COMMENT_COLUMN}}  # {comment}" if comment else setting


def render_value(value: Any) -> str:
    """Return the value of a setting in TOML; None becomes `none`."""
    return tomli_w.dumps({"x": value}).partition("=")[2].strip() if value is not None else "none"
