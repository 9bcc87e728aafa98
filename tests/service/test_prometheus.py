"""Every panel, recording rule and alert that we ship has data in a real Prometheus.

Skipped where Debian's `prometheus` and `promtool` are not installed; `.ci/run` installs them.
"""

import json
import math
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest
import yaml

from prefixcache.config import EngineConfig
from prefixcache_service import Branch
from tests.service.conftest import RunningServer

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "prefixcache.rules.yml"
DASHBOARD = json.loads((DEPLOY / "grafana" / "prefixcache.json").read_text())

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="prometheus and promtool are not installed",
)


def panels():
    """(title, expression) of each target, with Grafana's variables filled in."""
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "1m")
            yield panel["title"], expression.replace("$instance", ".*")


def rules():
    """(name, expression) of each rule; an alert's without the threshold that it waits for."""
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            name = rule.get("record") or rule["alert"]
            yield name, re.sub(r"\s(==|>)\s[0-9.]+\s*$", "", rule["expr"])


class Prometheus:
    """Debian's Prometheus on the shipped configuration, with other target and intervals."""

    def __init__(self, folder, target):
        self.port = free_port()
        config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
        config["rule_files"] = [str(RULES)]
        config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.log = (folder / "prometheus.log").open("w")
        self.process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
            ],
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    def query(self, expression):
        """Values of an instant query that are numbers."""
        url = f"http://127.0.0.1:{self.port}/api/v1/query"
        answer = httpx.get(url, params={"query": expression}, trust_env=False).json()
        assert answer["status"] == "success", (expression, answer)
        values = [float(series["value"][1]) for series in answer["data"]["result"]]
        return [value for value in values if not math.isnan(value)]

    def wait_for(self, expression, seconds=20):
        """Until it has a value above 0."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if any(value > 0 for value in self.query(expression)):
                    return
            except httpx.TransportError:
                assert self.process.poll() is None, "Prometheus has ended"
            time.sleep(0.2)
        raise AssertionError(f"no value above 0 within {seconds} s: {expression}")

    def close(self):
        self.process.terminate()
        self.process.wait(10)
        self.log.close()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def load(running):
    """Hits, forks, two salts, evictions and preemptions on a small pool."""
    with running.client() as client, running.client(cache_salt="other") as other:
        for number in range(6):
            prompt = [*range(10, 30), 40 + number]
            parent = client.generate(prompt, max_tokens=4, keep_seconds=5, ignore_eos=True)
            branches = [Branch(parent.sequence_id), Branch(parent.sequence_id, token_ids=[7])]
            client.fork(branches, max_tokens=4, ignore_eos=True)
            other.generate(prompt, max_tokens=4, ignore_eos=True)
        client.generate([9] * 20, n=4, max_tokens=50, ignore_eos=True)


@pytest.fixture(scope="module")
def prometheus(checkpoint, tmp_path_factory):
    config = EngineConfig(
        model=str(checkpoint), block_size=4, num_gpu_blocks_override=64, max_model_len=200, seed=1
    )
    running = RunningServer(config).load()
    prometheus = Prometheus(
        tmp_path_factory.mktemp("prometheus"), f"127.0.0.1:{running.server.http_port}"
    )
    try:
        load(running)
        prometheus.wait_for("prefixcache_completion_tokens_total")
        load(running)  # a rate is what comes between two scrapes
        prometheus.wait_for("rate(prefixcache_forks_total[1m])")
        prometheus.wait_for("prefixcache:hit_rate:5m")
        yield prometheus
        running.check()
    finally:
        prometheus.close()
        running.close()


@needs_prometheus
@pytest.mark.parametrize(("title", "expression"), list(panels()))
def test_every_panel_has_data(prometheus, title, expression):
    assert prometheus.query(expression), title


@needs_prometheus
@pytest.mark.parametrize(("name", "expression"), list(rules()))
def test_every_rule_has_data(prometheus, name, expression):
    assert prometheus.query(expression), name


@needs_prometheus
def test_alerts_are_loaded_and_a_healthy_server_fires_none_that_is_urgent(prometheus):
    url = f"http://127.0.0.1:{prometheus.port}/api/v1/rules"
    groups = httpx.get(url, trust_env=False).json()["data"]["groups"]
    alerts = [rule for group in groups for rule in group["rules"] if rule["type"] == "alerting"]
    assert len(alerts) == 6
    assert all(alert["health"] == "ok" for alert in alerts)
    assert prometheus.query("up") == [1]
    assert not prometheus.query('ALERTS{severity="critical"}')


@needs_prometheus
def test_promtool_accepts_what_we_ship():
    for kind, name in (("config", "prometheus.yml"), ("rules", "prefixcache.rules.yml")):
        check = ["promtool", "check", kind, str(DEPLOY / "prometheus" / name)]
        done = subprocess.run(check, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
