"""The code follows the rules of the project that a tool can check."""

import ast
import functools
from pathlib import Path

import pytest

from tests.test_language import FILES, ROOT, list_nodes

pytestmark = pytest.mark.xdist_group("language")


def _list_method_calls(path: Path, names: set[str]) -> list[ast.Call]:
    """Return the calls of methods and module functions with these names."""
    calls = [node for node in list_nodes(path) if isinstance(node, ast.Call)]
    return [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in names]


def test_every_module_has_a_docstring() -> None:
    for path in FILES:
        module = list_nodes(path)[0]
        assert isinstance(module, ast.Module)
        assert ast.get_docstring(module) or not module.body, f"{path.relative_to(ROOT)} has no docstring"


def test_benchmarks_import_names_that_exist() -> None:
    """Without this test, a renamed function would be noticed only when somebody runs the benchmark."""
    missing_names = []
    for path in sorted((ROOT / "tests" / "benchmarks").glob("*.py")):
        for node in list_nodes(path):
            if isinstance(node, ast.ImportFrom) and node.module:
                folder = ROOT if (ROOT / node.module.partition(".")[0]).is_dir() else path.parent
                module = folder.joinpath(*node.module.split("."))
                file = module.with_suffix(".py") if module.with_suffix(".py").exists() else module / "__init__.py"
                if module.parent.is_dir() and (folder == ROOT or file.exists()):
                    names = _list_names(file) | {inner.stem for inner in module.glob("*")}
                    missing_names += [
                        f"{path.name}: {node.module}.{alias.name}" for alias in node.names if alias.name not in names
                    ]
    assert missing_names == []


@functools.cache
def _list_names(file: Path) -> set[str]:
    """Return all names that a module defines or imports; none if there is no such file."""
    names = set[str]()
    for node in list_nodes(file) if file.exists() else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return names


def test_no_code_reads_pickles() -> None:
    for path in FILES:
        names = {alias.name for node in list_nodes(path) if isinstance(node, ast.Import) for alias in node.names}
        assert not names & {"pickle", "dill", "cloudpickle", "joblib", "shelve"}, path
        for call in _list_method_calls(path, {"load"}):
            if ast.unparse(call.func) == "torch.load":
                assert "weights_only=True" in ast.unparse(call), f"{path}:{call.lineno}"
                assert path.name == "convert.py", f"{path}:{call.lineno}: only its child process reads weights"
            if ast.unparse(call.func) == "np.load":
                assert "allow_pickle=False" in ast.unparse(call), f"{path}:{call.lineno}"


def test_code_in_a_models_folder_is_never_run() -> None:
    """Without `trust_remote_code=False`, transformers asks on the terminal, and `y` on standard input runs the code."""
    for path in FILES:
        for call in _list_method_calls(path, {"from_pretrained", "from_config", "pipeline"}):
            assert "trust_remote_code=False" in ast.unparse(call), f"{path}:{call.lineno}"
            assert path.name in {"pretrained.py", "tokens.py"}, f"{path}:{call.lineno}: use load_pretrained"


def test_the_readme_mentions_every_verb() -> None:
    from flows.cli import app  # noqa: PLC0415 - reads settings at import

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    verbs = [name for name in app if not name.startswith("-")]
    assert verbs
    assert [verb for verb in verbs if f"bookwheel {verb}" not in readme] == []


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1000
