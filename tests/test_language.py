"""Names and sentences follow the language rules that a tool can check."""

import ast
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("language")  # tests/test_house.py uses the parsed modules, too
ROOT = Path(__file__).parents[1]
PACKAGES = ("flows", "beam_jobs", "rag_model")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TEST_FILES = sorted(path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__))
each_tree = pytest.mark.parametrize("paths", [FILES, TEST_FILES], ids=["product", "tests"])
# Participles, pronouns, adverbs and adjectives. Names that consist of one of these do not name the thing.
_WORDS = """
    one ones found told asked named known kept held made given said wanted shown opened left own some its whole
    chosen taken begun written joined brought carried reached tried counted most least at place places other
    others every more new now before after same here there seen drawn cut met lacking missing lost built ready
    near far they them those these this that it till again beside among fitting standing waiting looking having
    being got gone put read_ moved paid sent spent heard felt bound laid grown worn borne shared noted meant
"""
BARE_WORDS = frozenset(_WORDS.split())
VERBS_IN_ED = frozenset({"embed", "feed", "need", "seed"})
UNCLEAR_PHRASES = re.compile(
    r"\b(Return what|what (?:is|was|has|had|are|it|they|a|an|the) \w+ing|that which|nobody|whoever|is none of|"
    r"none of (?:it|them)|as (?:little|much) as|anew|stands? (?:in|at|here|there) |can not|lets go of)",
    re.IGNORECASE,
)
# Class names that several modules may use, such as one class for three frameworks.
SHARED_CLASS_NAMES = frozenset({"BookwheelRetriever", "Node", "Statement", "Windows", "Hit"})


@functools.cache
def list_nodes(path: Path) -> list[ast.AST]:
    """Return the module of a file and all nodes below it."""
    return [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]


def iter_local_names(path: Path) -> Iterator[tuple[int, str]]:
    for node in list_nodes(path):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def iter_functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in list_nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def is_bare_participle(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    name = function.name.strip("_")
    if any("property" in ast.unparse(decorator) for decorator in function.decorator_list):
        return name in BARE_WORDS
    return name in BARE_WORDS or (re.fullmatch(r"[a-z]+ed", name) is not None and name not in VERBS_IN_ED)


@each_tree
def test_local_names_have_a_noun(paths: list[Path]) -> None:
    names = [(path, line, name) for path in paths for line, name in iter_local_names(path)]
    bare = [f"{path.relative_to(ROOT)}:{line} {name}" for path, line, name in names if name in BARE_WORDS]
    assert len(bare) <= 0.01 * len(names), bare


@each_tree
def test_function_names_have_a_verb(paths: list[Path]) -> None:
    functions = [(path, function) for path in paths for function in iter_functions(path)]
    bare = [
        f"{path.relative_to(ROOT)}:{function.lineno} {function.name}"
        for path, function in functions
        if is_bare_participle(function)
    ]
    assert len(bare) <= 0.015 * len(functions), bare


def test_a_class_name_has_one_meaning() -> None:
    paths: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in list_nodes(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                paths[node.name].append(str(path.relative_to(ROOT)))
    repeated = {name: files for name, files in paths.items() if len(files) > 1}
    assert {name: files for name, files in repeated.items() if name not in SHARED_CLASS_NAMES} == {}


@each_tree
def test_sentences_are_understood_at_first_reading(paths: list[Path]) -> None:
    unclear = [
        f"{path.relative_to(ROOT)}:{number} {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if ("#" in line or '"""' in line or line.strip()[:1].isalpha()) and UNCLEAR_PHRASES.search(line)
    ]
    assert len(unclear) <= 20, unclear  # a phrase may be right in its sentence


def test_few_modules_are_fragments() -> None:
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES}
    importers: Counter[str] = Counter()
    for path in FILES:
        imported = set()
        for node in list_nodes(path):
            if isinstance(node, ast.ImportFrom) and node.module:
                imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
        importers.update(imported & modules.keys())
    fragments = [
        name
        for name, path in modules.items()
        if path.name != "__init__.py"
        and importers[name] == 1
        and len(path.read_text(encoding="utf-8").splitlines()) < 60
    ]
    assert len(fragments) <= 10, fragments


def test_lines_are_short() -> None:
    lengths = [len(line) for path in FILES for line in path.read_text(encoding="utf-8").splitlines()]
    assert sum(length > 100 for length in lengths) <= 0.05 * len(lengths)
