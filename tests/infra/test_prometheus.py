"""The alarms are well-formed, have a severity and an action, and are triggered by a test."""

from pathlib import Path

import yaml

from rag_model.evaluation.answers.collapse import COLLAPSE_LIMITS
from rag_model.store.versions.build_history import MAX_COST_RATIO, MAX_DISTANCES_RATIO, MIN_RECALL_RATIO
from tests.fixtures.alert_rules import ROOT, RULES, read_rules, run_promtool

FOLDER = ROOT / "infra/prometheus"
TESTS = Path(__file__).with_name("alerts_test.yml")


def test_prometheus_takes_the_rules_and_the_configuration() -> None:
    for kind, file in (("rules", RULES), ("config", FOLDER / "prometheus.yml")):
        process = run_promtool("check", kind, file)
        assert process.returncode == 0, process.stdout + process.stderr


def test_the_rules_fire_when_they_should_and_not_before() -> None:
    process = run_promtool("test", "rules", TESTS)
    assert process.returncode == 0, process.stdout + process.stderr


def test_each_alarm_is_tested_and_has_a_severity_and_an_action() -> None:
    rule_tests = TESTS.read_text()
    assert len(read_rules()) > 10
    for rule in read_rules():
        assert f'alertname="{rule["alert"]}"' in rule_tests, rule["alert"]
        assert yaml.safe_dump(rule["labels"]).strip() in {"severity: page", "severity: ticket"}
        assert set(rule["annotations"]) == {"summary", "action"}


def test_alarms_of_builds_have_the_limits_of_build_warnings() -> None:
    (rule,) = (rule for rule in read_rules() if rule["alert"] == "BookwheelBuildsLeaveBand")
    bands = [float(comparison.split()[1]) for comparison in rule["expr"].split("}")[1:]]
    assert bands == [MIN_RECALL_RATIO, MAX_DISTANCES_RATIO, MAX_COST_RATIO]


def test_the_alarm_of_collapse_has_the_limit_of_training() -> None:
    (rule,) = (rule for rule in read_rules() if rule["alert"] == "BookwheelRetrievalCollapsed")
    assert rule["expr"].split(" < ")[1] == str(COLLAPSE_LIMITS.least_spread)
