"""What answers cost, and whether retrieval earns its price: open book against closed book and other retrievers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median

from rag_model.evaluation.answers.ablation import BM25, CLOSED, OPEN, Row
from rag_model.evaluation.answers.readings import Reading
from rag_model.evaluation.bootstrap import Estimate


@dataclass(frozen=True, slots=True)
class Price:
    """What one answer costs; None: not known."""

    milliseconds: float | None  # of reading, without retrieval: median over the questions, each a share of its batch
    prompt_tokens: float | None  # read, mean
    new_tokens: float | None  # written, mean

    @classmethod
    def of(cls, readings: Sequence[Reading]) -> "Price":
        """Return the price of answers, as it was when they were made."""
        seconds = [one.seconds for one in readings if one.seconds is not None]
        usages = [one.usage for one in readings if one.usage is not None]
        return cls(
            1000 * median(seconds) if seconds else None,
            fmean(one.prompt_tokens for one in usages) if usages else None,
            fmean(one.new_tokens for one in usages) if usages else None,
        )

    def to_json(self) -> dict[str, float | None]:
        """Return the price as JSON values."""
        return asdict(self)


def price_of(row: Row) -> Price:
    """Return the price of a condition's answers."""
    return Price.of([one.reading for one in row.scored])


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
    price = list(_extra(price_of(named[OPEN]), price_of(named[CLOSED]), sum(search.values())))
    cost = f", for {_listed(price)} more a question" if price else ""
    return f"{_verdict(gain)}: {measure} is {' and '.join(over)}{cost}"


def _gain(against: Estimate) -> Estimate:
    """Return the open book minus another condition, whose difference to the open book is known."""
    return Estimate(0.0 - against.value, 0.0 - against.high, 0.0 - against.low, against.n)


def _verdict(gain: Estimate) -> str:
    if gain.low > 0:
        return "retrieval earns its price here"
    if gain.high <= 0:
        return "retrieval does not earn its price here"
    return f"{gain.n:,} questions do not show that retrieval earns its price here"


def _range(gain: Estimate, other: str) -> str:
    way = "lower" if gain.value < 0 else "higher"
    return f"{abs(gain.value):.3f} {way} than {other} [{gain.low:+.3f}, {gain.high:+.3f}]"


def _extra(book: Price, closed: Price, search: float) -> Iterator[str]:
    if search:
        yield f"{search:.3g} ms of search"
    if book.milliseconds is not None and closed.milliseconds is not None:
        yield f"{max(0.0, book.milliseconds - closed.milliseconds):.3g} ms of reading"
    if book.prompt_tokens is not None and closed.prompt_tokens is not None:
        yield f"{max(0.0, book.prompt_tokens - closed.prompt_tokens):,.0f} tokens"


def _listed(parts: Sequence[str]) -> str:
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last
