from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_model.corpus.records import Passage
from rag_model.errors import UsageError
from rag_model.evaluation.matching import AnswerMatcher
from rag_model.store.store import Store
from rag_model.store.versions.manifest import Content, Manifest, PartEntry
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.examples import Example, build_passage
from rag_model.training.data.negatives import MiningSettings, NegativesRecipe, add_mined_passages, mine_passages
from tests.fixtures.bm25_index import write_parts

CORPUS = [
    build_passage("Orwell", "George Orwell wrote the novella Animal Farm in 1945."),
    build_passage("Farm", "An animal farm keeps cows, pigs and horses."),
    build_passage("George Orwell", "He wrote of a farm."),
    build_passage("Novella", "A novella is a short novel; who wrote the first is not known."),
    build_passage("", ""),
    build_passage("動物農場", "ジョージ・オーウェルの小説 👩‍🚀"),
    build_passage("Aardvark", "Eats ants."),
]


def store_passages(passages: Sequence[Passage], folder: Path, *sizes: int) -> Snapshot:
    """Return a snapshot of passages, in parts of these sizes and of the rest, without an index."""
    folder.mkdir()
    store = Store.open(str(folder / "store"), create=True)
    paths = write_parts(passages, sizes, folder)
    parts = [
        PartEntry(path.stem, number + 1, number + 1, rows)
        for number, (path, rows) in enumerate(zip(paths, [*sizes, len(passages) - sum(sizes)], strict=True))
    ]
    files = {f"passages/{path.name}": store.blobs.put_file(path) for path in paths}
    return Snapshot.from_manifest(store, Manifest(Content({"kind": "passages"}, tuple(parts), files)))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    return store_passages(CORPUS, tmp_path_factory.mktemp("words") / "corpus", 2, 3)


def mine(snapshot: Snapshot, *examples: Example, **settings: Any) -> list[Example]:
    """Mine by BM25 in this process."""
    return add_mined_passages({"train": examples}, snapshot, NegativesRecipe(mining=MiningSettings(**settings)))[
        "train"
    ]


QUESTION = Example("1", "Who wrote the novella Animal Farm?", ("George Orwell",))


def test_a_negative_never_holds_an_answer(corpus: Snapshot) -> None:
    (mined,) = mine(corpus, QUESTION)
    assert mined.positives == (CORPUS[0],)  # the first that holds it
    assert [negative.title for negative in mined.negatives] == [
        "Novella",
        "Farm",
    ]  # and not the one that bears its name
    (unfound,) = mine(corpus, QUESTION, find_positives=False)
    assert unfound.negatives == mined.negatives  # nor one that nobody calls a positive


def test_positives_of_ones_own_stay_and_are_no_negatives(corpus: Snapshot) -> None:
    own = Example("1", "animal farm", ("nobody",), (CORPUS[1],))
    (mined,) = mine(corpus, own, negatives=1)
    assert (mined.positives, mined.negatives) == ((CORPUS[1],), (CORPUS[0],))
    (left,) = mine(corpus, QUESTION, find_positives=False, skip=2)
    assert (left.positives, [negative.title for negative in left.negatives]) == ((), ["Farm"])


def test_the_question_itself_is_no_negative(corpus: Snapshot) -> None:
    passage = CORPUS[1]  # mined by its hash, and in a snapshot by the page of its passages
    for own in (passage, build_passage("", "the whole article", passage.page_id)):
        example = Example("1", "an animal farm keeps cows", positives=(CORPUS[0],), own_document=own)
        (mined,) = mine(corpus, example)
        assert mined.negatives
        assert passage not in mined.negatives


def test_pages_that_kilt_names_hold_the_positive_and_no_negative(tmp_path: Path) -> None:
    """FEVER's answers are labels; those of other sets are words, and a passage may hold them by chance."""
    texts = [
        ("1", "no Orwell"),
        ("2", "a farm"),
        ("7", "a pig"),
        ("7", "by Orwell"),
        ("3", "a novella"),
        ("4", "a pig"),
    ]
    snapshot = store_passages([build_passage("", text, page=page) for page, text in texts], tmp_path / "kilt", 3)

    def mined(*answers: str, pages: tuple[str, ...] = ("7", "8")) -> tuple[list[str], list[str]]:
        example, rows = Example("1", "who wrote?", answers, pages=pages), np.array([[0, 1, 2, 3, 4, 5, -1]])
        (one,) = mine_passages([example], rows, snapshot, MiningSettings())
        return [each.text for each in one.positives], [each.text for each in one.negatives]

    assert mined("Orwell") == (["by Orwell"], ["a farm", "a novella", "a pig"])
    assert mined("SUPPORTS") == (["a pig"], ["no Orwell", "a farm", "a novella"]), "nor the same words of another page"
    assert mined() == mined("SUPPORTS"), "of KILT's test files nothing is known but the pages"
    negatives = ["a farm", "a pig", "a novella", "a pig"]
    assert mined("Orwell", pages=("9",)) == (["no Orwell"], negatives), "a snapshot without it"


@pytest.mark.parametrize(
    "example",
    [
        Example("1", "  ", ("x",), (), (CORPUS[6],)),
        Example("1", "who wrote?", (), (), (CORPUS[6],)),
        Example("1", "animal farm", ("x",), (CORPUS[0],), (CORPUS[6],)),
    ],
)
def test_what_can_not_be_judged_or_is_complete_is_left_as_it_is(example: Example, corpus: Snapshot) -> None:
    assert mine(corpus, example) == [example]


def test_a_snapshot_is_mined_with_the_encoder_that_is_to_learn(snapshot: Snapshot, passages: list[Passage]) -> None:
    question, recipe = Example("1", "Who wrote Animal Farm?", ("Orwell",)), NegativesRecipe("snapshot", "exact")
    (mined,) = add_mined_passages({"dev": [question]}, snapshot, recipe)["dev"]
    assert [positive.title for positive in mined.positives] == ["Animal Farm"]
    assert len(mined.negatives) == len(passages) - 1
    assert not any(AnswerMatcher(["Orwell"]).match(negative.text) for negative in mined.negatives)


def test_order_and_number_are_kept_over_many(corpus: Snapshot) -> None:
    many = [Example(str(number), "animal farm", ("cows",)) for number in range(300)]
    mined = mine(corpus, *many)
    assert [one.id for one in mined] == [one.id for one in many]
    assert len({one.negatives for one in mined}) == 1


def test_settings_that_contradict_are_refused() -> None:
    with pytest.raises(UsageError, match="give 0 <= skip < depth"):
        MiningSettings(depth=5, skip=5)
