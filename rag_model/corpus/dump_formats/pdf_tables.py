"""Find the tables of a PDF page whose cells are ruled by lines, or filled.

Edges of lines and rectangles that touch each other form a grid. It is a table if most of its cells
have text, at least two rows have it in several cells, and its lines cut no words: frames, boxes,
charts and highlighted words are no tables. The time is linear in the numbers of paths and
characters, which are limited: a page that exceeds a limit has no tables.
"""

from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from ctypes import c_float, c_int
from itertools import islice, pairwise, product
from typing import Any, NamedTuple

Rows = list[list[str]]
_MAX_OBJECTS, _MAX_CHARACTERS = 100_000, 50_000  # of a page; objects include segments of paths
_MAX_CROSSINGS, _MAX_GRIDS, _MAX_CELLS = 250_000, 20, 10_000  # pairs of lines, and grids, of a page; cells of a grid
_TOLERANCE = 3.0  # points; nearer lines touch each other
_MIN_LENGTH = 6.0  # points of a line
_LETTER_GAP, _WORD_GAP = 0.1, 0.35  # maximum gaps in a word and in a phrase, in heights of a character
_MAX_CUTS = 0.1  # maximum number of words that lines cut, as a share of the cells with text
_Cell = tuple[int, int]  # row and column
_Place = tuple[int, int, int]  # row, number of the row within it if no lines separate them, and column
_Transform = Callable[[float, float], tuple[float, float]]
# Rotation of a page -> transform to the points that a reader sees, with y downwards.
_ROTATIONS: dict[int, _Transform] = {
    0: lambda x, y: (x, -y),
    90: lambda x, y: (y, x),
    180: lambda x, y: (-x, y),
    270: lambda x, y: (-y, -x),
}


class _Line(NamedTuple):
    """A horizontal or vertical line: its position in the other direction, its start and its end."""

    position: float
    start: float
    end: float

    def reaches(self, position: float) -> bool:
        return self.start - _TOLERANCE <= position <= self.end + _TOLERANCE


class _Character(NamedTuple):
    """A character and its box, which is empty for spaces."""

    text: str
    left: float
    right: float
    top: float
    bottom: float

    def follows(self, last: "_Character", max_gap: float) -> bool:
        """Return whether it is on the same line as another, after a gap of at most so many heights."""
        height = self.bottom - self.top
        return self.left - last.right < max_gap * height and abs(self.bottom - last.bottom) < height / 2

    def is_sideways(self, last: "_Character") -> bool:
        """Return whether it is above or below the letter before it in a word, as in a rotated table."""
        common_height = min(self.bottom, last.bottom) - max(self.top, last.top)
        is_beside = 4 * common_height > min(self.bottom - self.top, last.bottom - last.top)
        return self.text.isalnum() and last.text.isalnum() and not is_beside


class _Grid:
    """Cells between lines; where the line between two is missing, they may be one cell."""

    def __init__(self, rows: Sequence[_Line], columns: Sequence[_Line]) -> None:
        # A table without outer borders ends where its lines end.
        self.ys = _cluster([*(row.position for row in rows), *_find_extent(columns)])
        self.xs = _cluster([*(column.position for column in columns), *_find_extent(rows)])
        self.n_rows, self.n_columns = len(self.ys) - 1, len(self.xs) - 1
        self._tops = set(_list_borders(rows, self.ys, self.xs))  # cells with a line above them
        self._lefts = {(row, column) for column, row in _list_borders(columns, self.xs, self.ys)}

    def locate(self, character: _Character) -> _Cell | None:
        """Return the cell with the middle of a character."""
        row = bisect(self.ys, (character.top + character.bottom) / 2) - 1
        column = bisect(self.xs, (character.left + character.right) / 2) - 1
        return (row, column) if 0 <= row < self.n_rows and 0 <= column < self.n_columns else None

    def read_rows(self, characters: Sequence[_Character], cells: dict[int, _Cell]) -> Rows:
        """Return the rows of the table, given the cell of each position of a character; none if it is no table."""
        ruled_rows = {row for row, column in self._lefts if 0 < column < self.n_columns}
        firsts = self._join_cells(characters, cells, ruled_rows)
        texts, last_positions, n_cuts = defaultdict[_Place, list[str]](list), dict[_Place, int](), 0
        bands, last_place = Counter[int](), None
        for i, cell in cells.items():
            row, column = firsts[cell]
            last = last_positions.get((row, bands[row], column))
            is_new_line = last is not None and characters[i].top > (characters[last].top + characters[last].bottom) / 2
            if is_new_line and last_place != (row, bands[row], column):  # after the other cells of a row without a line
                bands[row], last, is_new_line = bands[row] + 1, None, False
            place = last_place = row, bands[row], column
            before = characters[i - 1]
            if last == i - 1:
                n_cuts += characters[i].is_sideways(before)
            else:
                n_cuts += bool(before.text.strip()) and characters[i].follows(before, _LETTER_GAP)
                texts[place].append("\n" if is_new_line else "" if last is None else " ")
            texts[place].append(characters[i].text)
            last_positions[place] = i
        rows, columns = sorted({place[:2] for place in texts}), sorted({place[2] for place in texts})
        n_cells = len({(firsts[row, column], band) for row, band in rows for column in columns})
        table = [[_join_characters(texts.get((*row, column), "")) for column in columns] for row in rows]
        for (row, _), values in zip(rows, table, strict=True):
            if row not in ruled_rows and sum(map(bool, values)) == 1:
                values.sort(key=bool, reverse=True)  # a heading of the rows below
        has_columns = sum(sum(map(bool, values)) > 1 for values in table) > 1
        is_table = has_columns and 2 * len(texts) >= n_cells and n_cuts <= _MAX_CUTS * len(texts)
        return _split_bands(table) if is_table else []

    def _join_cells(
        self, characters: Sequence[_Character], cells: dict[int, _Cell], ruled_rows: set[int]
    ) -> dict[_Cell, _Cell]:
        """Return, for each cell, the first of the cells that are one with it.

        In a row without lines between its columns, such as one without a background between two
        that have one, only the cells that a phrase crosses are one.
        """
        crossed_cells = {
            (row, crossed)
            for (i, (row, column)), (j, (next_row, next_column)) in pairwise(cells.items())
            if row == next_row and row not in ruled_rows and characters[j].follows(characters[i], _WORD_GAP)
            for crossed in range(column + 1, next_column + 1)
        }
        firsts: dict[_Cell, _Cell] = {}
        for row, column in product(range(self.n_rows), range(self.n_columns)):
            cell = row, column
            if cell in crossed_cells or (column and row in ruled_rows and cell not in self._lefts):
                firsts[cell] = firsts[row, column - 1]
            else:
                firsts[cell] = firsts[row - 1, column] if row and cell not in self._tops else cell
        return firsts


def split_page(raw: Any, page: Any, text_page: Any, budget: Iterator[Any]) -> Iterator[str | Rows]:
    """Yield the prose and the tables of a page in reading order.

    Each object and character takes an item of `budget`, which the pages of a file share; once it is
    empty, pages have no tables.
    """
    transform = _ROTATIONS[page.get_rotation()]
    edges = _iter_edges(raw, page, raw.FPDFPage_GetObject, raw.FPDFPage_CountObjects(page), transform)
    grids = _find_grids([edge for _, edge in zip(budget, islice(edges, _MAX_OBJECTS), strict=False)])
    n_characters = raw.FPDFText_CountChars(text_page)
    is_readable = grids and n_characters <= _MAX_CHARACTERS and len([*islice(budget, n_characters)]) == n_characters
    characters = [_read_character(raw, text_page, i, transform) for i in range(n_characters if is_readable else 0)]
    prose = dict(enumerate(characters))
    tables: dict[int, Rows] = {}  # by the position of the first character
    for grid in grids:
        words = ((i, grid.locate(character)) for i, character in prose.items() if character.text.strip())
        cells = {i: cell for i, cell in words if cell}
        if cells and (rows := grid.read_rows(characters, cells)):
            tables[min(cells)] = rows
            for i in cells:
                del prose[i]
    if not tables:
        yield text_page.get_text_bounded()
        return
    for start, end in pairwise(sorted({0, *tables, n_characters})):
        yield from [tables[start]] if start in tables else []
        yield _join_characters(prose[i].text for i in range(start, end) if i in prose)


def _join_characters(texts: Iterable[str]) -> str:
    """Return a text; PDFium gives the two halves of a character beyond U+FFFF, such as an emoji."""
    return "".join(texts).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _read_character(raw: Any, text_page: Any, i: int, transform: _Transform) -> _Character:
    box, code = raw.FS_RECTF(), raw.FPDFText_GetUnicode(text_page, i)
    raw.FPDFText_GetLooseCharBox(text_page, i, box)
    corners = transform(box.left, box.bottom), transform(box.right, box.top)
    (left, right), (top, bottom) = map(sorted, zip(*corners, strict=True))
    return _Character(chr(code) if code else "", left, right, top, bottom)


def _iter_edges(
    raw: Any, holder: Any, get_object: Callable[[Any, int], Any], n_objects: int, outer: _Transform
) -> Iterator[tuple[int, _Line] | None]:
    """Yield the axis and the line of each straight edge of the paths of a page or form, and None for other objects."""
    own, fill, stroke, x, y = raw.FS_MATRIX(), c_int(), c_int(), c_float(), c_float()
    for i in range(n_objects):
        yield None
        item = get_object(holder, i)
        kind = raw.FPDFPageObj_GetType(item)
        if kind not in {raw.FPDF_PAGEOBJ_FORM, raw.FPDF_PAGEOBJ_PATH}:
            continue
        raw.FPDFPageObj_GetMatrix(item, own)
        transform = _compose(outer, own.a, own.b, own.c, own.d, own.e, own.f)
        if kind == raw.FPDF_PAGEOBJ_FORM:
            n_members = raw.FPDFFormObj_CountObjects(item)
            yield from _iter_edges(raw, item, raw.FPDFFormObj_GetObject, n_members, transform)
            continue
        raw.FPDFPath_GetDrawMode(item, fill, stroke)
        start = last = (0.0, 0.0)
        for j in range(raw.FPDFPath_CountSegments(item) if fill.value or stroke.value else 0):
            yield None
            segment = raw.FPDFPath_GetPathSegment(item, j)
            raw.FPDFPathSegment_GetPoint(segment, x, y)
            point = transform(x.value, y.value)
            kind = raw.FPDFPathSegment_GetType(segment)
            start = point if kind == raw.FPDF_SEGMENT_MOVETO else start
            if kind == raw.FPDF_SEGMENT_LINETO:
                yield _build_edge(last, point)
            if raw.FPDFPathSegment_GetClose(segment):
                yield _build_edge(point, start)
            last = point


def _compose(outer: _Transform, a: float, b: float, c: float, d: float, e: float, f: float) -> _Transform:
    return lambda x, y: outer(a * x + c * y + e, b * x + d * y + f)


def _build_edge(first: tuple[float, float], last: tuple[float, float]) -> tuple[int, _Line] | None:
    """Return the axis of an edge (0: horizontal) and its line; None if it is oblique."""
    width, height = abs(first[0] - last[0]), abs(first[1] - last[1])
    if min(width, height) > 0.02 * max(width, height):
        return None
    axis = int(height > width)
    return axis, _Line(first[1 - axis], *sorted((first[axis], last[axis])))


def _find_grids(edges: Sequence[tuple[int, _Line] | None]) -> list[_Grid]:
    """Return the grids of several rows and columns that edges form, small ones first; none of too many edges."""
    rows, columns = (_merge_lines([edge[1] for edge in edges if edge and edge[0] == axis]) for axis in (0, 1))
    if len(edges) == _MAX_OBJECTS or len(rows) * len(columns) > _MAX_CROSSINGS:
        return []
    groups = [([row], list[_Line]()) for row in rows]
    for column in columns:  # join the groups that it touches
        joined_group, other_groups = (list[_Line](), [column]), []
        for group in groups:
            if any(row.reaches(column.position) and column.reaches(row.position) for row in group[0]):
                joined_group[0].extend(group[0])
                joined_group[1].extend(group[1])
            else:
                other_groups.append(group)
        groups = [*other_groups, joined_group]
    bands, last_bands = list[tuple[list[_Line], list[_Line]]](), dict[frozenset[float], int]()
    for band in sorted((sorted(group[0]), group[1]) for group in groups if all(group)):
        key = frozenset(column.position for column in band[1])
        last = bands[last_bands[key]][0] if key in last_bands else None
        top, bottom = band[0][0].position, band[0][-1].position
        is_row = len({row.position for row in band[0]}) == 2
        if last and is_row and top - last[-1].position < 1.5 * (bottom - top):
            last.extend(band[0])  # a row without a background is between two that have one
            bands[last_bands[key]][1].extend(band[1])
        else:
            last_bands[key] = len(bands)
            bands.append(band)
    grids = [_Grid(*band) for band in bands]
    grids = [
        grid for grid in grids if min(grid.n_rows, grid.n_columns) > 1 and grid.n_rows * grid.n_columns <= _MAX_CELLS
    ]
    grids.sort(key=lambda grid: (grid.xs[-1] - grid.xs[0]) * (grid.ys[-1] - grid.ys[0]))
    return grids if len(grids) <= _MAX_GRIDS else []


def _merge_lines(edges: Sequence[_Line]) -> list[_Line]:
    """Return the lines that near edges form, in order of position, without short ones."""
    positions = _cluster(edge.position for edge in edges)
    lines = defaultdict[float, list[_Line]](list)
    for edge in sorted(edges, key=lambda edge: edge.start):
        position = positions[bisect(positions, edge.position) - 1]
        if lines[position] and lines[position][-1].reaches(edge.start):
            last = lines[position].pop()
            lines[position].append(_Line(position, last.start, max(last.end, edge.end)))
        else:
            lines[position].append(_Line(position, edge.start, edge.end))
    return [line for position in positions for line in lines[position] if line.end - line.start >= _MIN_LENGTH]


def _cluster(values: Iterable[float]) -> list[float]:
    """Return the first value of each group of near values, in order."""
    firsts: list[float] = []
    for value in sorted(values):
        if not firsts or value - firsts[-1] > _TOLERANCE:
            firsts.append(value)
    return firsts


def _find_extent(lines: Sequence[_Line]) -> tuple[float, float]:
    return min(line.start for line in lines), max(line.end for line in lines)


def _list_borders(lines: Iterable[_Line], positions: Sequence[float], others: Sequence[float]) -> Iterator[_Cell]:
    """Yield the numbers of the position of a line, and of each gap of the other positions that it covers."""
    middles = [(start + end) / 2 for start, end in pairwise(others)]
    for line in lines:
        for gap in range(bisect(middles, line.start), bisect(middles, line.end)):
            yield bisect(positions, line.position) - 1, gap


def _split_bands(table: Rows) -> Rows:
    """Return the rows of a table with lines between its columns, but not between the rows below its header.

    Then all cells of a row have the same number of text lines, which wrapped text rarely has in three columns.
    """
    lines = [[value.split("\n") for value in row] for row in table[1:]]
    if len(table[0]) < 3 or any(len(set(map(len, row))) > 1 for row in lines):
        return table
    return [table[0], *([*row] for band in lines for row in zip(*band, strict=True))]
