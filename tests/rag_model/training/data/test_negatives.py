import pytest

from rag_model.corpus.records import Passage
from rag_model.errors import UsageError
from rag_model.evaluation.matching import AnswerMatcher
from rag_model.retrieve.dense import DenseRetriever
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.data.examples import Example, build_passage
from rag_model.training.data.negatives import MiningSettings, SearchFunction, build_search, mine_negatives
from tests.fixtures.words import searching_words

CORPUS = [
    build_passage("Orwell", "George Orwell wrote the novella Animal Farm in 1945."),
    build_passage("Farm", "An animal farm keeps cows, pigs and horses."),
    build_passage("George Orwell", "He wrote of a farm."),
    build_passage("Novella", "A novella is a short novel; who wrote the first is not known."),
    build_passage("", ""),
    build_passage("動物農場", "ジョージ・オーウェルの小説 👩‍🚀"),
    build_passage("Aardvark", "Eats ants."),
]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> SearchFunction:
    return searching_words(CORPUS, tmp_path_factory.mktemp("words"))


QUESTION = Example("1", "Who wrote the novella Animal Farm?", ("George Orwell",))


def test_a_negative_never_holds_an_answer(words: SearchFunction) -> None:
    (mined,) = mine_negatives([QUESTION], words)
    assert mined.positives == (CORPUS[0],)  # the first that holds it
    assert [one.title for one in mined.negatives] == ["Novella", "Farm"]  # and not the one that bears its name
    (unfound,) = mine_negatives([QUESTION], words, MiningSettings(find_positives=False))
    assert unfound.negatives == mined.negatives  # nor one that nobody calls a positive


def test_positives_of_ones_own_stay_and_are_no_negatives(words: SearchFunction) -> None:
    own = Example("1", "animal farm", ("nobody",), (CORPUS[1],), (CORPUS[6],))
    (mined,) = mine_negatives([own], words, MiningSettings(negatives=1))
    assert (mined.positives, mined.negatives) == ((CORPUS[1],), (CORPUS[0],))
    (left,) = mine_negatives([QUESTION], words, MiningSettings(find_positives=False, skip=2))
    assert (left.positives, [one.title for one in left.negatives]) == ((), ["Farm"])


def test_the_question_itself_is_no_negative(words: SearchFunction) -> None:
    passage = CORPUS[1]  # mined by its hash, and in a snapshot by the page of its passages
    for own in (passage, build_passage("", "the whole article", passage.page_id)):
        example = Example("1", "an animal farm keeps cows", positives=(CORPUS[0],), own_document=own)
        (mined,) = mine_negatives([example], words)
        assert mined.negatives
        assert passage not in mined.negatives


def test_pages_that_kilt_names_hold_the_positive_and_no_negative() -> None:
    """FEVER's answers are labels; those of other sets are words, and a passage may hold them by chance."""

    def found(*passages: tuple[str, str]) -> SearchFunction:
        return lambda questions, k: [[build_passage("", text, page=page) for page, text in passages] for _ in questions]

    search = found(("1", "no Orwell"), ("2", "a farm"), ("7", "a pig"), ("7", "by Orwell"), ("3", "a novella"))

    def mined(*answers: str, pages: tuple[str, ...] = ("7", "8")) -> tuple[list[str], list[str]]:
        (one,) = mine_negatives([Example("1", "who wrote?", answers, pages=pages)], search)
        return [each.text for each in one.positives], [each.text for each in one.negatives]

    assert mined("Orwell") == (["by Orwell"], ["a farm", "a novella"])
    assert mined("SUPPORTS") == (["a pig"], ["no Orwell", "a farm", "a novella"])
    assert mined() == mined("SUPPORTS"), "of KILT's test files nothing is known but the pages"
    assert mined("Orwell", pages=("9",)) == (["no Orwell"], ["a farm", "a pig", "a novella"]), "a snapshot without it"


@pytest.mark.parametrize(
    "example",
    [
        Example("1", "  ", ("x",), (), (CORPUS[6],)),
        Example("1", "who wrote?", (), (), (CORPUS[6],)),
    ],
)
def test_what_can_not_be_judged_is_left_as_it_is(example: Example, words: SearchFunction) -> None:
    assert mine_negatives([example], words) == [example]


def test_a_snapshot_is_mined_with_the_encoder_that_is_to_learn(snapshot: Snapshot, passages: list[Passage]) -> None:
    retriever = DenseRetriever.from_snapshot(snapshot, "exact")
    question = Example("1", "Who wrote Animal Farm?", ("Orwell",))
    (mined,) = mine_negatives([question], build_search(retriever, snapshot.n))
    assert [one.title for one in mined.positives] == ["Animal Farm"]
    assert len(mined.negatives) == len(passages) - 1
    assert not any(AnswerMatcher(["Orwell"]).match(one.text) for one in mined.negatives)


def test_order_and_number_are_kept_over_many(words: SearchFunction) -> None:
    many = [Example(str(number), "animal farm", ("cows",)) for number in range(300)]
    mined = mine_negatives(many, words)
    assert [one.id for one in mined] == [one.id for one in many]
    assert len({one.negatives for one in mined}) == 1


def test_settings_that_contradict_are_refused() -> None:
    with pytest.raises(UsageError, match="need 0 <= skip < depth"):
        MiningSettings(depth=5, skip=5)
