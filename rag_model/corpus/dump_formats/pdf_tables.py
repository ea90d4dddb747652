"""Find the tables of a PDF page whose cells are ruled by lines, or filled.

Edges of lines and rectangles that touch each other form a grid. It is a table if most of its cells
have text, at least two rows have it in several cells, and its lines cut no words: frames, boxes,
charts and highlighted words are no tables. The time is linear in the numbers of paths and
characters, which are limited: a page that exceeds a limit has no tables.
"""

from bisect import bisect
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from ctypes import c_float, c_int
from itertools import pairwise
from typing import Any, NamedTuple

Rows = list[list[str]]
_MAX_OBJECTS, _MAX_CHARACTERS = 100_000, 50_000  # of a page; objects include segments of paths
_MAX_CROSSINGS, _MAX_GRIDS, _MAX_CELLS = 250_000, 20, 10_000  # pairs of lines, and grids, of a page; cells of a grid
_TOLERANCE = 3.0  # points; nearer lines touch each other
_MIN_LENGTH = 6.0  # points of a line
_LETTER_GAP, _WORD_GAP = 0.1, 0.35  # maximum gaps in a word and in a phrase, in heights of a character
_MAX_CUTS = 0.1  # maximum number of words that lines cut, as a share of the cells with text
# Rotation of a page -> matrix from its points to those that a reader sees, with y downwards.
_ROTATIONS = {0: (1, 0, 0, -1, 0, 0), 90: (0, 1, 1, 0, 0, 0), 180: (-1, 0, 0, 1, 0, 0), 270: (0, -1, -1, 0, 0, 0)}
_Cell = tuple[int, int]  # row and column


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
        texts, ends, n_cuts = dict[_Cell, str](), dict[_Cell, int](), 0
        for i, cell in cells.items():
            first = _find_first(firsts, cell)
            last, separator = characters[ends.get(first, i)], " " if ends.get(first) != i - 1 else ""
            if characters[i].top > (last.top + last.bottom) / 2:
                separator = "\n"
            elif first not in ends or separator:
                before = characters[i - 1]
                n_cuts += bool(before.text.strip()) and characters[i].follows(before, _LETTER_GAP)
            texts[first] = (texts.get(first, "") + separator + characters[i].text).lstrip()
            ends[first] = i
        rows, columns = (sorted({cell[axis] for cell in texts}) for axis in (0, 1))
        n_cells = len({_find_first(firsts, (row, column)) for row in rows for column in columns})
        if 2 * len(texts) < n_cells or n_cuts > _MAX_CUTS * len(texts):
            return []
        table: Rows = []
        for row in rows:
            values = [texts.get((row, column), "") for column in columns]
            if row not in ruled_rows and sum(map(bool, values)) == 1:
                values.sort(key=bool, reverse=True)  # a heading of the rows below
            table.append(values)
        return _split_bands(table) if sum(sum(map(bool, values)) > 1 for values in table) > 1 else []

    def _join_cells(
        self, characters: Sequence[_Character], cells: dict[int, _Cell], ruled_rows: set[int]
    ) -> dict[_Cell, _Cell]:
        """Return the first cells of cells that are one.

        In a row without lines between its columns, such as one without a background between two
        that have one, only the cells that a phrase crosses are one.
        """
        firsts: dict[_Cell, _Cell] = {}
        for row in range(self.n_rows):
            for column in range(self.n_columns):
                if column and row in ruled_rows and (row, column) not in self._lefts:
                    _join(firsts, (row, column - 1), (row, column))
                if row and (row, column) not in self._tops:
                    _join(firsts, (row - 1, column), (row, column))
        for (i, (row, column)), (j, (next_row, next_column)) in pairwise(cells.items()):
            if row == next_row and row not in ruled_rows and characters[j].follows(characters[i], _WORD_GAP):
                for crossed in range(column, next_column):
                    _join(firsts, (row, crossed), (row, crossed + 1))
        return firsts


def split_page(raw: Any, page: Any, text_page: Any) -> Iterator[str | Rows]:
    """Yield the prose and the tables of a page in reading order."""
    matrix = _ROTATIONS[page.get_rotation()]
    grids = _find_grids(*_list_edges(raw, page, matrix))
    n_characters = raw.FPDFText_CountChars(text_page)
    is_readable = grids and n_characters <= _MAX_CHARACTERS
    characters = [_read_character(raw, text_page, i, matrix) for i in range(n_characters if is_readable else 0)]
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
        yield "".join(prose[i].text for i in range(start, end) if i in prose)


def _read_character(raw: Any, text_page: Any, i: int, matrix: Sequence[float]) -> _Character:
    box, code = raw.FS_RECTF(), raw.FPDFText_GetUnicode(text_page, i)
    raw.FPDFText_GetLooseCharBox(text_page, i, box)
    corners = _transform(matrix, box.left, box.bottom), _transform(matrix, box.right, box.top)
    (left, right), (top, bottom) = map(sorted, zip(*corners, strict=True))
    return _Character(chr(code) if code else "", left, right, top, bottom)


def _list_edges(raw: Any, page: Any, matrix: Sequence[float]) -> tuple[list[_Line], list[_Line]]:
    """Return the horizontal and the vertical edges of all paths of a page; none if there are too many."""
    edges: tuple[list[_Line], list[_Line]] = [], []
    holders = [(raw.FPDFPage_GetObject, page, raw.FPDFPage_CountObjects(page), matrix)]
    n_objects, own = 0, raw.FS_MATRIX()
    while holders:
        get_object, holder, count, outer = holders.pop()
        n_objects += count
        for i in range(count if n_objects <= _MAX_OBJECTS else 0):
            item = get_object(holder, i)
            kind = raw.FPDFPageObj_GetType(item)
            if kind not in {raw.FPDF_PAGEOBJ_FORM, raw.FPDF_PAGEOBJ_PATH}:
                continue
            raw.FPDFPageObj_GetMatrix(item, own)
            x, y = _transform(outer, own.e, own.f)
            linear = (*outer[:4], 0, 0)
            inner = (*_transform(linear, own.a, own.b), *_transform(linear, own.c, own.d), x, y)
            if kind == raw.FPDF_PAGEOBJ_FORM:
                holders.append((raw.FPDFFormObj_GetObject, item, raw.FPDFFormObj_CountObjects(item), inner))
                continue
            n_segments = raw.FPDFPath_CountSegments(item)
            n_objects += n_segments
            if n_objects <= _MAX_OBJECTS:
                _add_edges(raw, item, n_segments, inner, edges)
        if n_objects > _MAX_OBJECTS:
            return [], []
    return edges


def _add_edges(
    raw: Any, path: Any, n_segments: int, matrix: Sequence[float], edges: tuple[list[_Line], list[_Line]]
) -> None:
    """Add the straight edges of a path that is drawn."""
    fill, stroke, x, y = c_int(), c_int(), c_float(), c_float()
    raw.FPDFPath_GetDrawMode(path, fill, stroke)
    start = last = (0.0, 0.0)
    for i in range(n_segments if fill.value or stroke.value else 0):
        segment = raw.FPDFPath_GetPathSegment(path, i)
        raw.FPDFPathSegment_GetPoint(segment, x, y)
        point = _transform(matrix, x.value, y.value)
        kind = raw.FPDFPathSegment_GetType(segment)
        start = point if kind == raw.FPDF_SEGMENT_MOVETO else start
        sides = [(last, point)] if kind == raw.FPDF_SEGMENT_LINETO else []
        sides += [(point, start)] if raw.FPDFPathSegment_GetClose(segment) else []
        for first, second in sides:
            width, height = abs(first[0] - second[0]), abs(first[1] - second[1])
            if min(width, height) <= 0.02 * max(width, height):
                axis = int(height > width)  # along the edge
                edges[axis].append(_Line(first[1 - axis], *sorted((first[axis], second[axis]))))
        last = point


def _transform(matrix: Sequence[float], x: float, y: float) -> tuple[float, float]:
    a, b, c, d, e, f = matrix
    return a * x + c * y + e, b * x + d * y + f


def _find_grids(rows: Iterable[_Line], columns: Iterable[_Line]) -> list[_Grid]:
    """Return the grids of several rows and columns that lines form, small ones first."""
    rows, columns = _merge_lines(rows), _merge_lines(columns)
    if len(rows) * len(columns) > _MAX_CROSSINGS:
        return []
    firsts: dict[tuple[bool, _Line], tuple[bool, _Line]] = {}
    for row in rows:
        for column in columns:
            if row.reaches(column.position) and column.reaches(row.position):
                _join(firsts, (False, row), (True, column))
    groups = defaultdict[Hashable, tuple[list[_Line], list[_Line]]](lambda: ([], []))
    for is_column, lines in enumerate((rows, columns)):
        for line in lines:
            groups[_find_first(firsts, (bool(is_column), line))][is_column].append(line)
    bands, latest = list[tuple[list[_Line], list[_Line]]](), dict[Hashable, tuple[list[_Line], list[_Line]]]()
    for group in sorted((group for group in groups.values() if all(group)), key=min):
        key = frozenset(column.position for column in group[1])
        last, top, bottom = latest.get(key), group[0][0].position, group[0][-1].position
        is_row = len({row.position for row in group[0]}) == 2
        if last and is_row and top - last[0][-1].position < 1.5 * (bottom - top):
            last[0].extend(group[0])  # a row without a background is between two that have one
            last[1].extend(group[1])
        else:
            latest[key] = group
            bands.append(group)
    grids = [_Grid(*group) for group in bands]
    grids = [one for one in grids if min(one.n_rows, one.n_columns) > 1 and one.n_rows * one.n_columns <= _MAX_CELLS]
    grids.sort(key=lambda grid: (grid.xs[-1] - grid.xs[0]) * (grid.ys[-1] - grid.ys[0]))
    return grids if len(grids) <= _MAX_GRIDS else []


def _merge_lines(edges: Iterable[_Line]) -> list[_Line]:
    """Return the lines that near edges form, in order of position, without short ones."""
    edges = list(edges)
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


def _find_first(firsts: dict[Any, Any], item: Any) -> Any:
    while (first := firsts.get(item, item)) != item:
        firsts[item] = item = firsts.get(first, first)
    return item


def _join(firsts: dict[Any, Any], item: Any, other: Any) -> None:
    """Give two items the same first item, which is the lesser of theirs."""
    first, last = sorted((_find_first(firsts, item), _find_first(firsts, other)))
    if first != last:
        firsts[last] = first
