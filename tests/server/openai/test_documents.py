"""What OCR and document clients send: MinerU's, docling's and olmOCR's requests are answered as they are."""

from typing import Any

import httpx
import pytest
from openai import OpenAI

from snugvl.core.messages import Picture
from tests.server.openai.scripted import Scripted
from tests.server.openai.test_chat import HI


def page(url: str, **more: Any) -> dict[str, Any]:
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Read it."}]
    return {"messages": [{"role": "user", "content": content}], **more}


def picture(scripted: Scripted) -> Picture:
    found = scripted.last.messages[0].content[0]
    assert isinstance(found, Picture)
    return found


def test_mineru_and_olmocr(http: httpx.Client, scripted: Scripted, data_urls: list[str]) -> None:
    sent = {
        "temperature": 0.0, "top_p": 0.01, "top_k": 1, "presence_penalty": 1.0, "frequency_penalty": 0.05,
        "repetition_penalty": 1.0, "max_completion_tokens": 8000, "skip_special_tokens": False,
        "vllm_xargs": {"no_repeat_ngram_size": 100, "debug": False},
        "mm_processor_kwargs": {"min_pixels": 784, "max_pixels": 1024, "use_fast": True, "other": 1},
    }  # fmt: skip
    answer = http.post("/chat/completions", json=page(data_urls[0], **sent))
    assert answer.status_code == 200, answer.text
    assert scripted.last.sampling.special
    assert scripted.last.sampling.no_repeat_ngram_size == 100
    assert picture(scripted).max_pixels == 1024
    warnings = set(answer.headers["snugvl-warning"].split("; "))
    assert warnings == {
        "lowered max_tokens from 8,000 to what the context leaves",
        "ignored mm_processor_kwargs.min_pixels",
        "ignored mm_processor_kwargs.use_fast",
        "ignored mm_processor_kwargs.other",
    }


@pytest.mark.parametrize(
    ("sent", "size", "window"),
    [
        ({"no_repeat_ngram_size": 3}, 3, 0),
        ({"vllm_xargs": {"no_repeat_ngram_size": 35}}, 35, 0),
        ({"vllm_xargs": {"ngram_size": 30, "window_size": 90, "whitelist_token_ids": None}}, 30, 90),
        ({"no_repeat_ngram_size": 0, "vllm_xargs": {"ngram_size": 30}}, 0, 0),
        ({"no_repeat_ngram_size": None, "vllm_xargs": None}, 0, 0),
    ],
)
@pytest.mark.parametrize("path", ["/chat/completions", "/completions"])
def test_the_window_of_repetition(
    http: httpx.Client, scripted: Scripted, path: str, sent: dict[str, Any], size: int, window: int
) -> None:
    body = {"messages": HI} if path.startswith("/chat") else {"prompt": "hi"}
    answer = http.post(path, json=body | sent)
    assert answer.status_code == 200, answer.text
    sampling = scripted.last.sampling
    assert (sampling.no_repeat_ngram_size, sampling.no_repeat_window) == (size, window)
    refused = http.post(path, json=body | {"vllm_xargs": {"ngram_size": 257}})
    assert refused.json()["error"]["param"] == "vllm_xargs.ngram_size"


@pytest.mark.parametrize("kwargs", [None, {}, {"min_pixels": None}])
def test_nothing_asked_is_nothing_told(
    http: httpx.Client, scripted: Scripted, data_urls: list[str], kwargs: Any
) -> None:
    sent = page(data_urls[0], mm_processor_kwargs=kwargs, skip_special_tokens=True, vllm_xargs={})
    answer = http.post("/chat/completions", json=sent)
    assert answer.status_code == 200, answer.text
    assert "snugvl-warning" not in answer.headers
    assert picture(scripted).max_pixels is None
    assert not scripted.last.sampling.special


def test_the_lower_limit_of_pixels_holds(
    http: httpx.Client, scripted: Scripted, data_urls: list[str]
) -> None:
    for most, holds in ((1024, 1024), (10**9, 512 * 512)):
        body = page(data_urls[0], mm_processor_kwargs={"max_pixels": most})
        body["messages"][0]["content"][0]["image_url"]["detail"] = "low"
        assert http.post("/chat/completions", json=body).status_code == 200
        assert picture(scripted).max_pixels == holds


def test_too_few_pixels_are_refused_by_name(client: OpenAI, data_url: str) -> None:
    with pytest.raises(Exception, match="max_pixels is 1") as refused:
        client.chat.completions.create(
            model="pocket", **page(data_url), extra_body={"mm_processor_kwargs": {"max_pixels": 1}}
        )
    assert refused.value.param == "mm_processor_kwargs.max_pixels"  # type: ignore[attr-defined]


def test_control_tokens_are_text_where_they_are_asked_for(client: OpenAI, url: str) -> None:
    asked = {"prompt": "<|vision_end|>", "add_special_tokens": False}
    (token,) = httpx.post(url + "/tokenize", json=asked).json()["tokens"]
    said = {}
    for skip in (True, False):
        answer = client.chat.completions.create(
            model="pocket", messages=HI, max_tokens=2, logit_bias={str(token): 100},
            extra_body={"skip_special_tokens": skip},
        )  # fmt: skip
        said[skip] = answer.choices[0].message.content
    assert said == {True: "", False: "<|vision_end|>" * 2}


@pytest.mark.parametrize("inside", [False, True], ids=["part", "image_url"])
def test_a_pictures_own_limits_of_pixels(
    http: httpx.Client, scripted: Scripted, data_urls: list[str], inside: bool
) -> None:
    """Qwen's own clients write them beside the picture."""
    for own, whole, holds in ((1024, None, 1024), (2048, 1024, 1024), (1024, 2048, 1024)):
        body = page(data_urls[0], **({"mm_processor_kwargs": {"max_pixels": whole}} if whole else {}))
        part = body["messages"][0]["content"][0]
        (part["image_url"] if inside else part).update(max_pixels=own, min_pixels=784)
        answer = http.post("/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert picture(scripted).max_pixels == holds
        assert answer.headers["snugvl-warning"] == "ignored messages[0].content[0].min_pixels"


def test_too_few_pixels_of_one_picture_are_its_messages_fault(client: OpenAI, data_url: str) -> None:
    body = page(data_url)
    body["messages"][0]["content"][0]["max_pixels"] = 1
    with pytest.raises(Exception, match="max_pixels is 1") as refused:
        client.chat.completions.create(model="pocket", **body)
    assert refused.value.param == "messages"  # type: ignore[attr-defined]
