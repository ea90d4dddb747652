"""The index of words of a later snapshot, made of an earlier one's file: what a pull does in place of fetching it.

The file is a function of the passages' terms alone. So the postings of passages that the earlier snapshot has too are
taken over under their new rows, the others are counted from their text, and the result is the published file.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa

from rag_model.index.files.engine import Rows
from rag_model.index.files.pieces import opener
from rag_model.index.postings.analyzer import Analyzer
from rag_model.index.postings.changes import taken_over
from rag_model.index.postings.counting import counted_texts, texts_of
from rag_model.index.postings.file import PostingsFile
from rag_model.index.postings.merge import merge
from rag_model.index.postings.part import PartReader
from rag_model.index.postings.whole import whole

MOST_POSTINGS = 1 << 24  # of the earlier file: some 50 bytes each are in memory; a larger one is fetched
_KEPT = 0.5  # share of the passages that must be there already, for less it is quicker to fetch
_STAMP = "derived"


def derived(
    before: Path, kept: Rows, texts: Callable[[Rows], Iterator[pa.RecordBatch]], analyzer: Analyzer, out: Path
) -> bool:
    """Write the index file of passages, most of which an earlier file has.

    Args:
        before: the earlier file.
        kept: (n,) the earlier row of each passage; -1: it was not there.
        texts: yields title and text of the passages of these rows, ascending.
        analyzer: the one that both files were built with.
        out: the later file.

    Returns:
        Whether it was written: not if too few passages were there already, or the file is too large for this.

    Raises:
        InputError: the earlier file is damaged.
        ResourceError: `out` cannot be written.
    """
    file = PostingsFile(before)
    earlier, rows = np.unique(kept, return_index=True)  # a passage that stands here twice is taken over once
    earlier, rows = earlier[(here := (earlier >= 0) & (earlier < file.layout.n))], rows[here]
    if file.layout.scale or file.layout.postings > MOST_POSTINGS or len(rows) < _KEPT * len(kept):
        return False
    moved, fresh = np.full(file.layout.n, -1, np.int32), np.ones(len(kept), np.bool_)
    moved[earlier], fresh[rows] = rows, False
    missing = np.flatnonzero(fresh)
    others = counted_texts(texts_of(texts(missing)), analyzer)
    postings = taken_over([whole(file), others], [moved, missing.astype(np.int32)], len(kept))
    with TemporaryDirectory(dir=out.parent) as folder:
        piece = Path(folder) / "piece"
        postings.write(piece, _STAMP)
        part = PartReader(opener(piece), _STAMP, "the derived piece")
        try:
            merge([part], out)
        finally:
            part.close()
    return True
