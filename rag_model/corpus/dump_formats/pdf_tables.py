"""Find the tables of a PDF page whose cells are separated by lines or have a background.

Edges of lines and rectangles that touch each other form a grid. A grid is a table if most of its
cells have text, at least two rows have text in several cells, and its lines cut almost no words.
This excludes frames, boxes, charts and highlighted words. The time is linear in the numbers of
paths and characters. A page with too many paths or characters is read without tables.
"""

from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from ctypes import c_float, c_int
from itertools import islice, pairwise, product
from typing import Any, NamedTuple

Rows = list[list[str]]
# maximum objects (with the segments of paths) and characters of a page
_MAX_OBJECTS, _MAX_CHARACTERS = 100_000, 50_000
# maximum pairs of a horizontal and a vertical line, and maximum grids, on a page
_MAX_LINE_PAIRS, _MAX_GRIDS = 250_000, 20
_MAX_CELLS = 10_000  # maximum cells of a grid
_TOLERANCE = 3.0  # points; lines at a smaller distance touch each other
_MIN_LENGTH = 6.0  # points; shorter lines are ignored
# Maximum gaps within a word and between words, as shares of the character height.
_LETTER_GAP, _WORD_GAP = 0.1, 0.35
# Maximum number of words that lines cut, as a share of the number of cells with text.
_MAX_CUT_SHARE = 0.1
_Cell = tuple[int, int]  # row and column
# Row, subrow and column of a text; no line separates the subrows of a row.
_TextKey = tuple[int, int, int]
_Transform = Callable[[float, float], tuple[float, float]]
# Maps the rotation of a page to the transform into the coordinates that a reader sees, with y
# downwards.
_ROTATIONS: dict[int, _Transform] = {
    0: lambda x, y: (x, -y),
    90: lambda x, y: (y, x),
    180: lambda x, y: (-x, y),
    270: lambda x, y: (-y, -x),
}


class _Line(NamedTuple):
    """A line at `position` from `start` to `end`: y and x if horizontal, x and y if vertical."""

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

    def follows(self, previous: "_Character", max_gap: float) -> bool:
        """Return whether this character continues the text line of `previous`.

        The gap between the two characters must be smaller than `max_gap` times the height of this
        character.
        """
        height = self.bottom - self.top
        return self.left - previous.right < max_gap * height and abs(self.bottom - previous.bottom) < height / 2

    def is_above_or_below(self, previous: "_Character") -> bool:
        """Return whether this letter is above or below the letter `previous`, as in rotated tables."""
        common_height = min(self.bottom, previous.bottom) - max(self.top, previous.top)
        is_beside = 4 * common_height > min(self.bottom - self.top, previous.bottom - previous.top)
        return self.text.isalnum() and previous.text.isalnum() and not is_beside


class _Grid:
    """The cells between lines; adjacent cells without a line between them may be one table cell."""

    def __init__(self, rows: Sequence[_Line], columns: Sequence[_Line]) -> None:
        # A table without outer borders ends where its lines end.
        self.ys = _cluster_values([*(row.position for row in rows), *_find_extent(columns)])
        self.xs = _cluster_values([*(column.position for column in columns), *_find_extent(rows)])
        self.n_rows, self.n_columns = len(self.ys) - 1, len(self.xs) - 1
        self._cells_below_line = set(_list_borders(rows, self.ys, self.xs))
        self._cells_right_of_line = {(row, column) for column, row in _list_borders(columns, self.xs, self.ys)}

    def find_cell(self, character: _Character) -> _Cell | None:
        """Return the cell that contains the centre of a character, or None."""
        row = bisect(self.ys, (character.top + character.bottom) / 2) - 1
        column = bisect(self.xs, (character.left + character.right) / 2) - 1
        return (row, column) if 0 <= row < self.n_rows and 0 <= column < self.n_columns else None

    def read_rows(self, characters: Sequence[_Character], cells: dict[int, _Cell]) -> Rows:
        """Return the rows of the table, or an empty list if the grid is not a table.

        Args:
            characters: characters of the page.
            cells: maps the index of each character in the grid to its cell.
        """
        ruled_rows = {row for row, column in self._cells_right_of_line if 0 < column < self.n_columns}
        first_cells = self._merge_cells(characters, cells, ruled_rows)
        texts, last_indices, n_cut_words = defaultdict[_TextKey, list[str]](list), dict[_TextKey, int](), 0
        subrow_by_row, last_key = Counter[int](), None  # current subrow of each row
        for i, cell in cells.items():
            row, column = first_cells[cell]
            last_index = last_indices.get((row, subrow_by_row[row], column))
            is_new_line = (
                last_index is not None
                and characters[i].top > (characters[last_index].top + characters[last_index].bottom) / 2
            )
            # If the text before a new line is in another cell, the line begins a subrow.
            if is_new_line and last_key != (row, subrow_by_row[row], column):
                subrow_by_row[row], last_index, is_new_line = subrow_by_row[row] + 1, None, False
            key = last_key = row, subrow_by_row[row], column
            previous_character = characters[i - 1]
            if last_index == i - 1:
                n_cut_words += characters[i].is_above_or_below(previous_character)
            else:
                n_cut_words += bool(previous_character.text.strip()) and characters[i].follows(
                    previous_character, _LETTER_GAP
                )
                texts[key].append("\n" if is_new_line else "" if last_index is None else " ")
            texts[key].append(characters[i].text)
            last_indices[key] = i
        row_keys, columns = sorted({key[:2] for key in texts}), sorted({key[2] for key in texts})
        n_cells = len({(first_cells[row, column], subrow) for row, subrow in row_keys for column in columns})
        table = [[_join_characters(texts.get((*row, column), "")) for column in columns] for row in row_keys]
        for (row, _), row_cells in zip(row_keys, table, strict=True):
            if row not in ruled_rows and sum(map(bool, row_cells)) == 1:
                # The only text is a heading of the rows below, and moves to the first column.
                row_cells.sort(key=bool, reverse=True)
        has_columns = sum(sum(map(bool, row_cells)) > 1 for row_cells in table) > 1
        is_table = has_columns and 2 * len(texts) >= n_cells and n_cut_words <= _MAX_CUT_SHARE * len(texts)
        return _split_text_lines(table) if is_table else []

    def _merge_cells(
        self, characters: Sequence[_Character], cells: dict[int, _Cell], ruled_rows: set[int]
    ) -> dict[_Cell, _Cell]:
        """Map each cell of the grid to the first grid cell of the table cell that contains it.

        Grid cells without a line between them form one table cell. A row may have no lines between
        its columns, for instance if only every second row has a background. In a row without lines,
        only the grid cells that a phrase crosses form one table cell.
        """
        crossed_cells = {
            (row, crossed_column)
            for (i, (row, column)), (j, (next_row, next_column)) in pairwise(cells.items())
            if row == next_row and row not in ruled_rows and characters[j].follows(characters[i], _WORD_GAP)
            for crossed_column in range(column + 1, next_column + 1)
        }
        first_cells: dict[_Cell, _Cell] = {}
        for row, column in product(range(self.n_rows), range(self.n_columns)):
            cell = row, column
            if cell in crossed_cells or (column and row in ruled_rows and cell not in self._cells_right_of_line):
                first_cells[cell] = first_cells[row, column - 1]
            else:
                first_cells[cell] = first_cells[row - 1, column] if row and cell not in self._cells_below_line else cell
        return first_cells


def split_page(raw: Any, page: Any, text_page: Any, budget: Iterator[Any]) -> Iterator[str | Rows]:
    """Yield the prose (`str`) and the tables (`Rows`) of a page in reading order.

    Args:
        raw: the C functions of PDFium, `pypdfium2.raw`.
        page: the page.
        text_page: the text of the page.
        budget: iterator that all pages of a file share; each object and character takes one item.
            When the budget is exhausted, the remaining pages are read without tables.
    """
    transform = _ROTATIONS[page.get_rotation()]
    edges = _iter_edges(raw, page, raw.FPDFPage_GetObject, raw.FPDFPage_CountObjects(page), transform)
    grids = _find_grids([edge for _, edge in zip(budget, islice(edges, _MAX_OBJECTS), strict=False)])
    n_characters = raw.FPDFText_CountChars(text_page)
    is_readable = grids and n_characters <= _MAX_CHARACTERS and len([*islice(budget, n_characters)]) == n_characters
    characters = [_read_character(raw, text_page, i, transform) for i in range(n_characters if is_readable else 0)]
    prose = dict(enumerate(characters))
    tables: dict[int, Rows] = {}  # tables by the index of their first character
    for grid in grids:
        located_characters = (
            (i, grid.find_cell(character)) for i, character in prose.items() if character.text.strip()
        )
        cell_by_character = {i: cell for i, cell in located_characters if cell}
        if cell_by_character and (table_rows := grid.read_rows(characters, cell_by_character)):
            tables[min(cell_by_character)] = table_rows
            for i in cell_by_character:
                del prose[i]
    if not tables:
        yield text_page.get_text_bounded()
        return
    for start, end in pairwise(sorted({0, *tables, n_characters})):
        yield from [tables[start]] if start in tables else []
        yield _join_characters(prose[i].text for i in range(start, end) if i in prose)


def _join_characters(texts: Iterable[str]) -> str:
    """Join characters to a text; PDFium returns an emoji (beyond U+FFFF) as two surrogates."""
    return "".join(texts).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _read_character(raw: Any, text_page: Any, i: int, transform: _Transform) -> _Character:
    box, code_point = raw.FS_RECTF(), raw.FPDFText_GetUnicode(text_page, i)
    raw.FPDFText_GetLooseCharBox(text_page, i, box)
    corners = transform(box.left, box.bottom), transform(box.right, box.top)
    (left, right), (top, bottom) = map(sorted, zip(*corners, strict=True))
    return _Character(chr(code_point) if code_point else "", left, right, top, bottom)


def _iter_edges(
    raw: Any, holder: Any, get_object: Callable[[Any, int], Any], n_objects: int, outer_transform: _Transform
) -> Iterator[tuple[int, _Line] | None]:
    """Yield the axis (0: horizontal) and the line of each straight edge in a page or form.

    Also yield None for each object and segment, so that the caller can limit their number.
    """
    matrix, fill, stroke, x, y = raw.FS_MATRIX(), c_int(), c_int(), c_float(), c_float()
    for i in range(n_objects):
        yield None
        page_object = get_object(holder, i)
        pdfium_type = raw.FPDFPageObj_GetType(page_object)
        if pdfium_type not in {raw.FPDF_PAGEOBJ_FORM, raw.FPDF_PAGEOBJ_PATH}:
            continue
        raw.FPDFPageObj_GetMatrix(page_object, matrix)
        transform = _compose_transform(outer_transform, matrix.a, matrix.b, matrix.c, matrix.d, matrix.e, matrix.f)
        if pdfium_type == raw.FPDF_PAGEOBJ_FORM:
            n_members = raw.FPDFFormObj_CountObjects(page_object)
            yield from _iter_edges(raw, page_object, raw.FPDFFormObj_GetObject, n_members, transform)
            continue
        raw.FPDFPath_GetDrawMode(page_object, fill, stroke)
        start_point = last_point = (0.0, 0.0)
        for j in range(raw.FPDFPath_CountSegments(page_object) if fill.value or stroke.value else 0):
            yield None
            segment = raw.FPDFPath_GetPathSegment(page_object, j)
            raw.FPDFPathSegment_GetPoint(segment, x, y)
            point = transform(x.value, y.value)
            pdfium_type = raw.FPDFPathSegment_GetType(segment)
            start_point = point if pdfium_type == raw.FPDF_SEGMENT_MOVETO else start_point
            if pdfium_type == raw.FPDF_SEGMENT_LINETO:
                yield _build_edge(last_point, point)
            if raw.FPDFPathSegment_GetClose(segment):
                yield _build_edge(point, start_point)
            last_point = point


def _compose_transform(outer: _Transform, a: float, b: float, c: float, d: float, e: float, f: float) -> _Transform:
    return lambda x, y: outer(a * x + c * y + e, b * x + d * y + f)


def _build_edge(start: tuple[float, float], end: tuple[float, float]) -> tuple[int, _Line] | None:
    """Return the axis of an edge (0: horizontal) and its line; None if it is oblique."""
    width, height = abs(start[0] - end[0]), abs(start[1] - end[1])
    if min(width, height) > 0.02 * max(width, height):
        return None
    axis = int(height > width)
    return axis, _Line(start[1 - axis], *sorted((start[axis], end[axis])))


def _find_grids(edges: Sequence[tuple[int, _Line] | None]) -> list[_Grid]:
    """Return grids of at least two rows and columns, smallest first; none if there are too many."""
    rows, columns = (_merge_lines([edge[1] for edge in edges if edge and edge[0] == axis]) for axis in (0, 1))
    if len(edges) == _MAX_OBJECTS or len(rows) * len(columns) > _MAX_LINE_PAIRS:
        return []
    line_groups = [([row], list[_Line]()) for row in rows]
    for column in columns:  # a column joins the groups of lines that it touches
        joined_group, other_groups = (list[_Line](), [column]), []
        for group in line_groups:
            if any(row.reaches(column.position) and column.reaches(row.position) for row in group[0]):
                joined_group[0].extend(group[0])
                joined_group[1].extend(group[1])
            else:
                other_groups.append(group)
        line_groups = [*other_groups, joined_group]
    # Rows with a background and the same columns form one grid if at most one row without a
    # background is between them.
    grid_lines, last_grid_indices = list[tuple[list[_Line], list[_Line]]](), dict[frozenset[float], int]()
    for row_lines, column_lines in sorted((sorted(group[0]), group[1]) for group in line_groups if all(group)):
        column_xs = frozenset(column.position for column in column_lines)
        last_rows = grid_lines[last_grid_indices[column_xs]][0] if column_xs in last_grid_indices else None
        top, bottom = row_lines[0].position, row_lines[-1].position
        is_single_row = len({row.position for row in row_lines}) == 2
        if last_rows and is_single_row and top - last_rows[-1].position < 1.5 * (bottom - top):
            last_rows.extend(row_lines)
            grid_lines[last_grid_indices[column_xs]][1].extend(column_lines)
        else:
            last_grid_indices[column_xs] = len(grid_lines)
            grid_lines.append((row_lines, column_lines))
    grids = [_Grid(*lines) for lines in grid_lines]
    grids = [
        grid for grid in grids if min(grid.n_rows, grid.n_columns) > 1 and grid.n_rows * grid.n_columns <= _MAX_CELLS
    ]
    grids.sort(key=lambda grid: (grid.xs[-1] - grid.xs[0]) * (grid.ys[-1] - grid.ys[0]))
    return grids if len(grids) <= _MAX_GRIDS else []


def _merge_lines(edges: Sequence[_Line]) -> list[_Line]:
    """Merge edges that are near each other; return lines by position, without short ones."""
    positions = _cluster_values(edge.position for edge in edges)
    lines = defaultdict[float, list[_Line]](list)
    for edge in sorted(edges, key=lambda edge: edge.start):
        position = positions[bisect(positions, edge.position) - 1]
        if lines[position] and lines[position][-1].reaches(edge.start):
            last_line = lines[position].pop()
            lines[position].append(_Line(position, last_line.start, max(last_line.end, edge.end)))
        else:
            lines[position].append(_Line(position, edge.start, edge.end))
    return [line for position in positions for line in lines[position] if line.end - line.start >= _MIN_LENGTH]


def _cluster_values(coordinates: Iterable[float]) -> list[float]:
    """Group coordinates that are near each other, and return the first of each group, ascending."""
    cluster_starts: list[float] = []
    for coordinate in sorted(coordinates):
        if not cluster_starts or coordinate - cluster_starts[-1] > _TOLERANCE:
            cluster_starts.append(coordinate)
    return cluster_starts


def _find_extent(lines: Sequence[_Line]) -> tuple[float, float]:
    return min(line.start for line in lines), max(line.end for line in lines)


def _list_borders(lines: Iterable[_Line], positions: Sequence[float], gap_bounds: Sequence[float]) -> Iterator[_Cell]:
    """Yield (index of the line's position, index of the gap) for each gap that a line covers.

    The gaps are between adjacent `gap_bounds`: the columns, if the lines are horizontal.
    """
    gap_middles = [(gap_start + gap_end) / 2 for gap_start, gap_end in pairwise(gap_bounds)]
    for line in lines:
        for gap_index in range(bisect(gap_middles, line.start), bisect(gap_middles, line.end)):
            yield bisect(positions, line.position) - 1, gap_index


def _split_text_lines(table: Rows) -> Rows:
    """Split the rows below the header if a table has no lines between its rows.

    This is assumed if the table has at least three columns, and all cells of a row have the same
    number of text lines, which is rare if text is wrapped.
    """
    cell_lines = [[cell_text.split("\n") for cell_text in row] for row in table[1:]]
    if len(table[0]) < 3 or any(len(set(map(len, row))) > 1 for row in cell_lines):
        return table
    return [table[0], *([*text_row] for row in cell_lines for text_row in zip(*row, strict=True))]
