"""The settings of a fine-tuning from tables, such as those of a TOML file; omitted settings keep their defaults.

```toml
[loop]
learning_rate = 2e-5

[dpr]               # or [cross_encoder], [margin_mse], [rag], or a table of another objective
batch_size = 32

[negatives]         # for dpr, colbert, cross-encoder and margin-mse; ra-dit has [ra_dit], [lm], [retriever], [lm_loop]
search = "bm25"
```
"""

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import WithJsonSchema

from flows.forms import form_of
from rag_model.errors import UsageError
from rag_model.toml import from_table, read_toml
from rag_model.training.objectives.objective import Objective, Settings, loops_of
from rag_model.training.objectives.registry import names, objective, objectives

Tables = Mapping[str, Mapping[str, Any]]
RecipeTables = Annotated[dict[str, dict[str, Any]] | None, WithJsonSchema(form_of(objectives()))]
if TYPE_CHECKING:
    KindName = str
else:
    KindName = Literal[names()]  # help and forms offer the registered names only


def training_of(kind: str, tables: Tables, max_steps: int | None, *, unit_vectors: bool) -> Settings:
    """Return the settings of an objective from tables.

    `unit_vectors`: the encoder's vectors have length 1, so scores differ little: the default of the temperature is then
    .05 instead of the papers' 1. `max_steps` replaces that of the tables, in every stage.

    Raises:
        UsageError: there is no such objective, or a table or a setting is unknown, or has a wrong value; the message
            names it.
    """
    chosen = objective(kind)
    _check_places(chosen, tables)
    settings: dict[str, Any] = {name: asdict(loop) for name, loop in loops_of(chosen.settings()).items()}
    for name, table in [*chosen.defaults(unit_vectors=unit_vectors).items(), *tables.items()]:
        settings[name] = {**settings.get(name, {}), **table}
    found: Any = from_table(chosen.settings, settings, f"the recipe of finetune {chosen.name}")
    if max_steps is None:
        return found  # type: ignore[no-any-return]
    limited = {name: replace(loop, max_steps=max_steps) for name, loop in loops_of(found).items()}
    changed: Settings = replace(found, **limited)
    return changed


def _check_places(chosen: Objective[Any], tables: Tables) -> None:
    """Refuse a setting that is in no table, or in one that does not have it but another has; say where it belongs."""
    known = {one.name: _settings_of(getattr(chosen.settings(), one.name)) for one in fields(chosen.settings)}
    for name, table in tables.items():
        misplaced = {name: "no table"} if not isinstance(table, Mapping) else _strangers(name, table, known)
        for key, place in misplaced.items():
            homes = " or ".join(f"[{home}]" for home, settings in known.items() if key in settings)
            advice = f"put it below {homes}" if homes else f"the tables are {', '.join(f'[{one}]' for one in known)}"
            raise UsageError(
                f"the recipe's {key!r} is in {place}: {advice} (`bookwheel finetune {chosen.name} --print-settings` "
                "shows all)"
            )


def _strangers(name: str, table: Mapping[str, Any], known: Mapping[str, frozenset[str]]) -> dict[str, str]:
    """Return the keys of a table that it does not have and another table has."""
    elsewhere = frozenset[str]().union(*known.values())
    return {key: f"[{name}]" for key in table if key in elsewhere - known.get(name, elsewhere)}


def _settings_of(table: Any) -> frozenset[str]:
    return frozenset(one.name for one in fields(table)) if is_dataclass(table) else frozenset()


def read_tables(path: Path | None) -> Tables:
    """Read the tables of a TOML file; none without one.

    Raises:
        InputError: the file is missing or is not TOML.
    """
    return {} if path is None else read_toml(path)
