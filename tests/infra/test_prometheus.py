"""The alarms: well-formed, each with a person to call and a thing to do, and each tripped by a test."""

from pathlib import Path

import yaml

from rag_model.evaluation.answers.collapse import COLLAPSE_LIMITS
from rag_model.store.versions.build_history import LEAST_RECALL, MOST_COST, MOST_DISTANCES
from tests.fixtures.alert_rules import ROOT, RULES, promtool, rules

FOLDER = ROOT / "infra/prometheus"
TESTS = Path(__file__).with_name("alerts_test.yml")


def test_prometheus_takes_the_rules_and_the_configuration() -> None:
    for kind, file in (("rules", RULES), ("config", FOLDER / "prometheus.yml")):
        checked = promtool("check", kind, file)
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_rules_fire_when_they_should_and_not_before() -> None:
    tested = promtool("test", "rules", TESTS)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_each_alarm_is_tripped_and_says_whom_to_call_and_what_to_do() -> None:
    tripped = TESTS.read_text()
    assert len(rules()) > 10
    for rule in rules():
        assert f'alertname="{rule["alert"]}"' in tripped, rule["alert"]
        assert yaml.safe_dump(rule["labels"]).strip() in {"severity: page", "severity: ticket"}
        assert set(rule["annotations"]) == {"summary", "action"}


def test_builds_bend_where_a_build_warns() -> None:
    (rule,) = (rule for rule in rules() if rule["alert"] == "BookwheelBuildsLeaveBand")
    bands = [float(comparison.split()[1]) for comparison in rule["expr"].split("}")[1:]]
    assert bands == [LEAST_RECALL, MOST_DISTANCES, MOST_COST]


def test_collapse_is_what_training_refuses() -> None:
    (rule,) = (rule for rule in rules() if rule["alert"] == "BookwheelRetrievalCollapsed")
    assert rule["expr"].split(" < ")[1] == str(COLLAPSE_LIMITS.least_spread)
