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
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import WithJsonSchema

from flows.forms import form_of
from rag_model.errors import UsageError
from rag_model.toml import from_table, read_toml
from rag_model.training.objectives.objective import Settings, loops_of
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
    settings: dict[str, Any] = {name: asdict(loop) for name, loop in loops_of(chosen.settings()).items()}
    for name, table in [*chosen.defaults(unit_vectors=unit_vectors).items(), *tables.items()]:
        if not isinstance(table, Mapping):
            raise UsageError(f"the recipe's {name!r} is in no table: put it below [loop]")
        settings[name] = {**settings.get(name, {}), **table}
    found: Any = from_table(chosen.settings, settings, f"the recipe of finetune {chosen.name}")
    if max_steps is None:
        return found  # type: ignore[no-any-return]
    limited = {name: replace(loop, max_steps=max_steps) for name, loop in loops_of(found).items()}
    changed: Settings = replace(found, **limited)
    return changed


def read_tables(path: Path | None) -> Tables:
    """Read the tables of a TOML file; none without one.

    Raises:
        InputError: the file is missing or is not TOML.
    """
    return {} if path is None else read_toml(path)
