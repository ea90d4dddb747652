"""The house rules that a tool can check."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("flows", "beam_jobs", "rag_model")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _calls(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(_tree(path)) if isinstance(node, ast.Call)]


def test_every_module_says_what_it_is_for() -> None:
    for path in FILES:
        tree = _tree(path)
        assert ast.get_docstring(tree) or not tree.body, f"{path.relative_to(ROOT)} does not say what it is for"


def test_benchmarks_import_names_that_exist() -> None:
    """No test runs most of them, and the type checker leaves them out."""
    missing = []
    for path in sorted((ROOT / "tests" / "benchmarks").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                folder = ROOT if (ROOT / node.module.partition(".")[0]).is_dir() else path.parent
                module = folder.joinpath(*node.module.split("."))
                file = module.with_suffix(".py") if module.with_suffix(".py").exists() else module / "__init__.py"
                if module.parent.is_dir() and (folder == ROOT or file.exists()):
                    known = _list_names(file) | {inner.stem for inner in module.glob("*")}
                    missing += [
                        f"{path.name}: {node.module}.{name.name}" for name in node.names if name.name not in known
                    ]
    assert missing == []


def _list_names(file: Path) -> set[str]:
    """Return all names that a module defines or imports; none if there is no such file."""
    names = set[str]()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if file.exists() else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return names


def test_nothing_reads_pickles() -> None:
    for path in FILES:
        nodes = ast.walk(_tree(path))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        assert not names & {"pickle", "dill", "cloudpickle", "joblib", "shelve"}, path
        for call in _calls(path):
            if ast.unparse(call.func) == "torch.load":
                assert "weights_only=True" in ast.unparse(call), f"{path}:{call.lineno}"
                assert path.name == "convert.py", f"{path}:{call.lineno}: only the guarded child reads weights"
            if ast.unparse(call.func) == "np.load":
                assert "allow_pickle=False" in ast.unparse(call), f"{path}:{call.lineno}"


def test_no_code_of_a_models_folder_is_run() -> None:
    """Left out, `trust_remote_code` asks on the terminal, and a `y` on standard input runs the folder's code."""
    for path in FILES:
        for call in _calls(path):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            if name in {"from_pretrained", "from_config", "pipeline"}:
                assert "trust_remote_code=False" in ast.unparse(call), f"{path}:{call.lineno}"
                assert path.name in {"pretrained.py", "tokens.py"}, f"{path}:{call.lineno}: use load_pretrained"


def test_the_readme_names_every_verb() -> None:
    from flows.cli import app  # noqa: PLC0415 - with its settings read late, as the command does

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    verbs = [name for name in app if not name.startswith("-")]
    assert verbs
    assert [verb for verb in verbs if f"bookwheel {verb}" not in readme] == []


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1000
