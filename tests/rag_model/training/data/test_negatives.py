import json
from collections.abc import Sequence
from dataclasses import replace
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
from rag_model.training.data.examples import Example, build_passage, read_examples
from rag_model.training.data.negatives import MiningSettings, NegativesRecipe, add_mined_passages, mine_passages
from rag_model.training.objectives.task_bases import RankingEvaluator
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
    recipe = NegativesRecipe(mining=MiningSettings(**settings))
    return add_mined_passages({"train": examples}, snapshot, recipe)["train"]


QUESTION = Example("1", "Who wrote the novella Animal Farm?", ("George Orwell",))


def test_negative_never_contains_an_answer(corpus: Snapshot) -> None:
    (mined,) = mine(corpus, QUESTION)
    assert mined.positives == (CORPUS[0],)  # the first passage that contains the answer
    titles = [negative.title for negative in mined.negatives]
    assert titles == ["Novella", "Farm"], "the passage titled George Orwell is no negative"
    (without_positives,) = mine(corpus, QUESTION, find_positives=False)
    assert without_positives.negatives == mined.negatives, "a passage with the answer is no negative either way"


def test_given_positives_are_kept_and_never_negatives(corpus: Snapshot) -> None:
    example = Example("1", "animal farm", ("Elizabeth",), (CORPUS[1],))
    (mined,) = mine(corpus, example, negatives=1)
    assert (mined.positives, mined.negatives) == ((CORPUS[1],), (CORPUS[0],))
    (skipped,) = mine(corpus, QUESTION, find_positives=False, skip=2)
    assert (skipped.positives, [negative.title for negative in skipped.negatives]) == ((), ["Farm"])


def test_example_keeps_its_negatives_except_copies_of_mined_positive(corpus: Snapshot) -> None:
    own_negatives = (CORPUS[0], build_passage("Napoleon", "a pig of the novella"))
    for settings in ({}, {"negatives": 0}):
        (mined,) = mine(corpus, replace(QUESTION, negatives=own_negatives), **settings)
        assert (mined.positives, mined.negatives) == ((CORPUS[0],), own_negatives[1:])
    (mined,) = mine(corpus, replace(QUESTION, negatives=own_negatives), find_positives=False)
    assert (mined.positives, mined.negatives) == ((), own_negatives)
    (mined,) = mine(corpus, replace(QUESTION, negatives=own_negatives[:1]))
    assert [negative.title for negative in mined.negatives] == ["Novella", "Farm"], "its only negative is the positive"


def test_own_document_is_no_negative(corpus: Snapshot) -> None:
    passage = CORPUS[1]  # It is recognized by its hash, or by its page.
    for own_document in (passage, build_passage("", "the whole article", passage.page_id)):
        example = Example("1", "an animal farm keeps cows", positives=(CORPUS[0],), own_document=own_document)
        (mined,) = mine(corpus, example)
        assert mined.negatives
        assert passage not in mined.negatives


def test_pages_of_kilt_examples_contain_the_positive_and_no_negative(tmp_path: Path) -> None:
    """FEVER's answers are labels; the answers of other sets are words, which a passage may contain by chance."""
    rows = [("1", "no Orwell"), ("2", "a farm"), ("7", "a pig"), ("7", "by Orwell"), ("3", "a novella"), ("4", "a pig")]
    snapshot = store_passages([build_passage("", text, page_id=page) for page, text in rows], tmp_path / "kilt", 3)

    def mine_texts(*answers: str, pages: tuple[str, ...] = ("7", "8")) -> tuple[list[str], list[str]]:
        example, hits = Example("1", "who wrote?", answers, pages=pages), np.array([[0, 1, 2, 3, 4, 5, -1]])
        (mined,) = mine_passages([example], hits, snapshot, MiningSettings())
        return [passage.text for passage in mined.positives], [passage.text for passage in mined.negatives]

    assert mine_texts("Orwell") == (["by Orwell"], ["a farm", "a novella", "a pig"])
    # The other page's passage "a pig" has the text of the positive, so it is no negative either.
    assert mine_texts("SUPPORTS") == (["a pig"], ["no Orwell", "a farm", "a novella"])
    assert mine_texts() == mine_texts("SUPPORTS"), "KILT's test files have only the pages"
    negatives = ["a farm", "a pig", "a novella", "a pig"]
    assert mine_texts("Orwell", pages=("9",)) == (["no Orwell"], negatives), "the snapshot does not have page 9"


def test_passages_of_relevant_document_are_correct_and_not_mined(tmp_path: Path) -> None:
    """A BEIR folder has whole documents; a snapshot has their passages."""
    sections = [f"section {number} says that statins lower cholesterol" for number in range(4)]
    texts = {"1": "; ".join(sections), "2": "an animal farm", "3": "bread has no cholesterol"}
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\nq\t1\t1\n")
    (tmp_path / "queries.jsonl").write_text(json.dumps({"_id": "q", "text": "do statins lower cholesterol"}))
    documents = [json.dumps({"_id": document, "title": "", "text": text}) for document, text in texts.items()]
    (tmp_path / "corpus.jsonl").write_text("\n".join(documents))
    passages = [build_passage("", section, f"1:{number}", "1") for number, section in enumerate(sections)]
    passages += [build_passage("", texts[document], f"{document}:0", document) for document in "23"]
    (mined,) = mine(store_passages(passages, tmp_path / "beir", 3), *read_examples(tmp_path))
    assert [passage.text for passage in mined.positives] == [texts["1"]]
    assert [passage.text for passage in mined.negatives] == [texts["3"]]
    ranking = RankingEvaluator([mined], passages)
    scores = [{"1:3": 3.0, "3:0": 2.0, "1": 1.0}.get(passage.id, 0.0) for passage in ranking.pool]
    measures = ranking.evaluate_scores([np.array([scores], np.float32)])
    assert measures["Success@1"] == 1
    assert measures["average_rank"] == 2, "only the passage of another document is before the relevant one"


@pytest.mark.parametrize(
    "example",
    [
        Example("1", "  ", ("x",), (), (CORPUS[6],)),
        Example("1", "who wrote?", (), (), (CORPUS[6],)),
        Example("1", "animal farm", ("x",), (CORPUS[0],), (CORPUS[6],)),
    ],
)
def test_complete_or_unjudgeable_example_is_unchanged(example: Example, corpus: Snapshot) -> None:
    assert mine(corpus, example) == [example]


def test_mining_with_a_snapshot_retriever_uses_its_encoder(snapshot: Snapshot, passages: list[Passage]) -> None:
    question, recipe = Example("1", "Who wrote Animal Farm?", ("Orwell",)), NegativesRecipe("snapshot", "exact")
    (mined,) = add_mined_passages({"dev": [question]}, snapshot, recipe)["dev"]
    assert [positive.title for positive in mined.positives] == ["Animal Farm"]
    assert len(mined.negatives) == len(passages) - 1
    assert not any(AnswerMatcher(["Orwell"]).match(negative.text) for negative in mined.negatives)


def test_many_examples_keep_their_order(corpus: Snapshot) -> None:
    examples = [Example(str(number), "animal farm", ("cows",)) for number in range(300)]
    mined = mine(corpus, *examples)
    assert [example.id for example in mined] == [example.id for example in examples]
    assert len({example.negatives for example in mined}) == 1


def test_contradictory_settings_are_refused() -> None:
    with pytest.raises(UsageError, match="give 0 <= skip < depth"):
        MiningSettings(depth=5, skip=5)
