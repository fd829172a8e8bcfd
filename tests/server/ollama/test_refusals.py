"""What is refused, each with its exact answer in Ollama's form."""

from typing import Any

import httpx
import pytest

USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"model": None}, "model must be a string, not null"),
        ({"model": ""}, "model must not be empty"),
        (
            {"options": {"num_predict": 0}},
            "options.num_predict is 0, which leaves no answer; -1 is what fits",
        ),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs: true"),
        ({"messages": [USER, {"role": "assistant", "content": "A"}]},
         "the last message is the assistant's: continuing it is not supported; end with the user's"),
        ({"messages": [{**USER, "images": ["https://example.org/a.png"]}]},
         "messages[0].images[0] is a URL; send the picture itself, in base64"),
        ({"messages": [{**USER, "images": ["a.webp"]}]},
         "the image at messages[0].images[0] is not valid base64; send the bytes of its file, encoded in "
         "base64 (in a data URL they follow the comma)"),
        ({"messages": [{**USER, "tool_calls": [{"function": {"name": "add"}}]}]},
         "messages[0]: only the assistant makes calls"),
    ],
)  # fmt: skip
def test_chat(url: str, body: dict[str, Any], message: str) -> None:
    response = httpx.post(f"{url}/api/chat", json={"model": "pocket", "messages": [USER], **body})
    assert (response.status_code, response.json()) == (400, {"error": message})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"context": [1, 2]}, "context is not supported: send the conversation to /api/chat"),
        (
            {"raw": True, "system": "Be kind."},
            "system can't be combined with raw: it needs the chat template",
        ),
        ({"raw": True, "images": ["aaaa"]}, "images can't be combined with raw: it needs the chat template"),
    ],
)
def test_generate(url: str, body: dict[str, Any], message: str) -> None:
    response = httpx.post(f"{url}/api/generate", json={"model": "pocket", "prompt": "Hi", **body})
    assert (response.status_code, response.json()) == (400, {"error": message})


@pytest.mark.parametrize("keep_alive", ["5m", "1h30m", -1, 300, 0.5, None, 0, "0s", "", "5 minutes", {}])
def test_keep_alive_is_accepted(url: str, keep_alive: object) -> None:
    body = {"model": "pocket", "keep_alive": keep_alive}
    assert httpx.post(f"{url}/api/generate", json=body).status_code == 200


@pytest.mark.parametrize("image", ["!!!", "aGVsbG8=", ""])
def test_what_is_no_picture(url: str, image: str) -> None:
    body = {"model": "pocket", "prompt": "Hi", "images": [image]}
    response = httpx.post(f"{url}/api/generate", json=body)
    assert response.status_code == 400
    assert set(response.json()) == {"error"}


@pytest.mark.parametrize("path", ["chat", "generate", "show"])
def test_another_model(url: str, path: str) -> None:
    response = httpx.post(f"{url}/api/{path}", json={"model": "llava:latest"})
    assert response.status_code == 404
    assert response.json() == {"error": "the model 'llava:latest' is not served here; use 'pocket'"}


def test_show_needs_a_name(url: str) -> None:
    response = httpx.post(f"{url}/api/show", json={})
    assert (response.status_code, response.json()) == (400, {"error": "model is missing"})


@pytest.mark.parametrize(
    ("method", "path", "instead"),
    [
        ("POST", "push", "there is no registry to push to"),
        ("POST", "create", "serve a checkpoint's folder with `snugvl serve`"),
        ("POST", "copy", "give a model several names with `snugvl serve --served-model-name`"),
        ("DELETE", "delete", "delete downloaded models with `snugvl rm`"),
        ("POST", "embed", "a vision-language model gives no embeddings"),
        ("POST", "embeddings", "a vision-language model gives no embeddings"),
    ],
)
def test_what_only_ollama_does(url: str, method: str, path: str, instead: str) -> None:
    response = httpx.request(method, f"{url}/api/{path}", json={"model": "pocket"})
    assert (response.status_code, response.json()) == (
        404,
        {"error": f"there is no {method} /api/{path}: {instead}"},
    )


@pytest.mark.parametrize("kind", [{}, {"content-type": "application/json"}])
def test_a_layer_of_a_model_is_not_read_as_json(url: str, kind: dict[str, str]) -> None:
    """Ollama's clients send gigabytes of it, without a type or under that of everything else."""
    content = iter([b"\x89PNG\r\n", b"\xff" * 100])
    response = httpx.post(f"{url}/api/blobs/sha256:0", content=content, headers=kind)
    assert response.status_code == 404
    assert "`snugvl serve`" in response.json()["error"]


def test_a_path_that_nobody_has(url: str) -> None:
    response = httpx.post(f"{url}/api/nonsense", json={})
    assert response.status_code == 404
    assert set(response.json()) == {"error"}
