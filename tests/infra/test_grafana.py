"""The dashboard works with any Prometheus, its panels do not overlap, and its PromQL is valid.

tests/rag_model/serving/test_alarms.py tests that the service exports its metrics.
"""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

from tests.fixtures.alert_rules import DASHBOARD, iter_dashboard_queries, run_promtool

BOARD: dict[str, Any] = json.loads(DASHBOARD.read_text())
PANELS: list[dict[str, Any]] = BOARD["panels"]
DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def test_the_data_source_is_a_variable() -> None:
    (variable,) = (variable for variable in BOARD["templating"]["list"] if variable["name"] == "datasource")
    assert (variable["type"], variable["query"]) == ("datasource", "prometheus")
    panels = [panel for panel in PANELS if panel["type"] != "row"]
    elements = [*panels, *(target for panel in panels for target in panel["targets"]), *BOARD["annotations"]["list"]]
    elements += [variable for variable in BOARD["templating"]["list"] if variable["type"] == "query"]
    assert all(element["datasource"] == DATA_SOURCE for element in elements)
    assert all(panel["targets"] for panel in panels)


def test_panels_have_unique_ids_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    rectangles = [panel["gridPos"] for panel in PANELS]
    assert all(rectangle["x"] + rectangle["w"] <= 24 for rectangle in rectangles)
    for first, second in combinations(rectangles, 2):
        apart = [
            first[a] + first[b] <= second[a] or second[a] + second[b] <= first[a] for a, b in (("x", "w"), ("y", "h"))
        ]
        assert any(apart), (first, second)


def test_prometheus_takes_every_expression(tmp_path: Path) -> None:
    """With Grafana's variables replaced, every expression is a valid rule."""
    expressions = [
        expression for expression in iter_dashboard_queries(BOARD) if not expression.startswith("label_values(")
    ]
    assert len(expressions) > 20
    queries = [expression.replace("$__rate_interval", "5m").replace("$instance", ".+") for expression in expressions]
    assert not any("$" in expression for expression in queries)
    rules = [{"record": f"query:{n}", "expr": expression} for n, expression in enumerate(queries)]
    file = tmp_path / "rules.json"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    process = run_promtool("check", "rules", "--lint=none", file)
    assert process.returncode == 0, process.stdout + process.stderr
