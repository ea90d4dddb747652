"""The settings of a fine-tuning from tables, such as a TOML file's; what they leave out keeps its default.

```toml
[loop]
learning_rate = 2e-5

[dpr]               # or [rag]
batch_size = 32

[negatives]         # of dpr
search = "bm25"
```
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rag_model.errors import UsageError
from rag_model.toml import from_table, read_toml
from rag_model.training.objectives.rag import LOOP
from rag_model.training.recipes import DprTraining, Kind, RagTraining, Training

Tables = Mapping[str, Mapping[str, Any]]
_UNIT_TEMPERATURE = 0.05  # where vectors have unit length: sentence-transformers' scale of 20


def training_of(kind: Kind, tables: Tables, max_steps: int | None, *, unit_vectors: bool) -> Training:
    """Return the settings that tables say.

    `unit_vectors`: the encoder's have length 1, so that scores differ by little: a temperature that is not set is then
    .05 instead of the papers' 1. `max_steps` replaces that of the tables.

    Raises:
        UsageError: a table or a setting is unknown, or has a wrong value; the sentence names it.
    """
    settings = _defaults(kind, unit_vectors=unit_vectors)
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise UsageError(f"the recipe's {name!r} stands in no table: put it below [loop]")
        settings[name] = {**settings.get(name, {}), **table}
    record: type[Training] = DprTraining if kind == "dpr" else RagTraining
    training: Training = from_table(record, settings, f"the recipe of finetune {kind}")
    return training if max_steps is None else replace(training, loop=replace(training.loop, max_steps=max_steps))


def read_tables(path: Path | None) -> Tables:
    """Read the tables of a TOML file; none without one.

    Raises:
        InputError: the file is missing or is not TOML.
    """
    return {} if path is None else read_toml(path)


def _defaults(kind: Kind, *, unit_vectors: bool) -> dict[str, dict[str, Any]]:
    temperature = {"temperature": _UNIT_TEMPERATURE} if unit_vectors else {}
    if kind == "dpr":
        return {"dpr": temperature}
    return {"loop": asdict(LOOP), "rag": temperature}
