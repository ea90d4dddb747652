"""The value of each measure for each question: what an evaluation keeps so that another can be compared with it.

`values.json` of an evaluation holds the ids of the questions, and by retriever and measure one number a question, null
where a measure does not apply to a question.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rag_model.errors import StoreError
from rag_model.json_text import parse_json
from rag_model.store.store import Store
from rag_model.store.versions.evaluation_manifest import EvaluationManifest

FILE = "values.json"
Columns = Mapping[str, Sequence[float | None]]  # measure -> one value a question


@dataclass(frozen=True, slots=True)
class Values:
    """The measures of an evaluation, question by question."""

    questions: tuple[str, ...]  # ids
    retrievers: Mapping[str, Columns]  # by expression

    def write(self, path: Path) -> None:
        """Write the file."""
        told = {"questions": self.questions, "retrievers": self.retrievers}
        path.write_text(json.dumps(told, ensure_ascii=False, allow_nan=False), encoding="utf-8")

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Read back what `write` wrote.

        Raises:
            ValueError: it is something else.
        """
        questions, retrievers = value["questions"], value["retrievers"]
        columns = [column for some in retrievers.values() for column in some.values()]
        if not all(len(column) == len(questions) and all(map(_number, column)) for column in columns):
            raise ValueError("a column does not have one number a question")
        return cls(tuple(map(str, questions)), retrievers)


def read_values(store: Store, found: EvaluationManifest) -> Values:
    """Return the values of an evaluation in the store.

    Raises:
        StoreError: the file is missing or damaged.
    """
    try:
        return Values.from_json(parse_json(store.blobs.read(found.content.files[FILE])))
    except (KeyError, TypeError, ValueError, AttributeError) as broken:
        raise StoreError(
            f"{FILE} of evaluation {found.id[:12]} in {store.url} is damaged ({broken}): evaluate again after `expire` "
            "has deleted it, or restore it from a copy"
        ) from broken


def _number(value: Any) -> bool:
    return value is None or (type(value) in {int, float} and math.isfinite(value))
