"""The k best of what a search finds, as a heap: the worst on top, equal scores by row."""

from rag_model.index.postings.compiled import compiled


@compiled
def _worse(scores, rows, a, b):
    return scores[a] < scores[b] or (scores[a] == scores[b] and rows[a] > rows[b])


@compiled
def _sink(scores, rows, at, size):
    while True:
        child = 2 * at + 1
        if child >= size:
            return
        if child + 1 < size and _worse(scores, rows, child + 1, child):
            child += 1
        if not _worse(scores, rows, child, at):
            return
        scores[at], scores[child] = scores[child], scores[at]
        rows[at], rows[child] = rows[child], rows[at]
        at = child


@compiled
def push(scores, rows, size, k, score, row):
    """Add to a heap of the k best, the worst on top; return its size."""
    if size < k:
        scores[size], rows[size] = score, row
        at = size
        while at and _worse(scores, rows, at, (at - 1) >> 1):
            above = (at - 1) >> 1
            scores[at], scores[above] = scores[above], scores[at]
            rows[at], rows[above] = rows[above], rows[at]
            at = above
        return size + 1
    scores[0], rows[0] = score, row
    _sink(scores, rows, 0, k)
    return size


@compiled
def sort(scores, rows, size):
    """Turn a heap into a list, best first."""
    for last in range(size - 1, 0, -1):
        scores[0], scores[last] = scores[last], scores[0]
        rows[0], rows[last] = rows[last], rows[0]
        _sink(scores, rows, 0, last)
