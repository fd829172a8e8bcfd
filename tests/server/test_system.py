"""Routes about the server itself."""

from dataclasses import replace
from datetime import datetime

import httpx
import pytest

from snugvl.checkpoint.read import facts_of
from snugvl.core.service import Health
from snugvl.hardware.describe import describe
from snugvl.planner.plan import allocation_of
from snugvl.planner.solve import Candidate, require, solve
from snugvl.planner.wishes import Wishes
from snugvl.server.settings import ServerSettings
from snugvl.version import __version__
from tests.server.fake import CAPABILITIES, FakeService
from tests.server.live import live


def test_ready(url: str) -> None:
    for path in ("/health", "/health/ready", "/health/live"):
        answer = httpx.get(url + path)
        assert answer.status_code == 200
        assert answer.json()["ready"] is True
        assert answer.json()["state"] == "ready"
        assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("state", ["starting", "restarting", "draining", "failed"])
def test_live_but_not_ready(state: str) -> None:
    health = Health(state, "loading weights", progress=0.25, restarts=2, retry_after_s=2.4)  # type: ignore[arg-type]
    with live(FakeService(health=health)) as base:
        answer = httpx.get(base + "/health")
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "3"
        assert answer.json() == {
            "ready": False,
            "state": state,
            "detail": "loading weights",
            "progress": 0.25,
            "restarts": 2,
            "retry_after_s": 2.4,
            "replaced": [],
        }
        assert httpx.get(base + "/health/live").status_code == 200


def test_kernels_that_arent_used_are_said() -> None:
    said = (
        "the kernel gemm isn't used on this GPU (not finite): slower ones or plain torch compute the same",
    )
    with live(FakeService(capabilities=replace(CAPABILITIES, replaced=said))) as base:
        for path in ("/health", "/health/live"):
            assert httpx.get(base + path).json()["replaced"] == list(said)
        assert httpx.get(base + "/memory").json()["health"]["replaced"] == list(said)


def test_version_and_models(url: str) -> None:
    assert httpx.get(url + "/version").json() == {"version": __version__}
    listed = httpx.get(url + "/v1/models").json()
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert card["id"] == "pocket"
    assert card["max_model_len"] > 0
    assert card["tasks"] == ["ask", "caption", "scene", "detect"]
    assert httpx.get(url + "/v1/models/pocket").json() == card
    lost = httpx.get(url + "/v1/models/gpt-9")
    assert lost.status_code == 404
    assert lost.json()["error"]["code"] == "model_not_found"
    assert "'pocket'" in lost.json()["error"]["message"]


def test_anthropics_clients_read_the_models(url: str) -> None:
    listed = httpx.get(url + "/v1/models").json()
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("pocket", "pocket", False)
    (card,) = listed["data"]
    assert (card["type"], card["display_name"]) == ("model", "pocket")
    assert datetime.fromisoformat(card["created_at"]).timestamp() == card["created"]
    assert card["max_input_tokens"] == card["max_model_len"]


def test_anthropics_clients_read_errors_of_shared_paths(url: str) -> None:
    """Their header says who asks, where the path is OpenAI's, too."""
    for path in ("/v1/models/nobody", "/v1/files"):
        answer = httpx.get(url + path, headers={"Anthropic-Version": "2023-06-01"})
        assert answer.status_code == 404
        assert answer.json()["error"]["type"] == "not_found_error"
        assert answer.json()["request_id"] == answer.headers["request-id"]
        assert "code" in httpx.get(url + path).json()["error"]


@pytest.mark.parametrize("slashes", ["/{}", "{}/", "//{}//"])
def test_slashes_too_many_make_no_difference(url: str, slashes: str) -> None:
    """Of a base URL that ends with one; not all clients follow a redirect."""
    for path in ("/v1/models", "/v1/models/pocket", "/api/tags", "/version", "/"):
        assert httpx.get(url + slashes.format(path)).text == httpx.get(url + path).text
    for path in ("/v1/chat/completions", "/v1//chat/completions", "/v1/messages", "/api/chat"):
        answer = httpx.post(url + slashes.format(path), json={"model": "pocket", "messages": 5})
        assert (answer.status_code, "messages" in answer.text) == (400, True), answer.text


@pytest.mark.parametrize("before", ["/openai/v1", "/openai/deployments/pocket", "/v1/deployments/a%2Fb"])
def test_paths_of_azures_clients_are_openais(url: str, before: str) -> None:
    body = {"model": "pocket", "messages": 5}
    answer = httpx.post(f"{url}{before}/chat/completions?api-version=2024-10-21", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert httpx.get(f"{url}{before}/models").json()["data"][0]["id"] == "pocket"
    assert httpx.get(f"{url}{before}").status_code == 404


def test_several_names_and_names_with_a_slash() -> None:
    settings = ServerSettings(names=("Qwen/Qwen3-VL", "gpt-4o"))
    with live(FakeService(), settings) as base:
        names = [card["id"] for card in httpx.get(base + "/v1/models").json()["data"]]
        assert names == ["Qwen/Qwen3-VL", "gpt-4o"]
        assert httpx.get(base + "/v1/models/Qwen/Qwen3-VL").json()["root"] == "fake"


def test_models_are_named_before_they_are_loaded() -> None:
    starting = FakeService(health=Health("starting", "loading"), capabilities=None)
    with live(starting) as base:
        (card,) = httpx.get(base + "/v1/models").json()["data"]
        assert card["root"] is None
        assert card["tasks"] is None
        memory = httpx.get(base + "/memory").json()
        assert memory["ledger"] is None
        assert memory["health"]["state"] == "starting"


def test_memory_has_the_time_line_of_the_start() -> None:
    ready = Health("ready", "fake is ready", timeline=(("process launched", 1.5), ("ready", 4.25)))
    with live(FakeService(health=ready)) as base:
        memory = httpx.get(base + "/memory").json()
    assert memory["start"] == [{"step": "process launched", "at": 1.5}, {"step": "ready", "at": 4.25}]


def test_memory_has_planned_beside_measured() -> None:
    with live(FakeService()) as base:
        memory = httpx.get(base + "/memory").json()
    assert memory["ledger"]["rows"][0] == {
        "name": "KV cache",
        "planned_bytes": 4096,
        "measured_bytes": 4096,
        "used_bytes": 1024,
        "kind": "KV cache",
    }
    assert memory["ledger"]["others_bytes"] == 30_000
    assert memory["load"]["num_blocks"] == 8


def test_memory_has_the_plan_that_runs() -> None:
    """The settings that a plan prints, its components, and what has changed since."""
    facts = facts_of("pocket", offline=True)
    chosen = require(solve([Candidate(facts)], describe("rtx-5060"), Wishes(backend="native")))
    plan = replace(allocation_of(chosen), changed="planned for more")
    service = FakeService()
    assert service.capabilities is not None
    service.capabilities = replace(service.capabilities, plan=plan.running)
    with live(service) as base:
        told = httpx.get(base + "/memory").json()["plan"]
    assert told["settings"] == chosen.settings._asdict()
    assert told["total_bytes"] == chosen.footprint.total_bytes <= told["usable_bytes"]
    assert {part["name"]: part["bytes"] for part in told["components"]}["KV cache"] > 0
    assert told["changed"] == "planned for more"
    assert told["speed"].startswith("about ")
    assert " tokens/s (" in told["speed"]
    with live(FakeService()) as base:
        assert httpx.get(base + "/memory").json()["plan"] is None


def test_tokens_there_and_back(url: str) -> None:
    there = httpx.post(url + "/tokenize", json={"prompt": "a red circle"}).json()
    assert there["count"] == len(there["tokens"]) > 0
    assert there["max_model_len"] > 0
    back = httpx.post(url + "/detokenize", json={"tokens": there["tokens"]}).json()
    assert back == {"prompt": "a red circle"}
    floats = [float(token) for token in there["tokens"]]  # JSON has one kind of number
    assert httpx.post(url + "/detokenize", json={"tokens": floats}).json() == back


def test_tokens_of_a_conversation_with_a_picture(url: str, data_url: str) -> None:
    content = [{"type": "image_url", "image_url": {"url": data_url}}, {"type": "text", "text": "hi"}]
    found = httpx.post(url + "/tokenize", json={"messages": [{"role": "user", "content": content}]}).json()
    assert found["image_tokens"] > 0
    assert found["count"] > found["image_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}, "return_token_strs"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": ["1"]}, "tokens[0]"),
        ("/detokenize", {"tokens": "1"}, "tokens"),
    ],
)
def test_wrong_tokens(url: str, path: str, body: object, param: str) -> None:
    answer = httpx.post(url + path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_a_token_that_the_model_does_not_have(url: str) -> None:
    assert httpx.post(url + "/detokenize", json={"tokens": [2**31 - 1]}).status_code < 500


def test_another_model_is_refused(url: str) -> None:
    answer = httpx.post(url + "/tokenize", json={"prompt": "a", "model": "gpt-9"})
    assert answer.status_code == 404
    assert answer.json()["error"]["param"] == "model"
