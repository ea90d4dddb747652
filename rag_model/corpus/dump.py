"""The pages of one part of a wiki's dump: only the part's own streams are read, in bounded memory."""

from collections.abc import Iterator

from rag_model.corpus.decode import read_slice, where
from rag_model.corpus.pages import parse_pages
from rag_model.corpus.records import Page, Part, Slice
from rag_model.errors import InputError

_ADVICE = "download the dump and its index again, both of one date"


def read_pages(part: Part) -> Iterator[Page]:
    """Yield the pages whose ids are in the part's range, in the dump's order, each id once.

    If the plan found the ids in order, the pages are streamed. Otherwise the part is read twice, first only for its
    ids; of several pages with one id the one with the highest `rev_id` is taken, and of equal ones the first.

    Raises:
        InputError: a slice is unreadable, corrupt or hostile, or does not contain the pages that the plan lists.
    """
    return _in_order(part) if part.ordered else _winners(part)


def _in_order(part: Part) -> Iterator[Page]:
    last = -1
    for page in _in_range(part):
        if page.page_id <= last:
            raise InputError(
                f"page {page.page_id} follows page {last} in {part.name}, though its index has them in order: {_ADVICE}"
            )
        last = page.page_id
        yield page


def _winners(part: Part) -> Iterator[Page]:
    newest: dict[int, int] = {}
    for page in _in_range(part):
        newest[page.page_id] = max(page.rev_id, newest.get(page.page_id, -1))
    for page in _in_range(part):
        if newest.get(page.page_id) == page.rev_id:
            del newest[page.page_id]
            yield page


def _in_range(part: Part) -> Iterator[Page]:
    for piece in part.slices:
        for page in slice_pages(piece):
            if part.first_page <= page.page_id <= part.last_page:
                yield page


def slice_pages(piece: Slice) -> Iterator[Page]:
    """Yield all pages of a slice.

    Raises:
        InputError: as `read_pages`.
    """
    lowest, highest = piece.last_page, piece.first_page
    for page in parse_pages(read_slice(piece), where(piece)):
        lowest, highest = min(lowest, page.page_id), max(highest, page.page_id)
        if lowest < piece.first_page or highest > piece.last_page:
            raise _other_dump(piece, f"page {page.page_id} is there")
        yield page
    if (lowest, highest) != (piece.first_page, piece.last_page):
        raise _other_dump(piece, f"only pages {lowest} to {highest} are there")


def _other_dump(piece: Slice, found: str) -> InputError:
    return InputError(
        f"{where(piece)} should hold pages {piece.first_page} to {piece.last_page} by its index, but {found}: {_ADVICE}"
    )
