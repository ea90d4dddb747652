"""The labels of the horizontal axis of a chart."""

import re

import pytest

from rag_model.evaluation.reports.page import ChartPoint, line_chart


def list_labels(xs: list[float], *, log: bool) -> list[str]:
    points = [ChartPoint(x, 0.5, 0.4, 0.6) for x in xs]
    return re.findall(r"<text [^>]*>([^<]*)</text>", line_chart({"one": points}, "figure", "quantity", log=log).html)


@pytest.mark.parametrize("log", [False, True])
def test_few_whole_quantities_are_their_own_labels(log: bool) -> None:
    assert {"1", "2", "5", "10", "20"} <= {*list_labels([1, 2, 5, 10, 20], log=log)}


def test_measured_quantities_have_round_labels() -> None:
    texts = list_labels([28.3912, 28.4017, 28.9173, 29.36], log=True)
    assert {"28.4", "28.6", "28.8", "29", "29.2"} <= {*texts}
    assert {"0.2", "0.5", "1", "2", "5"} <= {*list_labels([0.151, 0.3, 7.7], log=True)}
