"""The blocks of a page have their commands, their files and the marks of the comments before them."""

from pathlib import Path

import pytest

from tests.docs import blocks

PAGE = """# A page
<!-- file: recipe.toml -->
```toml
part_bytes = 1
```

```console
$ bookwheel log \\
    --store library
latest@1  355a25a975e1
$ echo done
```

<!-- not run: needs a cluster -->

```console
$ bookwheel gc --store library
```
"""


def test_blocks_have_their_commands_and_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    file, run, not_run = blocks.read_blocks(page)
    assert (file.mark, file.note, file.text, file.commands) == ("file", "recipe.toml", "part_bytes = 1\n", [])
    assert (run.mark, run.commands, run.location) == ("", ["bookwheel log --store library", "echo done"], "page.md:7")
    assert (not_run.mark, not_run.note) == ("not run", "needs a cluster")
    assert not_run.commands == ["bookwheel gc --store library"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("bookwheel search 'What | is it?' -k 3 | head", ["bookwheel", "search", "What | is it?", "-k", "3"]),
        ("STORE=x bookwheel log --store library > log.txt  # all", ["bookwheel", "log", "--store", "library"]),
        ("bookwheel doctor && make up", ["bookwheel", "doctor"]),
    ],
)
def test_a_command_ends_at_a_pipe_or_redirection(command: str, words: list[str]) -> None:
    assert blocks.split_command(command) == words
