"""Which chunkers there are, by the names that recipes use."""

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from rag_model.corpus.chunkers.chunker import Chunker
from rag_model.corpus.chunkers.windows import Sections, Words
from rag_model.errors import UsageError
from rag_model.toml import from_table

CHUNKERS: dict[str, type[Chunker]] = {"words": Words, "sections": Sections}
GROUP = "bookwheel.chunkers"  # of entry points: installed packages offer chunkers of theirs in it


def build_chunker(name: str, settings: Mapping[str, Any]) -> Chunker:
    """Return the chunker of this name with these settings; those left out keep their defaults.

    A name that is not built in is looked for among the entry points of installed packages.

    Raises:
        UsageError: there is no such chunker, or it refuses a setting; the sentence names it.
    """
    kind = CHUNKERS.get(name) or _installed(name)
    return from_table(kind, settings, f"the recipe's chunker {name!r}")


def _installed(name: str) -> type[Chunker]:
    offered = {point.value: point for point in entry_points(group=GROUP, name=name)}
    if not offered:
        known = [*CHUNKERS, *sorted(entry_points(group=GROUP).names - CHUNKERS.keys())]
        raise UsageError(f"no chunker {name!r} in the recipe: choose one of {', '.join(known)}")
    if len(offered) > 1:
        raise UsageError(f"{' and '.join(offered)} both offer a chunker {name!r}: uninstall one of the two packages")
    (point,) = offered.values()
    return _loaded(point)


def _loaded(point: EntryPoint) -> type[Chunker]:
    try:
        kind: Any = point.load()
    except (ImportError, AttributeError) as missing:
        raise UsageError(
            f"chunker {point.name!r} cannot be loaded from {point.value} ({missing}): install its package again"
        ) from missing
    if not (isinstance(kind, type) and {"__dataclass_fields__", "open", "version"} <= {*dir(kind)}):
        raise UsageError(f"{point.value} is not a chunker: see rag_model.corpus.chunkers.chunker.Chunker")
    return kind
