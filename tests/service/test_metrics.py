"""/metrics of a real server: names that the documentation has, sums that hold, vLLM's names."""

import dataclasses
import hashlib
import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from prefixcache_service import Branch
from tests.service.conftest import RunningServer

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
GREEDY = {"temperature": 0.0, "ignore_eos": True}
SECRET = "a salt that nobody may see"


@pytest.fixture(scope="module")
def metered(tiny_config):
    """A server with all that can be asked of metrics, after some traffic of three tenants."""
    config = dataclasses.replace(tiny_config, metrics_tenants=2)
    running = RunningServer(config, metrics_compat="vllm").load()
    for salt in ("", SECRET, "a third"):
        with running.client(cache_salt=salt) as client:
            parent = client.generate(list(range(40)), max_tokens=6, keep_seconds=60, **GREEDY)
            client.generate(list(range(40)), max_tokens=3, n=2, **GREEDY)
            client.fork([Branch(parent.sequence_id)], max_tokens=3, **GREEDY)
    running.settle()
    yield running
    running.close()


def scrape(running):
    """Samples by name and labels."""
    page = httpx.get(f"http://127.0.0.1:{running.server.http_port}/metrics").text
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def family_names(samples):
    return {re.sub(r"_(bucket|count|sum|created)$", "", name) for name, *_ in samples}


def of(samples, name, label):
    """The series of a metric by one label."""
    return {dict(labels)[label]: v for (n, *labels), v in samples.items() if n == name}


def test_the_page_and_the_documentation_have_the_same_names(metered):
    tables = re.findall(r"^\| (`(?:prefixcache_|vllm:).*?) \|", DOCS.read_text(), re.MULTILINE)
    documented = {name for cell in tables for name in re.findall(r"`([\w:]+)", cell)}
    assert family_names(scrape(metered)) == documented


def test_label_values_are_those_of_the_documentation(metered):
    text, samples = DOCS.read_text(), scrape(metered)
    labels = {
        "prefixcache_prompt_tokens_total": "source",
        "prefixcache_missed_tokens_total": "cause",
        "prefixcache_blocks": "state",
        "prefixcache_sequences": "state",
        "prefixcache_requests_total": "outcome",
        "prefixcache_finished_sequences_total": "reason",
        "prefixcache_time_to_first_token_seconds_count": "hit_rate",
    }
    for name, label in labels.items():
        values = of(samples, name, label)
        assert values
        assert all(f"`{value}`" in text for value in values), name
    assert of(samples, "prefixcache_size_curve_blocks", "scale") == {
        "0.25": 128, "0.5": 256, "1": 512, "2": 1024, "4": 2048, "8": 4096
    }  # fmt: skip


def test_sums_of_a_page(metered):
    samples = scrape(metered)
    sources = of(samples, "prefixcache_prompt_tokens_total", "source")
    # Each tenant: a cold prompt, a warm one whose last token is run, a fork of 46 that runs one.
    assert sources == {"computed": 3 * (40 + 1 + 1), "cached": 3 * 39, "forked": 3 * 45}
    misses = of(samples, "prefixcache_missed_tokens_total", "cause")
    assert sum(misses.values()) == sources["computed"]
    assert misses == {
        "never_seen": 39, "other_namespace": 2 * 39, "evicted": 0, "bypassed": 0, "remainder": 9
    }  # fmt: skip
    assert sum(of(samples, "prefixcache_blocks", "state").values()) == 512
    assert samples["prefixcache_completion_tokens_total",] == 3 * (6 + 2 * 3 + 3)
    assert of(samples, "prefixcache_finished_sequences_total", "reason") == {
        "stop": 0, "length": 12, "abort": 0
    }  # fmt: skip
    curve = of(samples, "prefixcache_size_curve_hit_ratio", "scale")
    assert curve["1"] == pytest.approx(39 / (39 + 42))


def test_histograms_count_each_request_and_token_once(metered):
    samples = scrape(metered)
    bands = of(samples, "prefixcache_time_to_first_token_seconds_count", "hit_rate")
    assert bands == {"0": 3, "0-50": 0, "50-90": 0, "90-100": 6}
    for name in ("queue_time", "prefill_time", "request_duration"):
        assert samples[f"prefixcache_{name}_seconds_count",] == 9
        infinite = samples[f"prefixcache_{name}_seconds_bucket", ("le", "+Inf")]
        assert infinite == 9
    assert samples["prefixcache_time_between_tokens_seconds_count",] == 3 * (5 + 2 * 2 + 2)
    buckets = of(samples, "prefixcache_step_duration_seconds_bucket", "le")
    assert list(buckets.values()) == sorted(buckets.values())


def test_tenants_are_bounded_and_their_salts_stay_secret(metered):
    samples = scrape(metered)
    tokens = of(samples, "prefixcache_tenant_completion_tokens_total", "tenant")
    labels = [hashlib.sha256(salt.encode()).hexdigest()[:12] for salt in ("", SECRET)]
    assert tokens == {labels[0]: 15, labels[1]: 15, "other": 15}
    computed = {
        (dict(labels)["tenant"], dict(labels)["source"]): value
        for (name, *labels), value in samples.items()
        if name == "prefixcache_tenant_prompt_tokens_total"
    }
    assert computed["other", "cached"] == 39
    assert SECRET not in httpx.get(f"http://127.0.0.1:{metered.server.http_port}/metrics").text


def test_names_of_vllm_have_its_labels_and_units(metered):
    samples = scrape(metered)
    labels = (("engine", "0"), ("model_name", metered.engine.model_name))
    assert samples["vllm:prefix_cache_queries_total", *labels] == 3 * (39 + 42)
    assert samples["vllm:prefix_cache_hits_total", *labels] == 3 * 39
    assert samples["vllm:prompt_tokens_total", *labels] == 3 * (40 + 40 + 46)
    assert samples["vllm:generation_tokens_total", *labels] == 45
    assert samples["vllm:num_requests_running", *labels] == 0
    assert samples["vllm:kv_cache_usage_perc", *labels] == 0
    assert samples["vllm:time_to_first_token_seconds_count", *labels] == 9
    gaps = samples["prefixcache_time_between_tokens_seconds_count",]
    assert samples["vllm:inter_token_latency_seconds_count", *labels] == gaps == 45 - 12
    assert samples["vllm:time_per_output_token_seconds_count", *labels] == gaps
    assert samples["vllm:e2e_request_latency_seconds_count", *labels] == 9
    ended = of(samples, "vllm:request_success_total", "finished_reason")
    assert ended == {"stop": 0, "length": 12, "abort": 0}


def test_without_being_asked_neither_tenants_nor_other_names_are_shown(server, client):
    client.generate(list(range(20)), max_tokens=2, **GREEDY)
    samples = scrape(server)
    assert all(name.startswith("prefixcache_") for name, *_ in samples)
    assert not any("tenant" in name for name, *_ in samples)


def test_stats_of_the_client_are_those_of_the_page(metered):
    with metered.client() as client:
        stats = client.stats()
    samples = scrape(metered)
    assert samples["prefixcache_block_size_bytes",] == stats.bytes_per_block > 0
    assert of(samples, "prefixcache_missed_tokens_total", "cause") == stats.misses
    by_name = {(h.name, *sorted(h.labels.items())): h for h in stats.histograms}
    for (name, *labels), histogram in by_name.items():
        assert samples[f"prefixcache_{name}_count", *labels] == sum(histogram.counts)
    assert len(stats.size_curve) == 6
    assert stats.hit_rate == pytest.approx(39 / (39 + 42))
    assert {tenant.cached_tokens for tenant in stats.tenants} == {39}
