"""The registry of chunkers, by the names that recipes use."""

from collections.abc import Mapping
from typing import Any

from rag_model.corpus.chunkers.chunker import Chunker
from rag_model.errors import UsageError
from rag_model.plugins import Registry
from rag_model.toml import from_table

CHUNKERS: Registry[type[Chunker]] = Registry(
    "chunker",
    "bookwheel.chunkers",
    {
        "words": "rag_model.corpus.chunkers.windows:Words",
        "sections": "rag_model.corpus.chunkers.windows:Sections",
        "sentences": "rag_model.corpus.chunkers.sentences:Sentences",
        "recursive": "rag_model.corpus.chunkers.recursive:Recursive",
        "tokens": "rag_model.corpus.chunkers.tokens:Tokens",
        "semantic": "rag_model.encoders.semantic:Semantic",
    },
)


def build_chunker(name: str, settings: Mapping[str, Any]) -> Chunker:
    """Return the chunker of this name with these settings; omitted ones keep their defaults.

    A name that is not built in is searched for in the entry points of installed packages.

    Raises:
        InputError: the package that provides it cannot be imported.
        UsageError: there is no such chunker, or it refuses a setting, which the message names.
    """
    return from_table(_named(name), settings, f"the recipe's chunker {name!r}")


def _named(name: str) -> type[Chunker]:
    found: Any = CHUNKERS.find(name)
    if found is None:
        raise UsageError(f"no chunker {name!r} in the recipe: choose one of {', '.join(CHUNKERS.names())}")
    if not (isinstance(found, type) and {"__dataclass_fields__", "open", "version"} <= {*dir(found)}):
        raise UsageError(f"{found!r} is not a chunker: see rag_model.corpus.chunkers.chunker.Chunker")
    return found
