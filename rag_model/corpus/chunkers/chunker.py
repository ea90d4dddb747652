"""The chunker protocol and its contract, the registry of chunkers, and helpers to write one.

A setting of type `Path` names a file or a folder. Workers get the files in the folder and in its
direct subfolders, or only those that match the patterns of the field's metadata, such as
`field(metadata={"files": ("tokenizer.json", "*.safetensors")})`. The first pattern must match in
the folder itself, so that a wrong folder is not copied to the store by mistake. In keys and in
the recipe of a snapshot, a digest of the bytes replaces the path.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from textwrap import dedent
from typing import Any, ClassVar, Protocol

from rag_model.corpus.records import Article, Passage
from rag_model.digest import ALGORITHM, digest_file, digest_json
from rag_model.errors import InputError, UsageError
from rag_model.plugins import Registry
from rag_model.toml import from_table

ChunkFunction = Callable[[Article], Iterator[Passage]]
# Maximum characters of a heading in a passage; every passage of a section has a copy of it.
MAX_HEADING = 256
MAX_ANCHOR = 64  # characters of a heading in a passage id
_DIGEST_PATTERN = re.compile(rf"{ALGORITHM}:[0-9a-f]{{64}}")
_SINGLE_FILE = ""  # key instead of a file name, if a setting names a single file


class Chunker(Protocol):
    """A chunker: a frozen dataclass whose fields are the settings, each with a default.

    A setting is a JSON value, or a `Path` to a file or folder (a tokenizer, a model). All settings
    are part of the key under which passages are stored and reused; files are part of it by their
    digest, not by their path. `__post_init__` rejects bad values with a `UsageError` and reads no
    file, because a digest may replace a path.

    The contract, for the passages of every article and for all accepted settings:

    * *Span.* A passage is an unchanged substring of the article's clean text on one line (of all
      sections joined by spaces, or of one section). If the article has `keeps_lines`, the
      passage keeps lines and their indentation. A passage starts and ends between words
      (`article_words.split_words`), unless one word is longer than the limit. `start_word` is the
      position of the word in which it starts, counted from the start of the article, or of the
      section if no passage crosses a heading; `n_words` is the number of its words and parts of
      words.
    * *Cover.* Passages are in the order of their first word, and every character except spaces
      between them is in a passage.
    * *Bound.* Whatever the text, no passage is longer than the maximum in the settings, in words or
      tokens; its characters are limited too, since no word has more than `MAX_WORD_LENGTH`.
      Passages overlap by at most the overlap in the settings. No passage is empty.
    * *Time* is linear in the article's length, for every text.
    * *Ids.* `<page_id>:<place>`, unique in the article and without spaces.
    * *Repeat.* Equal articles, settings and files give equal passages on every machine: no clock,
      no network, no random numbers, and no dependence on earlier articles.
    """

    version: ClassVar[str]
    """Part of every key: change it when an equal article would give other passages.

    Include the versions of libraries that affect passages. The code of built-in chunkers has the
    version `chunk.VERSION`.
    """

    def open(self) -> ChunkFunction:
        """Read the files once per part, and return the function that yields an article's passages.

        Raises:
            InputError: A file is damaged.
        """
        ...


def build_passage(article: Article, position: str, heading: str, start_word: int, words: Sequence[str]) -> Passage:
    """Build a passage from consecutive words of `split_words` in the section with this heading.

    `position` is the part of the passage id after the page id; `start_word` is the position of
    the passage's first word.
    """
    text = "".join(words)
    # Remove only the indentation that all lines share, the first line included.
    text = dedent(text).strip("\n") if article.keeps_lines and text.startswith("\n") else text.strip()
    return Passage(
        id=f"{article.page_id}:{position}",
        page_id=article.page_id,
        rev_id=article.rev_id,
        title=article.title,
        section=heading[:MAX_HEADING],
        text=text,
        start_word=start_word,
        n_words=len(words),
        hash=Passage.hash_of(article.title, text),
        revised=article.revised,
    )


def create_anchor(heading: str, used_names: dict[str, int]) -> str:
    """Return a name for a section that is unique in its article, and add it to `used_names`.

    Follows MediaWiki's anchors: spaces become underscores, and a repeated heading gets `_2`, `_3`,
    … `used_names` maps each name to its last suffix, so that naming all sections takes linear time.

    >>> create_anchor("Early life", {"Early_life": 1})
    'Early_life_2'
    """
    anchor = unique_anchor = "_".join(heading.split())[:MAX_ANCHOR]
    last_suffix = used_names.get(anchor, 0)
    while unique_anchor in used_names:
        last_suffix += 1
        unique_anchor = f"{anchor}_{last_suffix}"
    used_names[anchor] = max(last_suffix, 1)
    used_names.setdefault(unique_anchor, 1)
    return unique_anchor


def settings_to_json(chunker: Chunker) -> dict[str, Any]:
    """Return a chunker's settings as JSON values, with digests of files instead of paths.

    Raises:
        InputError: A file does not exist.
    """
    settings: dict[str, Any] = asdict(chunker)  # type: ignore[call-overload]
    return settings | {name: _digest_setting(chunker, name, path) for name, path in _list_paths(chunker).items()}


def list_setting_files(chunker: Chunker) -> dict[str, dict[str, Path]]:
    """Return the files of each setting of type `Path` by their names relative to the folder.

    Raises:
        InputError: A file does not exist, or no file in a folder matches.
    """
    return {name: _list_files(chunker, name, path) for name, path in _list_paths(chunker).items()}


def digest_files(digests: Mapping[str, str]) -> str:
    """Return one digest for the files of a setting, given the digest of each file by its name."""
    return digests[_SINGLE_FILE] if is_single_file(digests) else digest_json(dict(digests))


def is_single_file(files: Mapping[str, Any]) -> bool:
    """Return whether a setting names a single file, not a folder."""
    return [*files] == [_SINGLE_FILE]


def _list_paths(chunker: Chunker) -> dict[str, Path]:
    settings = {field.name: getattr(chunker, field.name) for field in fields(chunker)}  # type: ignore[arg-type]
    return {name: value for name, value in settings.items() if isinstance(value, Path)}


def _digest_setting(chunker: Chunker, setting: str, path: Path) -> str:
    if _DIGEST_PATTERN.fullmatch(str(path)):
        return str(path)
    return digest_files({name: digest_file(file) for name, file in _list_files(chunker, setting, path).items()})


def _list_files(chunker: Chunker, setting: str, path: Path) -> dict[str, Path]:
    if _DIGEST_PATTERN.fullmatch(str(path)):
        raise InputError(f"the recipe gives the digest {path} for {setting}: give the path of the file or folder")
    if path.is_file():
        return {_SINGLE_FILE: path}
    (file_patterns,) = (field.metadata.get("files", ("*",)) for field in fields(chunker) if field.name == setting)  # type: ignore[arg-type]
    if not any(path.glob(file_patterns[0])):
        expected_files = "a file" if file_patterns[0] == "*" else file_patterns[0]
        raise InputError(
            f"{setting} of the recipe's chunker must be a folder with {expected_files}, not {path}: correct it"
        )
    glob_patterns = (f"{folder}{pattern}" for pattern in file_patterns for folder in ("", "*/"))
    file_by_name = {
        file.relative_to(path).as_posix(): file for glob_pattern in glob_patterns for file in path.glob(glob_pattern)
    }
    return {name: file_by_name[name] for name in sorted(file_by_name) if file_by_name[name].is_file()}


CHUNKERS: Registry[type[Chunker]] = Registry(
    "chunker",
    "bookwheel.chunkers",
    {
        "words": "rag_model.corpus.chunkers.windows:Words",
        "sections": "rag_model.corpus.chunkers.windows:Sections",
        "sentences": "rag_model.corpus.chunkers.windows:Sentences",
        "recursive": "rag_model.corpus.chunkers.windows:Recursive",
        "tokens": "rag_model.corpus.chunkers.tokens:Tokens",
        "semantic": "rag_model.encoders.semantic:SemanticChunker",
    },
)


def build_chunker(name: str, settings: Mapping[str, Any]) -> Chunker:
    """Create the chunker of this name; settings that are not given keep their defaults.

    Names that are not built in are looked up in the entry points of installed packages.

    Raises:
        InputError: The package that provides the chunker cannot be imported.
        UsageError: No chunker has this name, or the chunker rejects a setting.
    """
    return from_table(_get_chunker_class(name), settings, f"the recipe's chunker {name!r}")


def _get_chunker_class(name: str) -> type[Chunker]:
    chunker_class: Any = CHUNKERS.find(name)
    if chunker_class is None:
        raise UsageError(f"no chunker {name!r} in the recipe: choose one of {', '.join(CHUNKERS.list_names())}")
    if not (isinstance(chunker_class, type) and {"__dataclass_fields__", "open", "version"} <= {*dir(chunker_class)}):
        raise CHUNKERS.wrong_plugin_error(
            name, f"is {chunker_class!r:.60}, which is not a chunker", "see rag_model.corpus.chunkers.chunker.Chunker"
        )
    return chunker_class
