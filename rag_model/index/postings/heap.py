"""The k best of what a search finds, as a heap: the worst on top, equal scores by row."""

from rag_model.index.postings.compiled import compiled


@compiled
def _sink(scores, rows, at, size):
    """Move what is at a place down to where it belongs; no call in the loop, which would count the uses of arrays."""
    score, row = scores[at], rows[at]
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        other = child + 1
        if other < size and (
            scores[other] < scores[child] or (scores[other] == scores[child] and rows[other] > rows[child])
        ):
            child = other
        if not (scores[child] < score or (scores[child] == score and rows[child] > row)):
            break
        scores[at], rows[at] = scores[child], rows[child]
        at = child
    scores[at], rows[at] = score, row


@compiled
def push(scores, rows, size, k, score, row):
    """Add to a heap of the k best, the worst on top; return its size."""
    if size == k:
        scores[0], rows[0] = score, row
        _sink(scores, rows, 0, k)
        return size
    at = size
    while at:
        above = (at - 1) >> 1
        if not (score < scores[above] or (score == scores[above] and row > rows[above])):
            break
        scores[at], rows[at] = scores[above], rows[above]
        at = above
    scores[at], rows[at] = score, row
    return size + 1


@compiled
def sort(scores, rows, size):
    """Turn a heap into a list, best first."""
    for last in range(size - 1, 0, -1):
        scores[0], scores[last] = scores[last], scores[0]
        rows[0], rows[last] = rows[last], rows[0]
        _sink(scores, rows, 0, last)
