"""What is served, as Ollama's clients ask for it."""

from dataclasses import replace
from datetime import datetime

import httpx
import pytest

from snugvl.core.service import Health
from snugvl.server.settings import ServerSettings
from tests.server.fake import CAPABILITIES, LEDGER, FakeService
from tests.server.live import live


def test_every_name_is_listed_with_a_tag() -> None:
    with live(FakeService(), ServerSettings(names=("pocket", "qwen:2b"))) as base:
        models = httpx.get(f"{base}/api/tags").json()["models"]
    assert [model["name"] for model in models] == ["pocket:latest", "qwen:2b"]
    assert [model["model"] for model in models] == ["pocket:latest", "qwen:2b"]
    assert len({model["digest"] for model in models}) == 1
    assert len(models[0]["digest"]) == 64
    assert models[0]["size"] == 8000  # the measured text weights
    assert datetime.fromisoformat(models[0]["modified_at"]).tzinfo is not None


def test_what_runs_and_what_it_holds() -> None:
    with live(FakeService()) as base:
        (model,) = httpx.get(f"{base}/api/ps").json()["models"]
    assert model["name"] == "pocket:latest"
    assert model["size"] == model["size_vram"] == LEDGER.process_bytes
    assert model["context_length"] == 512


def test_on_a_cpu_nothing_is_in_vram(url: str) -> None:
    (model,) = httpx.get(f"{url}/api/ps").json()["models"]
    assert model["size"] > 0
    assert model["size_vram"] == 0


def test_nothing_runs_while_the_engine_starts() -> None:
    with live(FakeService(health=Health("starting", "loading"), capabilities=None)) as base:
        assert httpx.get(f"{base}/api/ps").json() == {"models": []}
        assert httpx.get(f"{base}/api/tags").status_code == 503


def test_show_tells_context_and_vision(url: str) -> None:
    for body in ({"model": "pocket"}, {"name": "pocket:latest"}, {"model": "pocket", "verbose": True}):
        shown = httpx.post(f"{url}/api/show", json=body).json()
        kind = shown["model_info"]["general.architecture"]
        assert shown["model_info"][f"{kind}.context_length"] == 4096
        assert "vision" in shown["capabilities"]
        assert shown["details"]["quantization_level"] == "F32"


def test_show_tells_whether_the_model_thinks() -> None:
    """Clients offer a switch for it then."""
    for thinks in (True, False):
        with live(FakeService(capabilities=replace(CAPABILITIES, thinks=thinks))) as base:
            shown = httpx.post(f"{base}/api/show", json={"model": "pocket"}).json()
            assert ("thinking" in shown["capabilities"]) == thinks


def test_show_tells_of_tools_where_clients_look(url: str) -> None:
    shown = httpx.post(f"{url}/api/show", json={"model": "pocket"}).json()
    # litellm's ollama_chat looks for the word in the template, others in the capabilities.
    assert ("tools" in shown["template"].lower()) == ("tools" in shown["capabilities"])
    assert "{{ .Prompt }}" in shown["template"]


def test_version_is_a_number(url: str) -> None:
    version = httpx.get(f"{url}/api/version").json()["version"]
    # As Open WebUI compares the versions of its connections, and VS Code.
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)


@pytest.mark.parametrize("name", ["pocket", "pocket:latest"])
def test_a_name_comes_back_as_it_was_asked_for(url: str, name: str) -> None:
    assert httpx.post(f"{url}/api/chat", json={"model": name}).json()["model"] == name
    body = {"model": name, "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    for path in ("chat/completions", "messages"):  # whoever finds names by /api/tags, such as Copilot
        assert httpx.post(f"{url}/v1/{path}", json=body).json()["model"] == name


def test_a_served_name_may_have_a_tag_of_its_own() -> None:
    with live(FakeService(), ServerSettings(names=("qwen:2b",))) as base:
        assert httpx.post(f"{base}/api/chat", json={"model": "qwen:2b"}).status_code == 200
        assert httpx.post(f"{base}/api/chat", json={"model": "qwen"}).status_code == 404
