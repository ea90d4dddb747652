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
