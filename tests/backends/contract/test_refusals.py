"""What every engine refuses, with the same class and field; and nobody else is harmed."""

from dataclasses import replace

import pytest

from snugvl.core.messages import Grammar, Request, Tool, ToolUse, user
from snugvl.core.sampling import SamplingParams
from snugvl.errors import DeadlineExceeded, ImageError, RequestError, RequestTooLarge, SnugvlError
from tests.backends.contract.differences import CUTS_AT_THE_CONTEXT
from tests.backends.contract.engines import CONTEXT, Running
from tests.backends.contract.requests import TOOLS, asked, picture

SHORT = SamplingParams(max_tokens=3)
REFUSED: dict[str, tuple[Request, type[SnugvlError], str | None]] = {
    "a prompt longer than the context": (asked("red " * 2000), RequestTooLarge, "messages"),
    "more tokens than the context": (asked(max_tokens=CONTEXT + 1), RequestTooLarge, "max_tokens"),
    "a bare prompt longer than the context": (
        Request(prompt="red " * 2000, sampling=SHORT),
        RequestTooLarge,
        "prompt",
    ),
    "a control token in a bare prompt": (
        Request(prompt="a <|im_end|>", sampling=SHORT),
        RequestError,
        "prompt",
    ),
    "an empty bare prompt": (Request(prompt="", sampling=SHORT), RequestError, "prompt"),
    "an id beyond the vocabulary": (Request(prompt=(1, 99_999), sampling=SHORT), RequestError, "prompt"),
    "log-probabilities of a conversation": (
        asked(logprobs=0, prompt_logprobs=True),
        RequestError,
        "logprobs",
    ),
    "messages and a prompt": (
        Request((user("a"),), SHORT, prompt="a"),
        RequestError,
        "prompt",
    ),
    "tools with a prompt": (Request(prompt="a", sampling=SHORT, tools=TOOLS), RequestError, "tools"),
    "tools and a grammar": (
        Request((user("a"),), SHORT, tools=TOOLS, grammar=Grammar("regex", "a")),
        RequestError,
        "response_format",
    ),
    "a tool with a bad name": (
        Request((user("a"),), SHORT, tools=ToolUse((Tool("a b"),))),
        RequestError,
        "tools[0].name",
    ),
    "a schema that says nothing sensible": (
        Request((user("a"),), SHORT, grammar=Grammar("json_schema", '{"type": "nonsense"}')),
        RequestError,
        "response_format",
    ),
    "a broken regular expression": (
        Request((user("a"),), SHORT, grammar=Grammar("regex", "[a")),
        RequestError,
        "response_format",
    ),
    "a picture that is a strip": (asked(picture((2, 600)), "?"), ImageError, None),
    "no messages": (Request((), SHORT), RequestError, "messages"),
    "a bias beyond the vocabulary": (asked(logit_bias={99_999: 1.0}), RequestError, "logit_bias"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_its_class_and_field(name: str, running: Running) -> None:
    request, kind, field = REFUSED[name]
    with pytest.raises(kind) as caught:
        running.ask(request)
    if field is not None:
        assert getattr(caught.value, "field", None) == field
    assert len(str(caught.value)) > 20
    assert running.text(asked(max_tokens=3))


@pytest.mark.parametrize("parts", [("a <|im_end|> b",), ("a <|im_", "end|> b"), ("<|im_start|>" * 3,)])
def test_control_tokens_in_content_are_text(parts: tuple[str, ...], running: Running) -> None:
    assert running.ask(asked(*parts, max_tokens=3))[-1].finish_reason in ("stop", "length")


def test_a_refusal_for_length_has_the_numbers(running: Running) -> None:
    request = asked(picture((512, 512)), "?", max_tokens=700)
    if running.name in CUTS_AT_THE_CONTEXT:
        usage = running.ask(request)[-1].usage
        assert usage is not None
        assert usage.prompt_tokens + usage.completion_tokens == CONTEXT
        return
    with pytest.raises(RequestTooLarge, match=str(CONTEXT)):
        running.ask(request)


@pytest.mark.sample("native")
def test_an_answer_without_a_limit_takes_what_the_context_leaves(running: Running) -> None:
    request = asked("red " * 320)
    unlimited = replace(request, sampling=SamplingParams(ignore_eos=True))
    last = running.ask(unlimited)[-1]
    assert last.finish_reason == "length"
    assert last.usage is not None
    assert last.usage.prompt_tokens + last.usage.completion_tokens == CONTEXT


def test_a_deadline_ends_the_answer(running: Running) -> None:
    late = replace(asked(max_tokens=600), deadline_s=0.05)
    with pytest.raises(DeadlineExceeded, match="deadline"):
        running.ask(late)
    assert running.text(asked(max_tokens=3))
    running.idle()
