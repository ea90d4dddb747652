"""Read office files: one section per heading of a text, per slide, or per sheet of a workbook.

The files are zipped XML, so a small file may unpack to gigabytes. The sizes that the archive
declares are checked first, and `zipfile` reads no more bytes than declared. The libraries run in a
child process.
"""

import re
from collections.abc import Sequence, Set
from datetime import date, datetime, time
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar
from zipfile import BadZipFile, ZipFile

from rag_model.corpus.dump_formats.document_files import (
    DroppedFileError,
    IsolatedFiles,
    ParsedFile,
    SectionBuilder,
    clean_text,
)
from rag_model.corpus.records import parse_seconds
from rag_model.extras import format_versions, require
from rag_model.process import serve_call

_MAX_UNPACKED_BYTES, _MAX_FILES = 256 << 20, 20_000  # maximum bytes and files of an archive
_OLE_HEADER = b"\xd0\xcf\x11\xe0"  # a file with a password is an OLE container, not a zip archive
_MODIFIED_TIME = re.compile(rb"<(?:dcterms:modified|dc:date)\b[^>]*>([^<]{1,40})<")
# files in the archive with the metadata: of Microsoft Office, and of OpenDocument
_PROPERTY_FILES = "docProps/core.xml", "meta.xml"
_WORD_STYLES = "p[style-name='Title'] => h1:fresh"  # mammoth's style map: a title becomes a heading
_MAX_GROUP_DEPTH = 20  # maximum depth of nested groups of shapes
_MAX_STYLE_DEPTH = 20  # maximum length of a chain of styles, each based on the next


class Office(IsolatedFiles):
    """Files of Microsoft Office and LibreOffice: .docx, .odt, .pptx and .xlsx."""

    version = f"4, {format_versions('mammoth', 'odfdo', 'python-pptx', 'openpyxl', 'lxml', 'markdown-it-py')}"
    libraries: ClassVar = {".docx": "mammoth", ".odt": "odfdo", ".pptx": "pptx", ".xlsx": "openpyxl"}
    endings = frozenset(libraries)
    max_bytes = 64 << 20
    module = "rag_model.corpus.dump_formats.office"
    extra = "office"


def _read_file(path: str) -> dict[str, Any]:
    """Return the sections of a file and the time of its last change, or the reason to drop it."""
    file = Path(path)
    try:
        with ZipFile(file) as archive:
            entries = archive.infolist()
            if len(entries) > _MAX_FILES or sum(entry.file_size for entry in entries) > _MAX_UNPACKED_BYTES:
                return {"dropped": "too_large"}
            property_files = (archive.read(name) for name in _PROPERTY_FILES if name in archive.namelist())
            time_match = _MODIFIED_TIME.search(next(property_files, b""))
        sections = _READERS[file.suffix](file).sections
    except DroppedFileError as error:
        return {"dropped": error.reason}
    except BadZipFile:
        return {"dropped": "encrypted" if file.read_bytes().startswith(_OLE_HEADER) else "damaged"}
    except MemoryError:
        raise
    except Exception:  # the libraries raise errors of many types for damaged XML
        return {"dropped": "damaged"}
    return {"sections": sections, "revised": _parse_time(time_match[1] if time_match else b"")}


def _read_word(path: Path) -> ParsedFile:
    from rag_model.corpus.dump_formats.markup_files import HTML  # noqa: PLC0415 - only for the child

    mammoth = require("mammoth", extra="office")
    drop_images = mammoth.images.img_element(lambda image: {"src": ""})
    file = _drop_hidden_runs(path)
    html = mammoth.convert_to_html(file, style_map=_WORD_STYLES, convert_image=drop_images).value
    return HTML.parse(html.encode(), path.name)


def _drop_hidden_runs(path: Path) -> BytesIO:
    """Return a copy of a Word file without images and hidden text; mammoth drops deleted text."""
    etree, file = require("lxml.etree", extra="office"), BytesIO()
    parser = etree.XMLParser(resolve_entities=False, no_network=True)
    with ZipFile(path) as archive:
        members = {name: archive.read(name) for name in filter(re.compile(r"\.(xml|rels)$").search, archive.namelist())}
    # Without the zero bytes of UTF-16, the word is found in either encoding.
    if any(b"vanish" in member_bytes.replace(b"\0", b"") for member_bytes in members.values()):
        # Metadata and data of other programs may be damaged, and contain no text of the document.
        names = [name for name in members if not name.startswith(("customXml/", "docProps/"))]
        roots = {name: etree.fromstring(members[name], parser) for name in names}
        hidden_styles = _list_hidden_styles([style for root in roots.values() for style in root.iter("{*}style")])
        for name, root in roots.items():
            for run in [run for run in root.iter("{*}r") if _is_hidden(run, hidden_styles)]:
                run.getparent().remove(run)
            members[name] = etree.tostring(root)
    with ZipFile(file, "w") as archive:
        for name, member_bytes in members.items():
            archive.writestr(name, member_bytes)
    return file


def _list_hidden_styles(styles: Sequence[Any]) -> set[str]:
    """Return the ids of the styles of a Word file that hide text."""
    style_by_id = {_get_attribute(style, "styleId"): style for style in styles}
    hidden_styles = set()
    for style_id, style in style_by_id.items():
        ancestor = style
        for _ in range(_MAX_STYLE_DEPTH):  # a style may be based on itself
            if ancestor is None or _read_vanish(ancestor) is not None:
                break
            ancestor = style_by_id.get(_get_attribute(ancestor.find("{*}basedOn"), "val"))
        if ancestor is not None and _read_vanish(ancestor):
            hidden_styles.add(style_id)
    return hidden_styles


def _is_hidden(run: Any, hidden_styles: Set[str]) -> bool:
    """Return whether a run is hidden by its own properties or, if they do not say, by its styles."""
    is_hidden, paragraph = _read_vanish(run), next(run.iterancestors("{*}p"), run)
    if is_hidden is None:
        styles = run.find("{*}rPr/{*}rStyle"), paragraph.find("{*}pPr/{*}pStyle")
        return any(_get_attribute(style, "val") in hidden_styles for style in styles)
    return is_hidden


def _read_vanish(element: Any) -> bool | None:
    """Return whether the own properties of a run or style hide text; None if they do not say."""
    values = [_get_attribute(vanish, "val") for vanish in element.iterfind("{*}rPr/{*}vanish")]
    return any(value not in ("0", "false", "off") for value in values) if values else None


def _get_attribute(element: Any, name: str) -> str:
    """Return an attribute in any namespace; "" if it is missing or the element is None."""
    attributes = {} if element is None else element.attrib
    return next((str(value) for key, value in attributes.items() if key.rpartition("}")[2] == name), "")


def _read_open_document(path: Path) -> ParsedFile:
    from rag_model.corpus.dump_formats.markup_files import MARKDOWN  # noqa: PLC0415

    document = require("odfdo", extra="office").Document(str(path))
    return MARKDOWN.parse(str(document.to_markdown()).encode(), path.name)


def _read_presentation(path: Path) -> ParsedFile:
    builder = SectionBuilder()
    for slide_number, slide in enumerate(require("pptx", extra="office").Presentation(str(path)).slides, start=1):
        title = slide.shapes.title
        heading = title.text_frame.text if title is not None else ""
        builder.start_section(1, f"{heading} (slide {slide_number})" if heading.strip() else f"slide {slide_number}")
        for shape in slide.shapes:
            if title is None or shape.shape_id != title.shape_id:
                _add_shape(builder, shape)
        if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
            builder.add_block(clean_text(slide.notes_slide.notes_text_frame.text))
    return ParsedFile(builder.finish())


def _add_shape(builder: SectionBuilder, shape: Any, depth: int = 0) -> None:
    if depth < _MAX_GROUP_DEPTH:
        for group_member in getattr(shape, "shapes", ()):  # only a group has `shapes`
            _add_shape(builder, group_member, depth + 1)
    if shape.has_text_frame:
        lines = [f"{'  ' * paragraph.level}{clean_text(paragraph.text)}" for paragraph in shape.text_frame.paragraphs]
        builder.add_block("\n".join(lines))
    elif getattr(shape, "has_table", False):
        builder.add_rows([[cell.text for cell in row.cells] for row in shape.table.rows])


def _read_workbook(path: Path) -> ParsedFile:
    workbook = require("openpyxl", extra="office").load_workbook(path, read_only=True, data_only=True)
    builder = SectionBuilder()
    for sheet in workbook.worksheets:
        if sheet.sheet_state == "visible":
            sheet.reset_dimensions()  # the declared size of a sheet may be wrong
            builder.start_section(1, sheet.title)
            builder.add_rows(map(_format_value, row) for row in sheet.iter_rows(values_only=True))
    # a sheet without rows has only its heading
    return ParsedFile([(heading, text) for heading, text in builder.finish() if text != heading])


def _format_value(value: Any) -> str:
    """Return the text of a cell's value, without the number format of the workbook."""
    if isinstance(value, datetime) and value.time() == time.min:
        value = value.date()
    if isinstance(value, float):
        return f"{value:.15g}"
    return value.isoformat() if isinstance(value, date | time) else "" if value is None else str(value)


def _parse_time(time_text: bytes) -> int | None:
    try:
        return parse_seconds(time_text.decode().strip()[:19] + "Z")
    except ValueError:
        return None


_READERS = {
    ".docx": _read_word,
    ".odt": _read_open_document,
    ".pptx": _read_presentation,
    ".xlsx": _read_workbook,
}
OFFICE = Office()

if __name__ == "__main__":
    serve_call(_read_file)
