"""Every command of a page runs or states why it does not, and every `bookwheel` command can be parsed."""

import json
import re
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from cyclopts import CycloptsError

from flows.cli import app
from rag_model.errors import UsageError
from tests.docs.blocks import PAGES, ROOT, Block, read_blocks, split_command
from tests.docs.shell import Shell

pytestmark = pytest.mark.xdist_group("docs")  # they share one store

LANGUAGES = {"console", "json", "python", "text", "toml"}
COMMANDS = ("$ ", "bookwheel ", "make ", "pip ", "curl ", "docker ", "kubectl ", "prefect ")
TUTORIAL = ROOT / "docs" / "tutorial.md"
RUN = [
    page
    for page in PAGES
    if any(block.mark != "not run" and (block.commands or block.language == "python") for block in read_blocks(page))
]


def get_page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_all_commands_are_in_console_blocks() -> None:
    for page in PAGES:
        indented = re.search(r"^[ \t]+```", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert not indented, f"an indented block of {get_page_name(page)} is not seen"
    for block in (block for page in PAGES for block in read_blocks(page)):
        assert block.language in LANGUAGES or block.language.startswith("{"), f"{block.location} names no language"
        if block.language == "console":
            assert block.commands, f"{block.location} has no line with a prompt"
        else:
            commands = [line for line in block.text.splitlines() if line.startswith(COMMANDS)]
            assert not commands, f"{block.location} shows a command outside of a console block"


def test_links_and_named_tests_exist() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        links = [page.parent / link for link in re.findall(r"\]\((?!https?:)([^)#]+)", text)]
        tests = [ROOT / name for block in read_blocks(page) for name in re.findall(r"tests/[\w/.]+\w", block.note)]
        assert [path for path in [*links, *tests] if not path.exists()] == [], get_page_name(page)


def test_rows_of_tables_have_the_columns_of_their_header() -> None:
    errors = []
    for page in PAGES:
        prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for paragraph in prose.split("\n\n"):
            lines = paragraph.replace(r"\|", "").strip("\n").splitlines()
            header, *rows = [line.rstrip(" |") for line in lines] or [""]
            if "---|" in paragraph.replace(" ", ""):
                is_table = re.fullmatch(r"[-:| ]+", rows[0])
                if not is_table or any(row.count("|") > header.count("|") for row in rows):
                    errors.append(f"{get_page_name(page)}: {header[:60]}")
    assert errors == []


def test_every_bookwheel_command_can_be_parsed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    count, errors = 0, []
    for page in PAGES:
        monkeypatch.chdir(tmp_path)
        Path(page.stem).mkdir(exist_ok=True)
        monkeypatch.chdir(page.stem)
        for file in (
            block for block in read_blocks(page) if block.mark == "file"
        ):  # bookwheel.toml gives what is left out
            Path(file.note).write_text(file.text, encoding="utf-8")
        for command in [command for block in read_blocks(page) for command in block.commands]:
            if split_command(command)[:1] == ["bookwheel"]:
                count += 1
                try:
                    with suppress(UsageError):  # files of settings are read at once, and the page has none
                        app.parse_args(split_command(command)[1:], exit_on_error=False, print_error=False)
                except CycloptsError as error:
                    errors.append(f"{get_page_name(page)}: {command}: {error}")
    assert (count > 100, errors) == (True, [])


@pytest.mark.parametrize("page", [page for page in RUN if page != TUTORIAL], ids=get_page_name)
def test_the_commands_of_a_page_run(page: Path, shell: Shell) -> None:
    _run(read_blocks(page), shell)


def test_the_tutorial_ends_with_a_service_of_the_second_snapshot(shell: Shell) -> None:
    shutil.rmtree(shell.folder / "library")
    outputs = _run(read_blocks(TUTORIAL), shell)
    assert outputs
    search_reply, old_state, new_state = (json.loads(reply) for command, reply in outputs if command.startswith("curl"))
    assert len(search_reply["results"][0]["hits"]) == 3
    assert (old_state["number"], new_state["number"]) == (1, 2)
    assert old_state["snapshot"] == search_reply["snapshot"] != new_state["snapshot"]


def _run(page_blocks: list[Block], shell: Shell) -> list[tuple[str, str]]:
    if any(command.startswith("curl") for block in page_blocks for command in block.commands) and not shutil.which(
        "curl"
    ):
        pytest.skip("this machine has no curl")
    return [
        pair
        for block in page_blocks
        if block.mark != "not run"
        for pair in zip(block.commands, shell.run(block), strict=True)
    ]
