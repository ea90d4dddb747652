"""Names of an article's sections, for the ids of their passages."""

MAX_ANCHOR = 64  # characters of a heading that go into a passage id


def anchor(heading: str, taken: dict[str, int]) -> str:
    """Return a name for a section that is unique in its article, and note it in `taken`.

    As MediaWiki's anchors: spaces become underscores, and a repeated heading gets `_2`, `_3`, … `taken` holds each
    name with the last number tried for it, so that all names of an article take time in proportion to their number.

    >>> anchor("Early life", {"Early_life": 1})
    'Early_life_2'
    """
    name = candidate = "_".join(heading.split())[:MAX_ANCHOR]
    again = taken.get(name, 0)
    while candidate in taken:
        again += 1
        candidate = f"{name}_{again}"
    taken[name] = max(again, 1)
    taken.setdefault(candidate, 1)
    return candidate
