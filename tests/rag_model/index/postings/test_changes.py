"""Postings that are taken over beside those of all passages counted afresh: the same bytes after any edit."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rag_model.corpus.records import Passage
from rag_model.errors import InputError
from rag_model.index.files.pieces import opener
from rag_model.index.kind import EarlierPart
from rag_model.index.plan import Facts
from rag_model.index.postings.analyzer import Analyzer
from rag_model.index.postings.changes import counted_changes
from rag_model.index.postings.joined import readers
from rag_model.index.postings.kind import KIND
from rag_model.index.postings.part import PartPostings
from rag_model.index.recipe import IndexRecipe
from rag_model.training.data.examples import passage_of
from tests.fixtures.words import write_parts

PLAN = KIND.plan(IndexRecipe("BM25"), 1, 0)
BEFORE = [passage_of(f"t{number % 5}", f"passage {number} of w{number % 11} w{number % 7}") for number in range(40)]
NEW = [passage_of("", text) for text in ("alpha", "zulu w3 w3", "passage of ", "", "東京", "w1")]
EDIT = st.tuples(
    st.sampled_from(["change", "insert", "delete", "move", "repeat"]), st.integers(0, 79), st.integers(0, 79)
)


def edited(passages: list[Passage], edits: list[tuple[str, int, int]]) -> list[Passage]:
    """Return passages after some edits, each at a place and with another place."""
    after = list(passages)
    for what, place, other in edits:
        at, to = place % len(after), other % len(after)
        if what == "change":
            after[at] = NEW[other % len(NEW)]
        elif what == "insert":
            after.insert(at, NEW[other % len(NEW)])
        elif what == "delete" and len(after) > 1:
            del after[at]
        elif what == "move":
            after.insert(to, after.pop(at))
        elif what == "repeat":
            after.insert(to, after[at])
    return after


class Work:
    """Parts in a folder, and their pieces."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.trained = folder, folder / "trained"
        KIND.train(PLAN, [], self.trained)

    def earlier(self, passages: list[Passage], cut: int) -> list[EarlierPart]:
        """Build two parts."""
        found = []
        for number, path in enumerate(write_parts(passages, [cut], self.folder)):
            piece = self.folder / f"piece-{number}"
            KIND.scatter(PLAN, self.trained, path, number, piece)
            found.append(EarlierPart(number, path, opener(piece)))
        return found

    def part(self, passages: list[Passage]) -> Path:
        """Write one part."""
        place = self.folder / "now"
        place.mkdir(exist_ok=True)
        return write_parts(passages, [], place)[0]

    def both(self, passages: list[Passage], earlier: list[EarlierPart]) -> tuple[bytes, bytes, Facts, Facts]:
        """Return the piece of a part with earlier parts and alone, and what each says."""
        part, out = self.part(passages), [self.folder / "taken", self.folder / "alone"]
        said = KIND.scatter_changes(PLAN, self.trained, part, 7, earlier, out[0])
        alone = KIND.scatter(PLAN, self.trained, part, 7, out[1])
        return out[0].read_bytes(), out[1].read_bytes(), said, alone


@given(edits=st.lists(EDIT, max_size=8), cut=st.integers(0, 40))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_edit_gives_the_bytes_of_counting_all(edits: list[tuple[str, int, int]], cut: int, tmp_path: Path) -> None:
    work = Work(tmp_path)
    taken, alone, said, counted_said = work.both(edited(BEFORE, edits), work.earlier(BEFORE, cut))
    assert taken == alone
    assert said == counted_said


def test_only_new_passages_are_analysed(tmp_path: Path) -> None:
    """Another analyzer than that of the pieces shows who made a term."""
    work = Work(tmp_path)
    earlier = work.earlier(BEFORE, 25)
    with readers(PLAN, work.trained, [(part.number, part.piece) for part in earlier]) as pieces:
        known = [(part.rows, piece) for part, piece in zip(earlier, pieces, strict=True)]
        some = work.part(edited(BEFORE, [("insert", 30, 2), ("move", 2, 38)]))
        taken = counted_changes(some, known, Analyzer("none"))
        assert counts_of(taken, b"passag") == 40
        assert counts_of(taken, b"passage") == 1
        others = work.part([*BEFORE[:10], *NEW * 4])
        assert counts_of(counted_changes(others, known, Analyzer("none")), b"passage") == 14, "quicker counted afresh"


def counts_of(postings: PartPostings, term: bytes) -> int:
    """Return the number of a term's postings."""
    return int(np.diff(postings.ends, prepend=0)[postings.terms.index(term)])


def test_a_damaged_piece_is_refused(tmp_path: Path) -> None:
    work = Work(tmp_path)
    earlier = work.earlier(BEFORE, 40)
    piece, weights = tmp_path / "piece-0", KIND.scatter(PLAN, work.trained, work.part(BEFORE), 0, tmp_path / "same")
    whole, behind = piece.read_bytes(), -128 - weights["postings"]  # a header, and the weights
    piece.write_bytes(whole[: behind - 9] + b"\xff" * 9 + whole[behind:])
    with pytest.raises(InputError, match="the scattered piece of part 0 is damaged: build it again"):
        work.both(BEFORE[1:], earlier)
