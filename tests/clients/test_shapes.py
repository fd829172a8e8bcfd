"""Requests of clients that are no libraries, as their sources build them: they are answered."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.shapes import SHAPES, Shape
from tests.patience import PATIENCE_S

BY_NAME = {shape.client: shape for shape in SHAPES}


def post(url: str, shape: Shape, data_url: str) -> httpx.Response:
    """The answer to a shape, whose picture is put in."""
    body = (
        json.dumps(shape.body).replace("PICTURE_URL", data_url).replace("PICTURE", data_url.partition(",")[2])
    )
    return httpx.post(
        f"{url}{shape.route}", content=body, headers={"content-type": "application/json"}, timeout=PATIENCE_S
    )


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The JSON of an answer: one object, lines of it, or server-sent events."""
    if "stream" in answer.headers["content-type"]:
        lines = [
            line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")
        ]
        return [json.loads(line) for line in lines if line != "[DONE]"]
    if "ndjson" in answer.headers["content-type"]:
        return [json.loads(line) for line in answer.text.splitlines()]
    return [answer.json()]


@pytest.mark.parametrize("name", BY_NAME)
def test_a_clients_request_is_answered(name: str, url: str, data_url: str) -> None:
    answer = post(url, BY_NAME[name], data_url)
    assert answer.status_code == 200, answer.text
    got = events(answer)
    assert got
    assert not [each for each in got if each.get("error")], got


@pytest.mark.parametrize("name", ["guidellm, chat", "guidellm, completions"])
def test_guidellm_counts_the_tokens_of_every_piece(name: str, url: str, data_url: str) -> None:
    got = events(post(url, BY_NAME[name], data_url))
    counts = [each["usage"]["completion_tokens"] for each in got if each.get("usage")]
    assert len(counts) == len(got)
    assert counts == sorted(counts)
    assert counts[-1] == 8  # ignore_eos holds, too


def test_lm_eval_reads_the_logprobs_of_the_prompt(url: str, data_url: str) -> None:
    (answer,) = events(post(url, BY_NAME["lm-eval, loglikelihood"], data_url))
    (choice,) = answer["choices"]
    logprobs, top = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
    assert len(logprobs) == len(top) == answer["usage"]["prompt_tokens"] + 1
    assert logprobs[0] is None  # there is nothing before the first token
    for logprob, alternatives in zip(logprobs[1:], top[1:], strict=True):
        assert logprob <= max(alternatives.values()) <= 0
    assert choice["text"].startswith("A red circle and a blue square")


def test_copilot_finds_the_model(url: str) -> None:
    """As its Ollama provider looks for models, before it speaks to /v1/chat/completions."""
    version = httpx.get(f"{url}/api/version", timeout=PATIENCE_S).json()["version"]
    parts = [int("".join(digit for digit in part if digit.isdigit()) or 0) for part in version.split(".")[:3]]
    assert parts >= [0, 6, 4], version
    (model,) = httpx.get(f"{url}/api/tags", timeout=PATIENCE_S).json()["models"]
    told = httpx.post(f"{url}/api/show", json={"model": model["model"]}, timeout=PATIENCE_S).json()
    info = told["model_info"]
    assert info[f"{info['general.architecture']}.context_length"] > 0
    assert info["general.basename"]
    assert "vision" in told["capabilities"]
    assert "tools" in told["capabilities"]


def test_frigate_finds_each_picture_where_its_marker_stands(url: str, data_url: str) -> None:
    """By Ollama's rule the next picture stands where "[img]" does, and those without a marker come first."""
    image = data_url.partition(",")[2]

    def counted(content: str, images: int) -> dict[str, Any]:
        message = {"role": "user", "content": content, "images": [image] * images}
        body = {"model": "pocket", "messages": [message], "stream": False, "options": {"num_predict": 1}}
        answer = httpx.post(f"{url}/api/chat", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    marked, plain = counted("a\n[img]\nb\n[img]\nc", 2), counted("a\n\nb\n\nc", 2)
    assert abs(marked["prompt_eval_count"] - plain["prompt_eval_count"]) <= 4, "the markers are no text"


def test_zed_reads_the_models(url: str) -> None:
    """Its types have no field of these left out."""
    (model,) = httpx.get(f"{url}/api/tags", timeout=PATIENCE_S).json()["models"]
    assert {"name", "modified_at", "size", "digest", "details"} <= model.keys()
    assert {"format", "family", "parameter_size", "quantization_level"} <= model["details"].keys()
    assert all(isinstance(value, str) for key, value in model["details"].items() if key != "families")


def test_frigate_reads_the_context_of_the_model(url: str) -> None:
    (model,) = httpx.get(f"{url}/v1/models", timeout=PATIENCE_S).json()["data"][:1]
    assert model["max_model_len"] > 0


def test_continue_reads_the_context_of_the_model(url: str) -> None:
    """It takes `num_ctx` out of the parameters, one to a line, and asks by the old name of the field."""
    told = httpx.post(f"{url}/api/show", json={"name": "pocket"}, timeout=PATIENCE_S).json()
    lines = [line.split() for line in told["parameters"].splitlines()]
    assert {words[0]: int(words[1]) for words in lines if words[0] == "num_ctx"}["num_ctx"] > 0


def test_every_shape_names_its_source() -> None:
    assert len(BY_NAME) == len(SHAPES)
    for shape in SHAPES:
        repository, path, *_ = shape.source.split()
        assert repository, shape.client
        assert Path(shape.source.split()[-2 if "/" in repository else -1]).suffix in (
            ".py",
            ".ts",
            ".rs",
            ".js",
            ".go",
        ), path
