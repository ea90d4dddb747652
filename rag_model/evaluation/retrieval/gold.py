"""The passages that questions name as relevant, and how many words a question shares with them.

A question that was written with its passage in view repeats its words, and flatters a search by words. The subset of
questions that share at most two stems with their passage shows what is left.
"""

from collections.abc import Callable, Iterator, Sequence

from rag_model.errors import InputError
from rag_model.evaluation.questions.files import Question
from rag_model.evaluation.retrieval.judging import Grades, Judge
from rag_model.index.postings.analyzer import Analyzer
from rag_model.store.versions.snapshot import Snapshot

MOST_SHARED = 2  # stems
# Lucene's English stop words, and those of questions: shared by any question and any passage.
_STOP = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this "
    "to was will with did do does from had has have how many much s were what when where which who whom whose why"
)


def gold_texts(snapshot: Snapshot, judge: Judge) -> dict[str, list[str]]:
    """Return title and text of each passage that is judged relevant, by its id or its page's id; reads the corpus once.

    Ids that the snapshot does not hold are left out.

    Raises:
        InputError: it holds none of them.
        StoreError: a passage file is damaged.
    """
    wanted = {name for grades in judge.grades.values() for name, grade in grades.items() if grade > 0}
    column = "page_id" if judge.by == "pages" else "id"
    found: dict[str, list[str]] = {}
    name = ""
    for name, text in _every(snapshot, column):
        if name in wanted:
            found.setdefault(name, []).append(text)
    if wanted and not found:
        raise InputError(
            f"snapshot {snapshot.id[:12]} holds none of the {len(wanted):,} {judge.by} that the questions name, such "
            f"as {min(wanted)!r}: use ids of this corpus, such as {name!r}, or judge by answers"
        )
    return found


def _every(snapshot: Snapshot, column: str) -> Iterator[tuple[str, str]]:
    for part in snapshot.parts:
        for batch in snapshot.batches(part.name, [column, "title", "text"]):
            names, titles, texts = (batch.column(place).to_pylist() for place in range(3))
            yield from ((name, f"{title} {text}") for name, title, text in zip(names, titles, texts, strict=True))


def unknown(judge: Judge, texts: dict[str, list[str]]) -> int:
    """Return how many questions name nothing that the snapshot holds."""
    return sum(not any(name in texts for name in grades) for grades in judge.grades.values())


def low_overlap(questions: Sequence[Question], grades: Grades, texts: dict[str, list[str]]) -> list[int]:
    """Return the places of the questions that share at most two stems with each relevant passage that is known.

    Stems are the terms of an English index of words (`Analyzer`); stop words do not count. A title belongs to its
    passage.

    Raises:
        MissingExtraError: PyStemmer is not installed.
    """
    stems = _stemmer()
    known: dict[str, list[set[bytes]]] = {}
    places = []
    for place, question in enumerate(questions):
        asked = stems(question.text)
        relevant = [name for name, grade in grades[question.id].items() if grade > 0 and name in texts]
        for name in relevant:
            if name not in known:
                known[name] = [stems(text) for text in texts[name]]
        if relevant and all(len(asked & one) <= MOST_SHARED for name in relevant for one in known[name]):
            places.append(place)
    return places


def _stemmer() -> Callable[[str], set[bytes]]:
    analyzer = Analyzer("english")
    common = set(analyzer.terms(_STOP))
    return lambda text: set(analyzer.terms(text)) - common
