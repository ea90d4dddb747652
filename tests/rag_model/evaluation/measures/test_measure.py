"""Built-in and installed measures keep the rules of `docs/extend/measure.md`."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_model.errors import InputError, UsageError
from rag_model.evaluation.answers.readings import Reading
from rag_model.evaluation.answers.scores import estimate_measures, get_deciding_measure, list_measures, score_answer
from rag_model.evaluation.bootstrap import Resampling
from rag_model.evaluation.measures.measure import (
    ANSWER_KINDS,
    JUDGED_BY,
    MEASURES,
    AnswerKind,
    AnswerMeasure,
    CorpusMeasure,
    JudgedBy,
    Ranking,
    RankingMeasure,
    list_answer_functions,
    list_measure_versions,
    list_ranking_measures,
    load_measures,
    parse_ranking_measure,
)
from rag_model.evaluation.questions import Question, QuestionSet
from rag_model.evaluation.retrieval.judging import RetrievalJudge, match_hits
from tests.fixtures import average_precision
from tests.fixtures.plugin_package import install_package

IDS = [f"p{number}" for number in range(9)]
RANKINGS = st.builds(
    Ranking,
    st.lists(st.sampled_from(IDS), unique=True, max_size=9).map(tuple),
    st.dictionaries(st.sampled_from(IDS), st.integers(0, 3), min_size=1),
)
TEXTS = st.text("ab1 .", max_size=12)
GOLDS: dict[AnswerKind, st.SearchStrategy[str]] = {
    "spans": TEXTS,
    "patterns": st.sampled_from(["a+", "^b", "1 ?.", "."]),
    "labels": st.sampled_from(["SUPPORTS", "REFUTES", "NOT ENOUGH INFO", "a"]),
    "texts": TEXTS,
    "clues": TEXTS,
}


def clear_caches() -> None:
    """Look for installed measures again."""
    load_measures.cache_clear()
    list_answer_functions.cache_clear()


@pytest.fixture
def import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of the import path, whose measures are forgotten at the end."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(MEASURES, "_loaded", {})
    clear_caches()
    yield tmp_path
    sys.modules.pop("average_precision", None)
    clear_caches()


@pytest.fixture
def package(import_path: Path) -> None:
    """The example as an installed package."""
    entry_points = "AP = average_precision:AVERAGE_PRECISION\nPrefix = average_precision:PREFIX"
    install_package(import_path, "measures", entry_points, average_precision.__file__)


def check_values(values: Sequence[float], n: int) -> None:
    assert len(values) == n
    assert all(math.isfinite(value) and 0 <= value <= 1 + 1e-9 for value in values)  # sacrebleu rounds


def check_ranking_measure(measure: RankingMeasure, rankings: Sequence[Ranking], cutoff: int) -> None:
    """Assert that a measure keeps the rules on these rankings."""
    values = list(measure.compute(rankings, cutoff))
    check_values(values, len(rankings))
    assert list(measure.compute(rankings, cutoff)) == values
    assert [measure.compute([ranking], cutoff)[0] for ranking in rankings] == pytest.approx(values)
    first_k = [Ranking(ranking.results[:cutoff], ranking.grades) for ranking in rankings]
    assert list(measure.compute(first_k, cutoff)) == pytest.approx(values)
    without_results = [Ranking((), ranking.grades) for ranking in rankings]
    assert list(measure.compute(without_results, cutoff)) == [0.0] * len(rankings)
    assert list(measure.compute([], cutoff)) == []


def check_answer_measure(measure: AnswerMeasure, kind: AnswerKind, prediction: str, golds: Sequence[str]) -> None:
    """Assert that a measure keeps the rules on this answer."""
    compute = measure.functions[kind]
    value = compute(prediction, golds)
    assert value is None or 0 <= value <= 1
    assert compute(prediction, golds) == value
    assert compute(prediction, ()) in (0.0, None)
    assert all(best is None or best <= 1 for best in (compute(gold, [gold]) for gold in golds))


def check_corpus_measure(measure: CorpusMeasure, predictions: Sequence[str], golds: Sequence[Sequence[str]]) -> None:
    """Assert that a measure keeps the rules on these answers."""
    resampling = Resampling(draws=20)
    estimate = measure.compute(predictions, golds, resampling)
    assert measure.compute(predictions, golds, resampling) == estimate
    if estimate is not None:
        check_values([estimate.low, estimate.value, estimate.high], 3)


def select_measures(kind: type) -> dict[str, object]:
    return {name: measure for name, measure in load_measures().items() if isinstance(measure, kind)}


@pytest.mark.parametrize("name", [*select_measures(RankingMeasure), "AP"])
@settings(max_examples=30, deadline=None)
@given(rankings=st.lists(RANKINGS, min_size=1, max_size=5), cutoff=st.integers(1, 10))
def test_a_ranking_measure_keeps_the_rules(name: str, rankings: list[Ranking], cutoff: int) -> None:
    measure = average_precision.AVERAGE_PRECISION if name == "AP" else load_measures()[name]
    assert isinstance(measure, RankingMeasure)
    check_ranking_measure(measure, rankings, cutoff)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, kind) for kind in ANSWER_KINDS for name in list_answer_functions(kind)),
        ("Prefix", "spans"),
        ("Prefix", "texts"),
    ],
)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_an_answer_measure_keeps_the_rules(name: str, kind: AnswerKind, data: st.DataObject) -> None:
    measure = average_precision.PREFIX if name == "Prefix" else load_measures()[name]
    assert isinstance(measure, AnswerMeasure)
    golds = data.draw(st.lists(GOLDS[kind], max_size=3))
    prediction = data.draw(st.one_of(TEXTS, st.sampled_from(golds or ["a"])))
    check_answer_measure(measure, kind, prediction, golds)


@pytest.mark.parametrize("name", select_measures(CorpusMeasure))
@settings(max_examples=15, deadline=None)
@given(answers=st.lists(st.tuples(TEXTS, st.lists(TEXTS, max_size=2)), min_size=1, max_size=4))
def test_a_corpus_measure_keeps_the_rules(name: str, answers: list[tuple[str, list[str]]]) -> None:
    measure = load_measures()[name]
    assert isinstance(measure, CorpusMeasure)
    check_corpus_measure(measure, [text for text, _ in answers], [golds for _, golds in answers])


@pytest.mark.parametrize("judged_by", JUDGED_BY)
def test_a_search_has_every_cutoff_that_reports_list(judged_by: JudgedBy) -> None:
    for name, measure in list_ranking_measures(judged_by).items():
        for cutoff in measure.report_cutoffs(25, judged_by):
            assert parse_ranking_measure(f"{name}@{cutoff}", judged_by) == (measure, cutoff)
            assert cutoff <= 25


@given(rankings=st.lists(RANKINGS, min_size=1, max_size=5), cutoff=st.integers(1, 10))
@settings(max_examples=30, deadline=None)
def test_success_and_rr_are_those_of_ir_measures(rankings: list[Ranking], cutoff: int) -> None:
    package = pytest.importorskip("ir_measures")
    qrels = {str(i): dict(ranking.grades) for i, ranking in enumerate(rankings)}
    run = {
        str(i): {name: -float(rank) for rank, name in enumerate(ranking.results)} for i, ranking in enumerate(rankings)
    }
    for name in ("Success", "RR"):
        measure = load_measures()[name]
        assert isinstance(measure, RankingMeasure)
        values = dict.fromkeys(qrels, 0.0)
        for result in package.iter_calc([package.parse_measure(f"{name}@{cutoff}")], qrels, run):
            values[result.query_id] = float(result.value)
        assert list(measure.compute(rankings, cutoff)) == list(values.values())


def test_an_installed_measure_is_reported(package: None, make_hits) -> None:
    question = Question("q", "Q", ("b",), passages=("1-2", "2-4", "9-9"))
    judge = RetrievalJudge.for_questions(QuestionSet((question,)))
    assert judge.list_measures(20)[-1] == "AP@20"
    assert judge.get_cutoff("AP@7") == 7
    hits = make_hits([("9", "a"), ("1", "b"), ("1", "c"), ("2", "d")])
    values = judge.compute_means([match_hits(question, hits)], 4)
    assert values["AP@4"] == pytest.approx((1 / 2 + 2 / 4) / 3)
    with pytest.raises(UsageError, match="judged by answers: choose one such as Success@20, RR@20"):
        RetrievalJudge("answers").get_cutoff("AP@4")


def test_an_installed_measure_of_answers_is_reported(package: None) -> None:
    scored = score_answer(Question("q", "Q", ("Paris",)), Reading("q", "Parma", None, ()))
    assert scored.measures["Prefix"] == pytest.approx(3 / 5)
    assert estimate_measures([scored])["Prefix"].n == 1
    assert get_deciding_measure("spans") == "EM"
    assert list_measures("spans", evidence=False)[:3] == ["EM", "F1", "Prefix"]
    assert "Prefix" not in list_measures("labels", evidence=False)


def test_an_installed_measure_is_part_of_the_identity(package: None) -> None:
    assert list_measure_versions() == {"AP": "1", "Prefix": "1"}


def test_without_packages_the_identity_names_no_measure() -> None:
    assert list_measure_versions() == {}


@pytest.mark.parametrize(
    ("entry_point", "message"),
    [
        ("AP = average_precision:average_precision", r"package average_precision 1.0\) is function: register a Rank"),
        (
            "AP@20 = average_precision:AVERAGE_PRECISION",
            "'AP@20' .* of the package .* has a wrong name: use letters",
        ),
        ("AP = average_precision:NOTHING", "measure 'AP' .* cannot be imported"),
    ],
)
def test_a_broken_package_is_named(import_path: Path, entry_point: str, message: str) -> None:
    install_package(import_path, "measures", entry_point, average_precision.__file__, name="average_precision")
    with pytest.raises(InputError, match=message):
        load_measures()


BROKEN = """
from rag_model.evaluation.bootstrap import Estimate
from rag_model.evaluation.measures.measure import AnswerMeasure, CorpusMeasure, RankingMeasure

def fail(*_):
    raise KeyError("secret")

BROKEN = {measure}
"""
NAMES_PLUGIN = r"^measure 'Broken' \(broken_measure:BROKEN of the package broken-measure 2.1\) "
HITS = [("9", "a"), ("1", "b"), ("1", "c"), ("2", "d")]


@pytest.fixture
def install_broken(import_path: Path) -> Iterator[Callable[[str], None]]:
    """Install a package whose measure `Broken` is an expression."""

    def install_measure(measure: str) -> None:
        entry_point = "Broken = broken_measure:BROKEN"
        install_package(import_path, "measures", entry_point, name="broken-measure", version="2.1")
        (import_path / "broken_measure.py").write_text(BROKEN.replace("{measure}", measure))

    yield install_measure
    sys.modules.pop("broken_measure", None)


@pytest.mark.parametrize(
    ("measure", "message"),
    [
        ("RankingMeasure(lambda r, k: [0.5] * len(r), version=3)", 'has the version 3: use text such as "1"'),
        ("RankingMeasure(lambda r, k: [0.5] * len(r), version=object())", "has the version <object"),
        ("RankingMeasure(3)", "has compute 3: give a function"),
        ("RankingMeasure(fail, None)", "has report_cutoffs None: give a function"),
        (
            "RankingMeasure(fail, listed_apart=('pictures',))",
            "has listed_apart .*: use some of answers, pages, passages",
        ),
        ("RankingMeasure", "is type: register a RankingMeasure, an AnswerMeasure or a CorpusMeasure"),
        ("AnswerMeasure({'poems': fail})", "has functions .*: use some of spans"),
        ("AnswerMeasure({'spans': 'F1'})", "has spans 'F1': give a function"),
        ("AnswerMeasure(fail)", "has functions <function fail"),
        ("CorpusMeasure('spans', fail)", "has kinds 'spans': use some of spans"),
    ],
)
def test_an_installed_measure_with_a_wrong_member_is_named(
    install_broken: Callable[[str], None], measure: str, message: str
) -> None:
    install_broken(measure)
    with pytest.raises(InputError, match=NAMES_PLUGIN + message) as error:
        load_measures()
    assert error.value.exit_code == 1


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        ("fail", r"fails \(KeyError: 'secret'\): repair or uninstall its package"),
        ("lambda rankings, cutoff: [0.5]", "returned 1 values for 2 rankings: return one number for each"),
        ("lambda rankings, cutoff: 'high'", "fails .*it returned 'high' instead of a list of numbers"),
        ("lambda rankings, cutoff: None", "fails .*it returned None instead of a list of numbers"),
        ("lambda rankings, cutoff: 0.5", "fails .*it returned 0.5 instead of a list of numbers"),
        ("lambda rankings, cutoff: ['1', '1']", "returned '1': return numbers from 0 to 1"),
        ("lambda rankings, cutoff: [None, 1]", "returned None: return numbers from 0 to 1"),
        ("lambda rankings, cutoff: [0.2, float('nan')]", "returned nan: return numbers from 0 to 1"),
        ("lambda rankings, cutoff: [0.2, 1.5]", "returned 1.5: return numbers from 0 to 1"),
        ("lambda rankings, cutoff: [-0.1, 0]", "returned -0.1: return numbers from 0 to 1"),
    ],
)
def test_wrong_values_of_an_installed_measure_are_refused(
    install_broken: Callable[[str], None], compute: str, message: str, make_hits: Any
) -> None:
    install_broken(f"RankingMeasure({compute}, lambda depth, judged_by: [depth])")
    question = Question("q", "Q", ("b",), passages=("1-2",))
    judge = RetrievalJudge.for_questions(QuestionSet((question,)))
    with pytest.raises(InputError, match=NAMES_PLUGIN + message) as error:
        judge.compute_means([match_hits(question, make_hits(HITS))] * 2, 4)
    assert error.value.exit_code == 1


@pytest.mark.parametrize("cutoffs", ["None", "[0]", "[5]", "[2.0]", "'4'", "[True]", "4"])
def test_wrong_cutoffs_of_an_installed_measure_are_refused(install_broken: Callable[[str], None], cutoffs: str) -> None:
    install_broken(f"RankingMeasure(fail, lambda depth, judged_by: {cutoffs})")
    with pytest.raises(
        InputError, match=NAMES_PLUGIN + "(reports the cutoffs .* of a search of depth 4|fails .*instead of)"
    ):
        RetrievalJudge("passages").list_measures(4)


@pytest.mark.parametrize("value", ["2", "float('inf')", "'0.5'", "[0.5]"])
def test_wrong_values_of_an_answer_are_refused(install_broken: Callable[[str], None], value: str) -> None:
    install_broken(f"AnswerMeasure({{'spans': lambda prediction, golds: {value}}})")
    with pytest.raises(InputError, match=NAMES_PLUGIN + "returned .*: return numbers from 0 to 1"):
        score_answer(Question("q", "Q", ("Paris",)), Reading("q", "Parma", None, ()))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("0.5", "returned 0.5: return an Estimate, or None"),
        ("Estimate(1.2, 1.1, 1.3, 4)", "returned 1.2: return numbers"),
    ],
)
def test_wrong_values_of_a_corpus_are_refused(install_broken: Callable[[str], None], value: str, message: str) -> None:
    install_broken(f"CorpusMeasure(('spans',), lambda predictions, golds, resampling: {value})")
    scored = score_answer(Question("q", "Q", ("Paris",)), Reading("q", "Parma", None, ()))
    with pytest.raises(InputError, match=NAMES_PLUGIN + message):
        estimate_measures([scored])


def test_rounding_of_an_installed_measure_is_cut(install_broken: Callable[[str], None], make_hits: Any) -> None:
    install_broken("RankingMeasure(lambda rankings, cutoff: [1 + 1e-12], lambda depth, judged_by: [depth])")
    question = Question("q", "Q", ("b",), passages=("1-2",))
    judge = RetrievalJudge.for_questions(QuestionSet((question,)))
    assert judge.compute_means([match_hits(question, make_hits(HITS))], 4)["Broken@4"] == 1.0


def test_a_package_cannot_replace_a_built_in_measure(import_path: Path) -> None:
    entry_point = "Success = average_precision:AVERAGE_PRECISION"
    install_package(import_path, "measures", entry_point, average_precision.__file__)
    measure = load_measures()["Success"]
    assert isinstance(measure, RankingMeasure)
    assert measure is not average_precision.AVERAGE_PRECISION
    assert measure.compute([Ranking(("a",), {"a": 1})], 1) == [1.0]
