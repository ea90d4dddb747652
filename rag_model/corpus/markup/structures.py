"""Convert tables, infoboxes and long lists in wikitext and HTML to rows of text.

A grid is built from cells with their attributes, in the same way for both kinds of markup: a value
that spans rows is repeated in each row, a hidden cell is dropped, and rows of header cells at the
top name the columns. Nested tables and lists become part of their cell. Each pass is linear in the
length of the text: unclosed markup is searched for once, and the text that is repeated for spanning
cells is limited.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rag_model.corpus.markup.blocks import CutText, RawSection
from rag_model.corpus.markup.literal import GAP, LINK_END, LINK_START, protect
from rag_model.corpus.markup.prose import to_plain_text
from rag_model.corpus.markup.scanner import LinkRenderer, Scanner, find_template_end, parse_call
from rag_model.corpus.markup.templates import ALL_RENDERERS, Templates, is_dropped, normalize_name
from rag_model.corpus.records import PassageKind, Structure, StructureName

# The marks of links are reused here, because no text contains them. The first separates texts that
# are cleaned together, and the second separates a field from its value.
_TEXT_MARK, _FIELD_MARK = LINK_START, LINK_END

CELL_SEPARATOR = " | "
_LINE_SEPARATOR = "; "  # replaces the line breaks in a cell
_MAX_COLSPAN, _MAX_ROWSPAN = 1_000, 65_534  # limits of HTML
_MIN_LETTERS = 3  # minimum letters and digits of a table, box or list
_ATTRIBUTE = re.compile(r"\b(rowspan|colspan)\s*+=\s*+[\"']?+\s*+(\d{1,6})", re.IGNORECASE)
_LIST_MARKS = frozenset("*#:;")
_HIDDEN = re.compile(r"display\s*:\s*none", re.IGNORECASE)
_BOX_CLASS = re.compile(r"\binfobox\b", re.IGNORECASE)
# Classes of tables that are not part of the article's content.
_SKIPPED_CLASS = re.compile(
    r"\b(?:[hv]?navbox|vertical-navbox|ambox|[a-z]*mbox|metadata|toc|noprint|reference)\b", re.I
)


@dataclass(slots=True)
class Cell:
    """A cell with its markup, which `Grid.to_structure` replaces by text."""

    text: str
    is_header: bool = False
    rowspan: int = 1
    colspan: int = 1


@dataclass(slots=True)
class Grid:
    """The cells of a table by row, in the order of the page."""

    attributes: str = ""
    caption: str = ""
    rows: list[list[Cell]] = field(default_factory=list)

    @property
    def kind(self) -> PassageKind | None:
        """Whether the grid is a table or an infobox; None if it is not content of the article."""
        if _SKIPPED_CLASS.search(self.attributes):
            return None
        return "infobox" if _BOX_CLASS.search(self.attributes) else "table"

    def to_structure(self, clean: Callable[[str], str]) -> Structure | None:
        """Return the rows and column headers as text; None if no text is visible.

        `clean` converts the joined markup of all cells to text.
        """
        kind = self.kind
        if kind is None or not any(self.rows):
            return None
        rows = [row for row in self.rows if row]
        cells = [cell for row in rows for cell in row]
        caption, *texts = clean_texts([self.caption, *(cell.text for cell in cells)], clean)
        for cell, text in zip(cells, texts, strict=True):
            cell.text = text
        head = [caption] if caption else []
        if kind == "infobox":
            return create_structure(kind, map(_format_field_row, _repeat_spans(rows, 0)), head)
        n_header_rows = _count_header_rows(rows)
        text_rows = _repeat_spans(rows, n_header_rows)
        head += [row[0].text for row in rows[:n_header_rows] if len(row) == 1 and row[0].text]
        if headers := _join_headers([text_rows[n] for n in range(n_header_rows) if len(rows[n]) > 1]):
            head.append(headers)
        return create_structure(kind, map(_format_row, text_rows[n_header_rows:]), head)


def is_requested(grid: Grid, structures: Collection[StructureName]) -> bool:
    """Return whether the kind of a grid is among the requested structures."""
    return ("infobox" if grid.kind == "infobox" else "tables") in structures


def create_structure(kind: PassageKind, rows: Iterable[str], head: Sequence[str] = ()) -> Structure | None:
    """Return a structure of the rows with text; None if it has hardly any letters and digits."""
    visible_rows = tuple(row for row in rows if any(map(str.isalnum, row)))
    if not visible_rows or sum(map(str.isalnum, "".join([*head, *visible_rows[:_MIN_LETTERS]]))) < _MIN_LETTERS:
        return None
    return Structure(kind, visible_rows, tuple(head))


def clean_texts(texts: Sequence[str], clean: Callable[[str], str]) -> list[str]:
    """Clean several texts in one call of `clean`, which is faster; return one line per text."""
    cleaned_texts = clean("".join(f"{_TEXT_MARK}\n{text}\n" for text in texts)).split(_TEXT_MARK)[1:]
    # Markup that starts in one text and ends in another changes the number of texts.
    if len(cleaned_texts) != len(texts):
        cleaned_texts = [clean(text) for text in texts]
    return [_LINE_SEPARATOR.join(filter(None, map(str.strip, text.split("\n")))) for text in cleaned_texts]


def _count_header_rows(cell_rows: Sequence[Sequence[Cell]]) -> int:
    """Return the number of rows at the top that have only header cells; 0 if all rows do."""
    return next((n for n, row in enumerate(cell_rows) if not all(cell.is_header for cell in row)), 0)


def _join_headers(rows: Sequence[Sequence[str]]) -> str:
    """Join the header rows column by column; a group's header precedes the headers below it."""
    n_columns = max(map(len, rows), default=0)
    columns = [
        " ".join(dict.fromkeys(filter(None, (row[column] for row in rows if column < len(row)))))
        for column in range(n_columns)
    ]
    return _format_row([column.replace(_LINE_SEPARATOR, " ") for column in columns])


def _format_row(cells: Sequence[str]) -> str:
    return CELL_SEPARATOR.join(cells).rstrip(" |").lstrip()


def _format_field_row(cells: Sequence[str]) -> str:
    field_name, *value_texts = (text for text in cells if text) if any(cells) else ("",)
    return f"{field_name.rstrip(' :')}: {', '.join(value_texts)}" if value_texts else field_name


def _repeat_spans(cell_rows: Sequence[Sequence[Cell]], n_header_rows: int) -> list[list[str]]:
    """Return the texts of each row, with a cell's text repeated in the rows and columns it spans.

    A text is repeated over columns only in the header rows, because a wide cell is read once. A
    limit on the characters bounds the repetitions in a hostile table.
    """
    character_budget = 10_000 + 4 * sum(len(cell.text) + 1 for row in cell_rows for cell in row)
    open_spans: dict[int, tuple[int, str]] = {}  # column -> (remaining rows, text)
    text_rows: list[list[str]] = []
    for row_number, row in enumerate(cell_rows):
        text_row: list[str] = []
        for cell in row:
            character_budget -= _fill_open_spans(text_row, open_spans, character_budget)
            column = len(text_row)
            n_columns = min(cell.colspan, _MAX_COLSPAN, max(character_budget, 1))
            repeated_text = cell.text if row_number < n_header_rows else ""
            text_row += [cell.text, *[repeated_text] * (n_columns - 1)]
            character_budget -= (n_columns - 1) * (len(repeated_text) + 1)
            if cell.rowspan > 1 and character_budget > 0:
                open_spans |= {column + i: (cell.rowspan - 1, text_row[column + i]) for i in range(n_columns)}
        character_budget -= _fill_open_spans(text_row, open_spans, character_budget)
        text_rows.append(text_row)
    return text_rows


def _fill_open_spans(text_row: list[str], open_spans: dict[int, tuple[int, str]], character_budget: int) -> int:
    """Append texts that span the next columns from above; return their number of characters."""
    n_characters = 0
    while (column := len(text_row)) in open_spans:
        remaining_rows, text = open_spans.pop(column)
        n_characters += len(text) + 1
        if n_characters > character_budget:
            open_spans.clear()
            break
        text_row.append(text)
        if remaining_rows > 1:
            open_spans[column] = remaining_rows - 1, text
    return n_characters


# Tables in wikitext.


_TABLE_LINE = re.compile(r"[ \t:*#]*(\{\||\|\}(?!\})|\|\+|\|-|[|!])")
_HTML_TAG = re.compile(r"<(/?)(table|caption|tr|td|th)\b([^<>]*)>", re.IGNORECASE)


def parse_wiki_table(text: str) -> Grid:
    """Return the cells of a table in wikitext whose templates and links are expanded already.

    The cells of a nested table become lines of the cell around it.
    """
    grid, depth = Grid(), 0
    builder = GridBuilder(grid)
    for line in text.split("\n"):
        line_mark = _TABLE_LINE.match(line)
        mark, rest = (line_mark[1], line[line_mark.end() :]) if line_mark else ("", line)
        if mark == "{|":
            depth += 1
            if depth == 1:
                grid.attributes = rest
        elif mark == "|}":
            depth -= 1
            if depth < 1:
                break
        elif depth > 1 and mark:
            if mark != "|-":
                cells = (_split_attributes(cell)[1].strip() for cell in _split_cells(rest, is_header=mark == "!"))
                builder.add_text("\n" + _LINE_SEPARATOR.join(cells))
        elif mark == "|-":
            builder.start_row(rest.lstrip("-"))
        elif mark == "|+":
            builder.start_caption(_protect_list_mark(_split_attributes(rest)[1]))
        elif mark:
            for cell in _split_cells(rest, is_header=mark == "!"):
                attributes, content = _split_attributes(cell)
                builder.start_cell(attributes, _protect_list_mark(content), is_header=mark == "!")
        else:
            builder.add_text("\n" + line)
    builder.end_cell()
    return grid


def parse_html_table(text: str) -> Grid:
    """Return the cells of a `<table>` in wikitext with expanded templates and links."""
    grid, depth, i = Grid(), 0, 0
    builder = GridBuilder(grid)
    for tag in _HTML_TAG.finditer(text):
        builder.add_text(text[i : tag.start()])
        i = tag.end()
        is_end, name, attributes = bool(tag[1]), tag[2].lower(), tag[3]
        if name == "table":
            depth += -1 if is_end else 1
            if depth == 1 and not is_end:
                grid.attributes = attributes
        elif depth > 1:
            builder.add_text("\n")
        else:
            builder.handle_tag(name, attributes, is_end=is_end)
    builder.end_cell()
    return grid


class GridBuilder:
    """Adds rows and cells to a grid, except hidden rows and cells."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._pieces: list[str] | None = None  # markup of the open cell or caption; None if dropped
        self._cell: Cell | None = None  # None while a caption is open
        self._row_is_hidden = False

    def add_text(self, text: str) -> None:
        """Append text to the open cell or caption."""
        if self._pieces is not None:
            self._pieces.append(text)

    def handle_tag(self, name: str, attributes: str, *, is_end: bool) -> None:
        """Start or end the row, caption or cell of an HTML tag `tr`, `caption`, `td` or `th`."""
        if is_end:
            self.end_cell()
        elif name == "tr":
            self.start_row(attributes)
        elif name == "caption":
            self.start_caption("")
        else:
            self.start_cell(attributes, "", is_header=name == "th")

    def end_cell(self) -> None:
        """Add the open cell to its row."""
        if self._pieces is None:
            return
        text, self._pieces = "".join(self._pieces), None
        if self._cell is None:
            self._grid.caption = text
        else:
            self._cell.text = text
            self._grid.rows[-1].append(self._cell)

    def start_row(self, attributes: str) -> None:
        """End the row, and start another one."""
        self.end_cell()
        self._row_is_hidden = _is_hidden(attributes)
        self._grid.rows.append([])

    def start_caption(self, text: str) -> None:
        """Start the caption."""
        self.end_cell()
        self._cell, self._pieces = None, [text]

    def start_cell(self, attributes: str, text: str, *, is_header: bool) -> None:
        """Start a cell of the current row."""
        self.end_cell()
        if not self._grid.rows:
            self._grid.rows.append([])
        if self._row_is_hidden or _is_hidden(attributes):
            return
        self._cell, self._pieces = Cell("", is_header), [text]
        for name, span_text in _ATTRIBUTE.findall(attributes) if attributes else ():
            if name[0] in "rR":
                self._cell.rowspan = min(int(span_text) or _MAX_ROWSPAN, _MAX_ROWSPAN)
            else:
                self._cell.colspan = max(int(span_text), 1)


def _is_hidden(attributes: str) -> bool:
    return "none" in attributes and _HIDDEN.search(attributes) is not None


def _split_cells(text: str, *, is_header: bool = False) -> list[str]:
    return text.replace("!!", "||").split("||") if is_header else text.split("||")


def _protect_list_mark(text: str) -> str:
    """Protect a list mark at the start of a cell, where it is text."""
    bare_text = text.lstrip()
    return protect(bare_text[0]) + bare_text[1:] if bare_text[:1] in _LIST_MARKS else text


def _split_attributes(cell: str) -> tuple[str, str]:
    """Split a cell at `|` into attributes and text."""
    attributes, bar, text = cell.partition("|")
    return (attributes, text) if bar else ("", cell)


# Infoboxes in wikitext.

_BOX_NAME = re.compile(
    r"(?:infobo|taxobox|automatic taxobox|speciesbox|subspeciesbox|geobox|chembox|drugbox|info/|"
    r"ficha de |infotaula|infocaset|infookvir|infokutija|infopolje|infokast|informkesto|faktamall|"
    r"faktaruta|kotak info|карточка|картка|инфокутия|տեղեկաքարտ|基礎情報|정보|صندوق معلومات|"
    r"جعبه اطلاعات|hộp thông tin|thông tin |กล่องข้อมูล|তথ্যছক|ज्ञानसन्दूक|माहितीचौकट|"
    r"πληροφορίες )|.*(?: infobox| bilgi kutusu)$"
)
_MAX_KEY = 100  # characters; a longer key is not a field name
_MIN_FIELDS = 4  # a template with this many fields is an infobox, whatever its name
_CALL = re.compile(r"(?:^|\}\})[ \t:]*\{\{([^|{}\[\]<>\n]*)", re.MULTILINE)
_NAMED_PARAMETER = re.compile(r"\|\s*[^\W\d_][\w .-]*=")
# Parameters that choose a picture or a format, and values that are not text.
_HIDDEN_FIELD = re.compile(
    r"(?!.*caption)(?:(?:image|img|photo|picture|imagen|imagem|immagine|logo|pushpin|mapframe|bild)|"
    r"(?:map|flag|coat|seal|blank emblem|emblem|locator|signature|sound|audio|video|alt|colou?r|background|"
    r"bodystyle|width|refs?|footnotes?|italic|zoom|name list|list[ \d]*style|country[ _]code|label[ _]position|"
    r"изображение|фото|герб|флаг|карта|画像|图片|그림)(?:\b|[\d_]|size|width)(?!of\b)|"
    r".*[ _](?:alt|bg|colou?r|image|img|logo|upright|link|photo|refs?|footnotes?|iso|prefix|flag|zoom)\d*$)",
    re.IGNORECASE,
)
_HIDDEN_VALUE = re.compile(
    r"\S[^\n]*\.(?:jpe?g|png|svg|gif|og[agv]|webm|tiff?|pdf|webp)|#[0-9a-f]{3,8}|\d+ ?px|"
    r"(?:yes|no|y|n|on|off|true|false|auto|none)|[a-z-]+: ?[^;:]+;.*",
    re.IGNORECASE,
)
_TRAILING_NUMBER = re.compile(r"[ _]*\d+$")
_ANGLE = re.compile(r"(lat|long?)_?(?:(d|m|s|deg|min|sec|degrees|minutes|seconds)|ns|ew|direction)$", re.IGNORECASE)
_ANGLE_SIGNS = {"d": "°", "m": "′", "s": "″"}  # degrees, minutes and seconds by first letter
_DIRECTION = re.compile(r"[NSEW]", re.IGNORECASE)
_DEGREES = re.compile(r"[-+−]?\d{1,3}(?:\.\d{1,12})?")


def find_boxes(text: str, templates: Templates) -> Iterator[str]:
    """Yield the infoboxes of a section with their braces; a nested box is part of the outer one."""
    if "{{" not in text:
        return
    i = 0
    while call_match := _CALL.search(text, i):
        i = call_match.end()
        name = normalize_name(call_match[1])
        is_named_box = _BOX_NAME.match(name) is not None or templates.has_infobox(name)
        if not is_named_box and (not name or name in ALL_RENDERERS or is_dropped(name)):
            continue
        box_end = find_template_end(text, call_match.start(1))
        if not box_end:
            return  # an unclosed template may contain the rest of the section
        box = text[call_match.start(1) - 2 : box_end]
        if is_named_box or len(_NAMED_PARAMETER.findall(box)) >= _MIN_FIELDS:
            yield box
        i = box_end - 2  # `_CALL` may need its closing braces to match the next call


class BoxRenderer:
    """Renders templates in infoboxes and tables; a box is rendered as its fields."""

    def __init__(self, templates: Templates) -> None:
        """Use `templates` for all templates but boxes, coordinates and those of table cells."""
        self._templates = templates
        self.box_name = ""  # name of the outermost box, if it is recognized by its fields

    def __call__(self, arguments: list[str], *, inside: bool) -> str:
        """Return the visible words of a template, or the marked fields of a box."""
        name, parameters = normalize_name(arguments[0]), arguments[1:]
        if (fields := self._templates.list_infobox_fields(name, parameters)) is not None:
            return "".join(f"{_TEXT_MARK}\n{label}{_FIELD_MARK}\n{value}\n" for label, value in fields)
        if name == self.box_name or _BOX_NAME.match(name):
            return "".join(_render_fields(parameters))
        if renderer := _CELL_RENDERERS.get(name):
            return renderer(parameters) or GAP
        if name in _CELL_WORDS and parameters:
            return parse_call(name, parameters).get("1") or GAP
        return self._templates.render(arguments, inside=inside)


# Templates in table cells that show a fixed word, or their first parameter instead.
_CELL_WORDS = frozenset([
    "yes", "no", "partial", "yes2", "no2", "won", "nom", "n/a", "na", "dunno", "unknown", "tba",
    "rh", "draw", "good", "bad", "okay", "sho", "pending", "maybe", "any", "free", "nonfree",
    "proprietary", "active", "cancelled", "included", "depends", "site", "beta", "operational",
])  # fmt: skip


def render_coordinates(arguments: Sequence[str]) -> str:
    """Render `{{coord|57|18|22|N|4|27|32|W|display=title}}`, also with decimal degrees.

    >>> render_coordinates(["57", "18", "22", "N", "4", "27", "32", "W", "display=title"])
    '57°18′22″N 4°27′32″W'
    """
    angles: list[str] = []
    degrees: list[str] = []
    for argument in map(str.strip, arguments[:9]):
        if _DIRECTION.fullmatch(argument):
            angles.append("".join(map("".join, zip(degrees, "°′″", strict=False))) + argument.upper())
            degrees = []
        elif _DEGREES.fullmatch(argument):
            degrees.append(argument)
        else:
            break
    return " ".join(angles) or (f"{degrees[0]}, {degrees[1]}" if len(degrees) == 2 else "")


# Renderers that apply only in infoboxes and tables; sort keys have no text.
_CELL_RENDERERS: dict[str, Callable[[Sequence[str]], str]] = {
    **dict.fromkeys(("coord", "coordinates", "coor dms", "coor dm", "coor d"), render_coordinates),
    "won": lambda parameters: parameters[0].strip() if parameters else "Won",
    "nom": lambda parameters: parameters[0].strip() if parameters else "Nominated",
    "longitem": lambda parameters: parameters[-1].strip() if parameters else "",
    "sort": lambda parameters: parameters[1].strip() if len(parameters) > 1 else "",
    **dict.fromkeys(("hs", "hid", "sortkey", "sort key", "ntsh", "dtsh", "hidden sort key"), lambda _: ""),
    **dict.fromkeys(
        ("sortname", "sort name"),
        lambda parameters: " ".join(part.strip() for part in parameters[:2] if "=" not in part),
    ),
}


def is_dropped_in_box(name: str) -> bool:
    """Return whether a template shows no text in a box or a table."""
    normalized_name = normalize_name(name)
    return normalized_name not in _CELL_RENDERERS and not _BOX_NAME.match(normalized_name) and is_dropped(name)


def parse_box(
    expand: Callable[[str], str], renderer: BoxRenderer, box: str, *, is_portable: bool = False
) -> Structure | None:
    """Return the fields of an infobox as lines `field: value`; nested lists are flattened.

    Values that usually are no text (such as `yes` or a colour) are kept only if `is_portable` is
    set.
    """
    name = _get_box_name(box)
    renderer.box_name = "" if _BOX_NAME.match(name) else name
    field_texts = clean_texts(expand(box).split(_TEXT_MARK), to_plain_text)
    renderer.box_name = ""
    lines: list[str] = []
    for text in field_texts:
        label, separator, value = text.partition(_FIELD_MARK)
        value = value.strip(" ;")
        if separator and value and (is_portable or not _HIDDEN_VALUE.fullmatch(value)):
            label = label.strip(" ;:")
            lines.append(f"{label}: {value}" if label else value)
    return create_structure("infobox", lines)


def _get_box_name(box: str) -> str:
    return normalize_name(box[2:].partition("|")[0].partition("\n")[0].rstrip("}"))


def _render_fields(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the visible fields of a box between `_TEXT_MARK` and `_FIELD_MARK`."""
    parts_by_axis: dict[str, dict[str, str]] = {}
    for key, value in parse_call("", arguments).params.items():
        if angle_match := _ANGLE.match(key):
            part = angle_match[2].lower()[0] if angle_match[2] else "direction"
            if value:
                parts_by_axis.setdefault(angle_match[1].lower()[:3], {})[part] = value
        elif value and len(key) <= _MAX_KEY and not _HIDDEN_FIELD.match(key) and not key.isdecimal():
            label = _TRAILING_NUMBER.sub("", key).replace("_", " ").strip() or key
            yield f"{_TEXT_MARK}\n{protect(label[:1].upper() + label[1:])}{_FIELD_MARK}\n{value}\n"
    if coordinates := " ".join(filter(None, map(_format_angle, parts_by_axis.values()))):
        yield f"{_TEXT_MARK}\nCoordinates{_FIELD_MARK}\n{coordinates}\n"


def _format_angle(parts: dict[str, str]) -> str:
    angle_text = "".join(
        parts[part] + sign for part, sign in _ANGLE_SIGNS.items() if _DEGREES.fullmatch(parts.get(part, ""))
    )
    direction = parts.get("direction", "")
    return angle_text + (direction.upper() if _DIRECTION.fullmatch(direction) else "") if angle_text else ""


# Long lists in wikitext.

_MIN_ITEMS, _MIN_LIST_WORDS = 6, 100  # minimum items and words of a long list
_LONG_LIST = re.compile(rf"(?:^[*#;][^\n]*(?:\n|\Z)|^:[*#:;]*[^\n]*(?:\n|\Z)){{{_MIN_ITEMS},}}+", re.MULTILINE)
_ITEM = re.compile(r"^(?=[*#;](?![*#:;]))", re.MULTILINE)
_MAX_INTRODUCTION = 300  # characters
_BLANK_LINES = re.compile(r"\n\s*\n")


class RawList(NamedTuple):
    """A list in wikitext with the line before it."""

    introduction: str
    items: Sequence[str]


def cut_lists(text: str) -> tuple[str, list[RawList]]:
    """Return (section without its long lists, the lists)."""
    pieces: list[str] = []
    raw_lists: list[RawList] = []
    i = 0
    for match in _LONG_LIST.finditer(text):
        if not match[0].startswith(("*", "#", ";")) or len(match[0].split()) < _MIN_LIST_WORDS:
            continue
        pieces.append(text[i : match.start()])
        i = match.end()
        introduction = _BLANK_LINES.split(pieces[-1].strip()[-2 * _MAX_INTRODUCTION :])[-1].rpartition("\n")[2]
        raw_lists.append(RawList(introduction, [item for item in _ITEM.split(match[0]) if item.strip()]))
    return ("".join([*pieces, text[i:]]), raw_lists) if raw_lists else (text, raw_lists)


class StructureParser:
    """Finds the structures in the sections of a page."""

    def __init__(
        self, templates: Templates, render_link: LinkRenderer, cut_text: CutText, structures: Collection[StructureName]
    ) -> None:
        """Parse the requested structures of a page whose tables are already cut from its text."""
        self._templates, self._renderer = templates, BoxRenderer(templates)
        self._expand = Scanner(self._renderer, render_link, is_dropped_in_box).expand
        self._body, self._structures = cut_text, frozenset(structures)

    def extract(self, section: RawSection) -> tuple[str, list[Structure]]:
        """Return the markup of a section without long lists, and its tables, boxes and lists."""
        markup, structures = section.body, list[Structure | None]()
        if "infobox" in self._structures:
            structures += map(self._parse_box, find_boxes(markup, self._templates))
        for table in self._body.select(section.start, section.start + len(markup)):
            parse_table = parse_wiki_table if table.lstrip(" \t:*#").startswith("{|") else parse_html_table
            grid = parse_table(self._expand(table))
            if is_requested(grid, self._structures):
                structures.append(grid.to_structure(to_plain_text))
        if "lists" in self._structures:
            markup, lists = cut_lists(markup)
            structures += [self._clean_list(raw_list) for raw_list in lists]
        return markup, [structure for structure in structures if structure is not None]

    def _parse_box(self, box: str) -> Structure | None:
        is_portable = self._templates.has_infobox(_get_box_name(box))
        return parse_box(self._expand, self._renderer, box, is_portable=is_portable)

    def _clean_list(self, raw_list: RawList) -> Structure | None:
        texts = [self._expand(text) for text in (raw_list.introduction, *raw_list.items)]
        introduction, *items = clean_texts(texts, to_plain_text)
        return create_structure("list", items, [introduction] if introduction else [])
