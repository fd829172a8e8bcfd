"""What /metrics shows."""

import re
from dataclasses import replace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from snugvl.core.service import Health, Load
from snugvl.errors import QueueFull
from snugvl.server import metrics
from snugvl.server.settings import ServerSettings
from tests.patience import PATIENCE_S
from tests.server.fake import FakeService, Script
from tests.server.live import live

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def read(base: str, **headers: str) -> dict[str, float]:
    """Sample and labels, as written, to its value."""
    answer = httpx.get(base + "/metrics", headers=headers)
    assert answer.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def test_requests_tokens_and_times() -> None:
    with live(FakeService()) as base:
        for stream in (True, False):
            httpx.post(base + "/v1/chat/completions", json={**CHAT, "stream": stream})
        found = read(base)
    assert found["snugvl_requests_total{method=POST,path=/v1/chat/completions,status=200}"] == 2
    assert found["snugvl_request_seconds_count{path=/v1/chat/completions}"] == 2
    assert found["snugvl_tokens_total{kind=prompt}"] == 14
    assert found["snugvl_tokens_total{kind=generated}"] == 4
    assert found["snugvl_tokens_total{kind=image}"] == 4
    assert found["snugvl_time_to_first_token_seconds_count{}"] == 2
    assert found["snugvl_inter_token_seconds_count{}"] == 4
    assert found["snugvl_finished_total{reason=stop}"] == 2


def test_paths_are_those_of_routes_whatever_becomes_of_a_request() -> None:
    with live(FakeService(), ServerSettings(max_body_bytes=1000)) as base:
        httpx.head(base + "/health")
        httpx.head(base + "/v1/models/nonsense")
        as_json = {"content-type": "application/json"}
        httpx.post(base + "/v1/chat/completions", content=b"{bad", headers=as_json)
        httpx.post(base + "/v1/messages", content=b" " * 2000, headers=as_json)
        httpx.post(base + "/api/chat", json={}, headers={"origin": "https://foreign.example"})
        httpx.get(base + "/no/such/path")
        found = read(base)
    counted = {key.removeprefix("snugvl_requests_total") for key in found if "requests_total{" in key}
    assert counted == {
        "{method=HEAD,path=/health,status=200}",
        "{method=HEAD,path=/v1/models/{model:path},status=404}",
        "{method=POST,path=/v1/chat/completions,status=400}",
        "{method=POST,path=/v1/messages,status=413}",
        "{method=POST,path=/api/chat,status=403}",
        "{method=GET,path=other,status=404}",
    }


def test_refusals_by_cause() -> None:
    service = FakeService(script=Script(refusal=QueueFull("full")))
    with live(service, ServerSettings(max_body_bytes=1000)) as base:
        httpx.post(base + "/v1/chat/completions", json=CHAT)
        httpx.post(base + "/v1/chat/completions", json={**CHAT, "user": "x" * 2000})
        httpx.post(base + "/tokenize", json={"nonsense": 1})
        httpx.get(base + "/v1/models/nonsense")
        service.script = Script(error=RuntimeError())
        httpx.post(base + "/v1/chat/completions", json={**CHAT, "stream": True})
        found = read(base)
    causes = {key: value for key, value in found.items() if key.startswith("snugvl_refusals_total")}
    assert causes == {
        "snugvl_refusals_total{code=queue_full,status=429}": 1,
        "snugvl_refusals_total{code=request_too_large,status=413}": 1,
        "snugvl_refusals_total{code=invalid_value,status=400}": 1,
        "snugvl_refusals_total{code=model_not_found,status=404}": 1,
        "snugvl_refusals_total{code=internal_error,status=500}": 1,
    }


def test_engine_memory_and_state() -> None:
    with live(FakeService(health=Health("restarting", "again", restarts=3))) as base:
        found = read(base)
    assert found["snugvl_engine_state{state=restarting}"] == 1
    assert found["snugvl_engine_state{state=ready}"] == 0
    assert found["snugvl_engine_restarts_total{}"] == 3
    assert found["snugvl_kv_blocks{}"] == 8
    assert found["snugvl_kv_blocks_planned{}"] == 8
    assert found["snugvl_kv_blocks_used{}"] == 0
    assert found["snugvl_running{}"] == 0
    assert found["snugvl_waiting{}"] == 0
    assert found["snugvl_memory_bytes{component=KV cache,kind=planned}"] == 4096
    assert found["snugvl_memory_bytes{component=text weights,kind=measured}"] == 8000
    assert found["snugvl_device_bytes{kind=free}"] == 50_000
    assert "snugvl_prefix_hit_tokens_total{}" in found


def test_a_cache_that_was_lent_and_pictures_found_encoded() -> None:
    load = Load(num_blocks=6, planned_blocks=8, encoder_queries=5, encoder_hits=3, shortages=2)
    load = replace(load, kernel_compilations=4, graph_captures=7, drafted_tokens=9, accepted_tokens=6)
    load = replace(load, forced_tokens=5)
    load = replace(load, draft_method="mtp")
    labels = {metric.name: metric.samples[0].labels for metric in metrics._load(load)}
    assert labels["snugvl_accepted_tokens"] == {"method": "mtp"}
    found = {metric.name: metric.samples[0].value for metric in metrics._load(load)}
    assert (found["snugvl_kv_blocks"], found["snugvl_kv_blocks_planned"]) == (6, 8)
    assert (found["snugvl_encoder_queries"], found["snugvl_encoder_hits"]) == (5, 3)
    assert found["snugvl_engine_shortages"] == 2
    assert (found["snugvl_drafted_tokens"], found["snugvl_accepted_tokens"]) == (9, 6)
    assert found["snugvl_forced_tokens"] == 5
    assert (found["snugvl_kernel_compilations"], found["snugvl_graph_captures"]) == (4, 7)


def test_before_the_engine_is_there() -> None:
    with live(FakeService(health=Health("starting", "loading"), capabilities=None)) as base:
        assert read(base)["snugvl_engine_state{state=starting}"] == 1


def test_no_label_holds_what_a_user_sent() -> None:
    with live(FakeService(), ServerSettings(api_keys=("secret-key",))) as base:
        key = {"x-api-key": "secret-key"}
        httpx.get(base + "/hostile-path", headers=key)
        httpx.request("HOSTILE", base + "/version", headers=key)
        httpx.get(base + "/v1/models/hostile-name", headers=key)
        httpx.post(base + "/v1/chat/completions", json={**CHAT, "model": "hostile-model"}, headers=key)
        text = httpx.get(base + "/metrics", headers=key).text
    assert "hostile" not in text.lower()
    assert "secret-key" not in text
    assert re.search(r'path="other"', text)


@pytest.mark.slow
def test_a_real_engine_counts(url: str) -> None:
    before = read(url).get("snugvl_tokens_total{kind=prompt}", 0)
    httpx.post(url + "/v1/chat/completions", json={**CHAT, "max_tokens": 3}, timeout=PATIENCE_S)
    after = read(url)
    assert after["snugvl_tokens_total{kind=prompt}"] > before
    assert after["snugvl_kv_blocks{}"] > 0
