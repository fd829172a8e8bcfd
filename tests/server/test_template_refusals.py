"""A chat template that fails: its request's fault or the model's, alike in every protocol."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from snugvl.backends.native.backend import NativeBackend
from snugvl.inputs.chat import ChatTemplate
from snugvl.inputs.prompt import Processor
from tests.patience import PATIENCE_S

HI = [{"role": "user", "content": "bad"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/responses": {"input": HI},
    "/v1/messages": {"model": "pocket", "max_tokens": 1, "messages": HI},
    "/v1/messages/count_tokens": {"model": "pocket", "messages": HI},
    "/api/chat": {"model": "pocket", "messages": HI},
    "/api/generate": {"model": "pocket", "prompt": "bad"},
    "/v1/vision/ask": {"question": "bad"},
    "/tokenize": {"messages": HI},
}
BAD = "{% if 'bad' in messages[0].content | string %}"
REFUSED = (BAD + "{{ raise_exception('roles must alternate') }}{% endif %}", "refuses this: roles must")
FAILED = (
    BAD + "{{ 1 / 0 }}{% endif %}",
    "fails with ZeroDivisionError: division by zero on this conversation",
)
LARGE = (BAD + "{{ 'x' * 10**10 }}{% endif %}", "asks for a value of 40,000,000,000 bytes")
WRONG = ("{{ missing.field }}", "even on a simple question; use another checkpoint")


@pytest.fixture
def templated(pocket: NativeBackend) -> Iterator[Processor]:
    """What makes prompts of the server's model; its template is put back."""
    prompts = pocket._prompts
    assert isinstance(prompts, Processor)
    before = prompts.template
    yield prompts
    prompts.template = before


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("template", "status"),
    [(REFUSED, 400), (FAILED, 400), (LARGE, 400), (WRONG, 500)],
    ids=["refused", "failed", "large", "wrong"],
)
def test_who_is_to_blame(
    path: str,
    stream: bool,
    template: tuple[str, str],
    status: int,
    url: str,
    templated: Processor,
    data_url: str,
) -> None:
    source, words = template
    templated.template = ChatTemplate(source)
    body = BODIES[path] | ({"image": data_url} if "vision" in path else {})
    body |= {} if path.endswith(("tokens", "tokenize")) else {"stream": stream}
    answer = httpx.post(url + path, json=body, timeout=PATIENCE_S)
    error = answer.json()["error"]
    assert answer.status_code == status, answer.text
    assert words in (error if isinstance(error, str) else error["message"])
    if path == "/v1/chat/completions":
        assert error["param"] == ("messages" if status == 400 else None)
