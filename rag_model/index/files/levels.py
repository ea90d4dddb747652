"""The levels of an HNSW graph in a file from elsewhere: a search must not leave the lists that the file has.

faiss walks from the entry point down the levels and takes for granted that a node which a list of level l names has a
list at level l itself. Where it has none, faiss reads behind the node's lists. Only some questions come to such a link,
so trying a few questions does not find it; here every link above the bottom is read. Those of the bottom need only be
nodes, which faiss checks itself.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

_BLOCK = 1 << 18  # nodes looked at together: a few megabytes
_MOST_LINKS = 1 << 12  # slots of a node at one level; bookwheel's graphs have up to 256

Require = Callable[[object], None]


def check_slots(slots: npt.NDArray[np.int32], require: Require) -> None:
    """Require that each level has slots, (levels + 1,) counted from the bottom, and not absurdly many."""
    require(len(slots) > 1 and slots[0] == 0)
    widths = np.diff(slots.astype(np.int64))
    require(bool(((widths > 0) & (widths <= _MOST_LINKS)).all()))


def check_levels(
    levels: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
    links: npt.NDArray[np.int32],
    slots: npt.NDArray[np.int32],
    walk_from: tuple[int, int],
    require: Require,
) -> None:
    """Require that each node has just the slots of its levels, and that each link leads to a node of its level.

    Holds two bytes a node, and sixteen for each of the few above the bottom.

    Args:
        levels: (n,) from 1, possibly mapped.
        offsets: (n + 1,) where the slots of each node begin.
        links: of all nodes and levels, -1 where empty.
        slots: (levels + 1,) counted from the bottom.
        walk_from: the entry point, and its level from 0.
        require: raises an error where its argument is false.
    """
    known, ends = np.empty(len(levels), np.int16), slots.astype(np.int64)
    upper, starts = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    require(offsets[0] == 0 and offsets[-1] == len(links))
    for first in range(0, len(levels), _BLOCK):
        some = levels[first : first + _BLOCK]
        require(some.min() >= 1 and some.max() < len(slots))
        known[first : first + _BLOCK] = some
        begins = offsets[first : first + _BLOCK + 1]
        require(bool((np.diff(begins) == ends[some]).all()))
        high = np.flatnonzero(some > 1)
        upper.append(first + high)
        starts.append(np.asarray(begins[high]))
    entry, top = walk_from
    require(entry < 0 or known[entry] == top + 1)
    for level, targets in _upper_links(known, links, ends, np.concatenate(upper), np.concatenate(starts)):
        named = targets[targets >= 0]
        require(bool((named < len(known)).all()) and bool((known[named] > level).all()))


def _upper_links(
    known: npt.NDArray[np.int16], links: npt.NDArray[np.int32], ends: Any, nodes: Any, starts: Any
) -> Iterator[tuple[int, npt.NDArray[np.int32]]]:
    """Yield each level above the bottom with the links of some of its nodes."""
    highest = int(known[nodes].max(initial=0))
    for level in range(1, highest):
        begins = starts[known[nodes] > level] + ends[level]  # (u,)
        width = np.arange(ends[level + 1] - ends[level])
        for first in range(0, len(begins), _BLOCK // 16):
            yield level, links[begins[first : first + _BLOCK // 16, None] + width]  # (b, 1) + (w,) -> (b, w)
