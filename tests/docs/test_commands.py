"""Every command that a page shows is run, or says why it is not; and every `bookwheel` command is parsed at least."""

import json
import re
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from cyclopts import CycloptsError

from flows.cli import app
from rag_model.errors import UsageError
from tests.docs.blocks import PAGES, ROOT, Block, blocks, words
from tests.docs.shell import Shell

pytestmark = pytest.mark.xdist_group("docs")  # one store for all of them

LANGUAGES = {"console", "json", "python", "text", "toml"}
COMMANDS = ("$ ", "bookwheel ", "make ", "pip ", "curl ", "docker ", "kubectl ", "prefect ")
TUTORIAL = ROOT / "docs" / "tutorial.md"
RUN = [
    page
    for page in PAGES
    if any(block.mark != "not run" and (block.commands or block.language == "python") for block in blocks(page))
]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_commands_are_shown_where_this_test_looks() -> None:
    for page in PAGES:
        indented = re.search(r"^[ \t]+```", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert not indented, f"an indented block of {named(page)} is not seen"
    for block in (block for page in PAGES for block in blocks(page)):
        assert block.language in LANGUAGES or block.language.startswith("{"), f"{block.place} names no language"
        if block.language == "console":
            assert block.commands, f"{block.place} has no line with a prompt"
        else:
            found = [line for line in block.text.splitlines() if line.startswith(COMMANDS)]
            assert not found, f"{block.place} shows a command outside of a console block"


def test_links_and_the_tests_that_are_named_lead_somewhere() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        links = [page.parent / link for link in re.findall(r"\]\((?!https?:)([^)#]+)", text)]
        tests = [ROOT / name for block in blocks(page) for name in re.findall(r"tests/[\w/.]+\w", block.note)]
        assert [path for path in [*links, *tests] if not path.exists()] == [], named(page)


def test_rows_of_tables_have_the_columns_of_their_header() -> None:
    wrong = []
    for page in PAGES:
        prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for paragraph in prose.split("\n\n"):
            lines = paragraph.replace(r"\|", "").strip("\n").splitlines()
            header, *rows = [line.rstrip(" |") for line in lines] or [""]
            if "---|" in paragraph.replace(" ", ""):
                is_table = re.fullmatch(r"[-:| ]+", rows[0])
                if not is_table or any(row.count("|") > header.count("|") for row in rows):
                    wrong.append(f"{named(page)}: {header[:60]}")
    assert wrong == []


def test_every_bookwheel_command_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    count, wrong = 0, []
    for page in PAGES:
        monkeypatch.chdir(tmp_path)
        Path(page.stem).mkdir(exist_ok=True)
        monkeypatch.chdir(page.stem)
        for file in (block for block in blocks(page) if block.mark == "file"):  # bookwheel.toml gives what is left out
            Path(file.note).write_text(file.text, encoding="utf-8")
        for command in [command for block in blocks(page) for command in block.commands]:
            if words(command)[:1] == ["bookwheel"]:
                count += 1
                try:
                    with suppress(UsageError):  # files of settings are read at once, and the page has none
                        app.parse_args(words(command)[1:], exit_on_error=False, print_error=False)
                except CycloptsError as error:
                    wrong.append(f"{named(page)}: {command}: {error}")
    assert (count > 100, wrong) == (True, [])


@pytest.mark.parametrize("page", [page for page in RUN if page != TUTORIAL], ids=named)
def test_the_commands_of_a_page_run(page: Path, shell: Shell) -> None:
    _run(blocks(page), shell)


def test_the_tutorial_ends_with_an_encyclopedia_served(shell: Shell) -> None:
    shutil.rmtree(shell.folder / "library")
    printed = _run(blocks(TUTORIAL), shell)
    assert printed
    found, before, after = (json.loads(reply) for command, reply in printed if command.startswith("curl"))
    assert len(found["results"][0]["hits"]) == 3
    assert (before["number"], after["number"]) == (1, 2)
    assert before["snapshot"] == found["snapshot"] != after["snapshot"]


def _run(shown: list[Block], shell: Shell) -> list[tuple[str, str]]:
    if any(command.startswith("curl") for block in shown for command in block.commands) and not shutil.which("curl"):
        pytest.skip("this machine has no curl")
    return [
        pair
        for block in shown
        if block.mark != "not run"
        for pair in zip(block.commands, shell.run(block), strict=True)
    ]
