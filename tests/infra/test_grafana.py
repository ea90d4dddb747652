"""The dashboard: of any Prometheus, with nothing that overlaps, and of PromQL that Prometheus takes.

That its metrics are exported is tested where they are: tests/rag_model/serving/test_alarms.py.
"""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

from tests.fixtures.alert_rules import DASHBOARD, expressions_of, promtool

BOARD: dict[str, Any] = json.loads(DASHBOARD.read_text())
PANELS: list[dict[str, Any]] = BOARD["panels"]
CHOSEN = {"type": "prometheus", "uid": "${datasource}"}


def test_the_data_source_is_chosen_not_fixed() -> None:
    (variable,) = (one for one in BOARD["templating"]["list"] if one["name"] == "datasource")
    assert (variable["type"], variable["query"]) == ("datasource", "prometheus")
    shown = [panel for panel in PANELS if panel["type"] != "row"]
    named = [*shown, *(target for panel in shown for target in panel["targets"]), *BOARD["annotations"]["list"]]
    named += [one for one in BOARD["templating"]["list"] if one["type"] == "query"]
    assert all(one["datasource"] == CHOSEN for one in named)
    assert all(panel["targets"] for panel in shown)


def test_panels_have_ids_and_room_of_their_own() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    places = [panel["gridPos"] for panel in PANELS]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        apart = [one[a] + one[b] <= other[a] or other[a] + other[b] <= one[a] for a, b in (("x", "w"), ("y", "h"))]
        assert any(apart), (one, other)


def test_prometheus_takes_every_expression(tmp_path: Path) -> None:
    """Grafana fills its variables in; then each is a rule like any other."""
    expressions = [one for one in expressions_of(BOARD) if not one.startswith("label_values(")]
    assert len(expressions) > 20
    filled = [expression.replace("$__rate_interval", "5m").replace("$instance", ".+") for expression in expressions]
    assert not any("$" in one for one in filled)
    recorded = [{"record": f"shown:number_{number}", "expr": one} for number, one in enumerate(filled)]
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": recorded}]}))
    checked = promtool("check", "rules", "--lint=none", rules)
    assert checked.returncode == 0, checked.stdout + checked.stderr
