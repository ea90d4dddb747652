"""A real Prometheus, with the configuration and the alerts of this repository, scrapes a real service."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from flows.machine.local import find_free_ports
from tests.fixtures.alert_rules import DASHBOARD, RULES, find_metric_names, find_program, read_rules
from tests.fixtures.serving import QUICK, TIMEOUT, wait_until
from tests.fixtures.tiny import save_bert
from tests.fixtures.watched_service import EVALUATED, publish_monitored, serve_monitored

PANELS = json.loads(DASHBOARD.read_text())["panels"]


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[httpx.Client]:
    """Run Prometheus with `prometheus.yml`, but scrape only `target`, every second, and listen on a free port."""
    configuration: dict[str, Any] = yaml.safe_load((RULES.parent / "prometheus.yml").read_text())
    configuration["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    configuration["rule_files"] = [str(RULES)]
    configuration["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    address = f"127.0.0.1:{find_free_ports(1)[0]}"
    options = {"config.file": folder / "prometheus.yml", "storage.tsdb.path": folder / "data"}
    options |= {"web.listen-address": address, "log.level": "warn"}
    command = [find_program("prometheus"), *(f"--{name}={value}" for name, value in options.items())]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            with httpx.Client(base_url=f"http://{address}/api/v1", timeout=TIMEOUT) as client:
                wait_until(lambda: process.poll() is not None or _answers(client))
                assert process.poll() is None, (folder / "log").read_text()
                yield client
        finally:
            process.kill()


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/status/runtimeinfo").status_code == 200
    except httpx.TransportError:
        return False


def query(client: httpx.Client, expression: str) -> list[Any]:
    reply = client.get("/query", params={"query": expression}).json()
    assert reply["status"] == "success", (expression, reply)
    return list(reply["data"]["result"])


def test_prometheus_loads_all_rules_and_panels(tmp_path: Path) -> None:
    store = publish_monitored(tmp_path, save_bert(tmp_path / "bert"))
    with serve_monitored(store.url, tmp_path / "dest", QUICK, EVALUATED) as service:
        service.scrape_when_measured()
        with prometheus(tmp_path, service.running.url.removeprefix("http://")) as client:
            wait_until(lambda: query(client, "rate(bookwheel_batch_questions_sum[1m])"))
            (info,) = query(client, "bookwheel_snapshot_info")
            assert info["metric"]["snapshot"] == service.running.snapshot()["snapshot"]
            assert {rule["name"] for rule in list_loaded_rules(client)} == {rule["alert"] for rule in read_rules()}
            wait_until(lambda: all(rule["health"] == "ok" for rule in list_loaded_rules(client)))
            panel_expressions = [target["expr"] for panel in PANELS for target in panel.get("targets", ())]
            empty = [expression for expression in panel_expressions if not query(client, fill_variables(expression))]
            metrics_of_models = [
                ["bookwheel_probe_same_ratio"],
                ["bookwheel_probe_likelihood_difference_nats"],
                ["bookwheel_answers_override_total", "bookwheel_answers_sampled_total"],
                ["bookwheel_answers_sampled_total", "bookwheel_answers_unchecked_total"],
                ["bookwheel_tokens_total"],
            ]
            assert [sorted(find_metric_names(expression)) for expression in empty] == metrics_of_models


def list_loaded_rules(client: httpx.Client) -> list[dict[str, Any]]:
    return [rule for group in client.get("/rules").json()["data"]["groups"] for rule in group["rules"]]


def fill_variables(expression: str) -> str:
    """Replace Grafana's variables by values."""
    return expression.replace("$__rate_interval", "1m").replace("$instance", ".+")
