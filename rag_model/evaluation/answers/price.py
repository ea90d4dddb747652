"""Whether retrieval earns its price: open book against closed book and a search by words, and what it costs."""

from collections.abc import Iterator, Mapping, Sequence

from rag_model.evaluation.answers.ablation import BM25, CLOSED, OPEN, Row
from rag_model.evaluation.bootstrap import Estimate


def worth(rows: Sequence[Row], measure: str, search: Mapping[str, float]) -> str:
    """Return one sentence that says whether retrieval earns its price here; empty if closed book was not measured.

    Args:
        rows: the open book first.
        measure: the one that decides whether an answer is correct.
        search: milliseconds a question of each stage of retrieval; empty: not known.
    """
    named = {row.name: row for row in rows}
    if CLOSED not in named or measure not in named[CLOSED].against:
        return ""
    gain = _gain(named[CLOSED].against[measure])
    over = [_range(gain, "closed book")]
    if BM25 in named and measure in named[BM25].against:
        over.append(_range(_gain(named[BM25].against[measure]), f"with {BM25}"))
    price = list(_extra(named[OPEN].costs, named[CLOSED].costs, sum(search.values())))
    cost = f", for {_listed(price)} more a question" if price else ""
    return f"{_verdict(gain)}: {measure} is {' and '.join(over)}{cost}"


def _gain(against: Estimate) -> Estimate:
    """Return the open book minus another condition, whose difference to the open book is known."""
    return Estimate(0.0 - against.value, 0.0 - against.high, 0.0 - against.low, against.n)


def _verdict(gain: Estimate) -> str:
    if gain.low > 0:
        return "retrieval earns its price here"
    if gain.high < 0:
        return "retrieval does not earn its price here"
    return f"{gain.n:,} questions do not show that retrieval earns its price here"


def _range(gain: Estimate, other: str) -> str:
    way = "lower" if gain.value < 0 else "higher"
    return f"{abs(gain.value):.3f} {way} than {other} [{gain.low:+.3f}, {gain.high:+.3f}]"


def _extra(book: Mapping[str, float], closed: Mapping[str, float], search: float) -> Iterator[str]:
    if search:
        yield f"{search:.3g} ms of search"
    if "seconds" in book and "seconds" in closed:
        yield f"{1000 * max(0.0, book['seconds'] - closed['seconds']):.3g} ms of reading"
    if "read" in book and "read" in closed:
        yield f"{max(0.0, book['read'] - closed['read']):,.0f} tokens"


def _listed(parts: Sequence[str]) -> str:
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last
