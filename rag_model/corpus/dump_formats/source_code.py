"""Files of source code: a section per function, with the path of the classes around it."""

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rag_model.corpus.chunkers.chunker import MAX_HEADING
from rag_model.corpus.dump_formats.document_files import (
    MAX_HEADING_PART,
    DocumentFiles,
    DroppedFileError,
    ParsedFile,
    decode_text,
)
from rag_model.extras import format_versions, require

if TYPE_CHECKING:
    from tree_sitter import Node

# The packages of the grammars and the endings of their files; `module:function` if it is not `language`.
_ENDINGS_BY_GRAMMAR = {
    "tree_sitter_bash": ".sh .bash",
    "tree_sitter_c": ".c .h",
    "tree_sitter_c_sharp": ".cs",
    "tree_sitter_cpp": ".cc .cpp .cxx .hh .hpp .cu",
    "tree_sitter_go": ".go",
    "tree_sitter_java": ".java",
    "tree_sitter_javascript": ".js .jsx .mjs .cjs",
    "tree_sitter_php:language_php": ".php",
    "tree_sitter_python": ".py .pyi",
    "tree_sitter_ruby": ".rb",
    "tree_sitter_rust": ".rs",
    "tree_sitter_typescript:language_typescript": ".ts .mts .cts",
    "tree_sitter_typescript:language_tsx": ".tsx",
}
_GRAMMAR_BY_ENDING = {ending: grammar for grammar, endings in _ENDINGS_BY_GRAMMAR.items() for ending in endings.split()}
_PACKAGES = sorted({grammar.partition(":")[0].replace("_", "-") for grammar in _ENDINGS_BY_GRAMMAR})
# Types of nodes of these grammars. The body of a container has definitions of its own.
_FUNCTION_TYPES = re.compile(
    r"(generator_)?(function|method|constructor)_(definition|declaration|item)|method|singleton_method"
)
_CONTAINER_TYPES = re.compile(
    r"(abstract_class|class|enum|impl|interface|mod|namespace|record|struct|trait|type|union)_"
    r"(declaration|definition|item|specifier)|class|module|internal_module"
)
_CLOSING_BRACKETS = re.compile(r"(?:[\s(){}\[\];,]|\bend\b)*")  # ends of classes, which belong to their last member
_MAX_DEPTH = 8  # containers in containers
_MAX_DECLARATORS = 20
_MAX_LINE_CHARACTERS = 10_000  # characters; longer lines are not written by people


class _Definition(NamedTuple):
    """A function or a container, by its lines."""

    node: "Node"
    name: str
    first: int
    end: int  # the line after the last


class SourceCode(DocumentFiles):
    """Files of programming languages that tree-sitter parses."""

    version = f"1, {format_versions('tree-sitter', *_PACKAGES)}"
    endings = frozenset(_GRAMMAR_BY_ENDING)
    max_bytes = 1 << 20

    def parse(self, data: bytes, name: str) -> ParsedFile:
        """Return a section per function and container, and those of the lines between them.

        Raises:
            DroppedFileError: The file is binary, not UTF-8, or minified.
            MissingExtraError: tree-sitter or the grammar is not installed.
        """
        text = decode_text(data)
        lines = text.split("\n")
        if max(map(len, lines)) > _MAX_LINE_CHARACTERS:
            raise DroppedFileError("minified")
        tree_sitter = require("tree_sitter", extra="code")
        module, _, function = _GRAMMAR_BY_ENDING[f".{name.lower().rpartition('.')[2]}"].partition(":")
        grammar = getattr(require(module, extra="code"), function or "language")
        root = tree_sitter.Parser(tree_sitter.Language(grammar())).parse(text.encode()).root_node
        sections: list[tuple[str, str]] = []
        for path, first, end in _split_lines(root, lines, 0, len(lines), ()):
            section = "\n".join(lines[first:end]).strip("\n")
            if sections and _CLOSING_BRACKETS.fullmatch(section):
                sections[-1] = (sections[-1][0], f"{sections[-1][1]}\n{section}".strip("\n"))
            elif section.strip():
                sections.append((" > ".join(path)[:MAX_HEADING], section))
        return ParsedFile(sections)


def _split_lines(
    node: "Node", lines: Sequence[str], first: int, end: int, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], int, int]]:
    """Yield the path and the lines of each definition in a node, and of what is between them.

    Comments and decorators that are directly above a definition belong to it.
    """
    position = first
    body = node.child_by_field_name("body")
    # the earliest line that may belong to a member: the head of a class does not
    first_member_row = body.start_point.row + (body.text or b"").startswith(b"{") if body else first
    for member in _find_definitions(node):
        start = max(member.first, position)
        if member.end <= start:
            continue
        while start > max(position, first_member_row) and lines[start - 1].strip():
            start -= 1
        if path and start - position == 1 and position == first:
            start = first  # the only line of the head of a class
        if position < start:
            yield path, position, start
        member_path = (*path, member.name)
        if _CONTAINER_TYPES.fullmatch(member.node.type) and len(path) < _MAX_DEPTH:
            yield from _split_lines(member.node, lines, start, member.end, member_path)
        else:
            yield member_path, start, member.end
        position = first_member_row = member.end
    if position < end:
        yield path, position, end


def _find_definitions(node: "Node") -> Iterator[_Definition]:
    """Yield the outermost definitions of several lines in a node, in order."""
    stack = list(reversed(node.named_children))
    while stack:
        child = stack.pop()
        first, end = child.start_point.row, child.end_point.row + (child.end_point.column > 0)
        if end - first < 2:
            continue
        if _is_definition(child):
            yield _Definition(child, _find_name(child), first, end)
        else:
            stack.extend(reversed(child.named_children))


def _is_definition(node: "Node") -> bool:
    if node.type == "variable_declarator":  # of JavaScript: `const f = () => {…}`
        value = node.child_by_field_name("value")
        return value is not None and "function" in value.type
    return bool(_FUNCTION_TYPES.fullmatch(node.type) or _CONTAINER_TYPES.fullmatch(node.type))


def _find_name(node: "Node") -> str:
    """Return the name of a definition; a declarator of C contains declarators."""
    name_node = node
    for _ in range(_MAX_DECLARATORS):
        fields = (name_node.child_by_field_name(field) for field in ("name", "declarator", "type"))
        next_node = next((field for field in fields if field is not None), None)
        if next_node is None:
            break
        name_node = next_node
    name = node.type if name_node is node else (name_node.text or b"").decode()
    return " ".join(name.split())[:MAX_HEADING_PART]


SOURCE_CODE = SourceCode()
