"""KILT's scores: whether the answer is correct, and whether it came from the correct pages (Petroni et al. 2021).

A question names *evidence sets*: each is a set of pages (Wikipedia page ids) that together suffice. Provenance is
measured over the distinct retrieved pages, best first; KILT's own variants of the answer measures count an
answer only where R-precision is 1.
"""

from collections.abc import Iterable, Sequence

Evidence = Sequence[frozenset[str]]  # any one set suffices; none is empty


def distinct_pages(pages: Iterable[str]) -> list[str]:
    """Return the distinct pages in order of their first occurrence."""
    return list(dict.fromkeys(pages))


def r_precision(pages: Sequence[str], evidence: Evidence) -> float:
    """Return the best share of an evidence set of R pages found among the first R distinct pages; 0.0 without evidence.

    >>> r_precision(["7", "9", "8"], [frozenset({"7", "8"}), frozenset({"1"})])
    0.5
    """
    ranked = distinct_pages(pages)
    return max((len(wanted & set(ranked[: len(wanted)])) / len(wanted) for wanted in evidence), default=0.0)


def recall_at(pages: Sequence[str], evidence: Evidence, k: int) -> float:
    """Return the share of evidence sets that are complete among the first k places of the ranking; 0.0 without
    evidence.

    An evidence set takes one place, that of its last page: its earlier pages take no place. A page in no set takes one
    place; equal sets count once.
    """
    sets = list(dict.fromkeys(evidence))
    places = _places(distinct_pages(pages), sets)
    return places[:k].count(True) / len(sets) if sets else 0.0


def _places(ranked: Sequence[str], sets: Sequence[frozenset[str]]) -> list[bool | int]:
    """Return the item at each place: True for a complete set, False for a page of no set, n for the open set n - 2."""
    places: list[bool | int] = []
    missing = [set(wanted) for wanted in sets]
    for page in ranked:
        holders = [n for n, left in enumerate(missing, start=2) if page in left]  # 0 and 1 would equal False and True
        for n in holders:
            if n in places:
                places.remove(n)
            missing[n - 2].remove(page)
            places.append(n if missing[n - 2] else True)
        if not holders:
            places.append(False)
    return places


def strict_match(prediction: str, golds: Iterable[str]) -> float:
    """Return KILT's accuracy: 1.0 if the prediction equals a gold answer exactly, except for outer whitespace.

    >>> strict_match("SUPPORTS ", ["SUPPORTS"]), strict_match("supports", ["SUPPORTS"])
    (1.0, 0.0)
    """
    return float(bool(prediction.strip()) and prediction.strip() in {gold.strip() for gold in golds})
