"""A llama-server that isn't the wheel's: the same server, as a program of which nothing else is known."""

import json
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from snugvl.backends.llamacpp import settings
from snugvl.backends.llamacpp.service import LlamacppEngine
from snugvl.backends.llamacpp.settings import LlamacppChoice
from snugvl.core.messages import Grammar, Request, ToolUse, user
from snugvl.core.sampling import SamplingParams
from snugvl.errors import RequestError
from snugvl.tasks.conventions import BOXES
from tests.backends.contract.engines import read
from tests.backends.contract.requests import SCHEMA, TOOLS, constrained
from tests.backends.llamacpp.test_failures import engine, pocket
from tests.backends.waiting import ready

__all__ = ["pocket"]
pytestmark = pytest.mark.anyio
RUN = f'#!/bin/sh\nexec {sys.executable} -m {settings.MODULE} "$@"\n'
BEYOND: tuple[tuple[dict[str, Any], str], ...] = (
    ({"grammar": Grammar("regex", "[a-f]{3}")}, "regular expressions"),
    ({"grammar": Grammar("lark", "start: /[a-f]{3}/")}, "Lark grammars beyond"),
    ({"grammar": Grammar("json_schema", '{"type": "integer", "multipleOf": 5}')}, "enforce multipleOf"),
    ({"tools": TOOLS}, "calls of tools"),
    ({"tools": ToolUse(TOOLS.tools, form=SCHEMA)}, "calls of tools"),
)


@pytest.fixture
async def plain(pocket: LlamacppChoice, tmp_path: Path) -> AsyncIterator[LlamacppEngine]:
    """Pocket on it."""
    path = tmp_path / "llama-server"
    path.write_text(RUN)
    path.chmod(0o755)
    async with engine(replace(pocket, command=(str(path),))) as service:
        await ready(service)
        yield service


async def text_of(service: LlamacppEngine, request: Request) -> str:
    return "".join(delta.text for delta in await read(await service.submit(request)))


async def test_forms_are_llama_cpps_own(plain: LlamacppEngine) -> None:
    assert plain.capabilities is not None
    assert not plain.capabilities.exact_forms
    for sampling in ({}, {"temperature": 1.0, "seed": 3}):
        value = json.loads(await text_of(plain, constrained(Grammar("json_schema", SCHEMA), **sampling)))
        assert value.keys() == {"color", "n"}
        assert value["color"] in ("red", "blue")
        assert 0 <= value["n"] <= 99
        said = await text_of(plain, constrained(Grammar("lark", 'start: "yes" | "no"'), **sampling))
        assert said in ("yes", "no")
    boxes = await text_of(plain, constrained(BOXES, temperature=1.0, seed=1, max_tokens=400))
    assert boxes.startswith(("[", "```json\n["))
    calls = Request((user("hi"),), SamplingParams(max_tokens=4), tools=replace(TOOLS, choice="auto"))
    assert await text_of(plain, calls), "offered, not enforced"

    for asked, told in BEYOND:
        with pytest.raises(RequestError, match=told):
            await plain.submit(Request((user("hi"),), SamplingParams(max_tokens=4), **asked))
