"""An engine that calls a tool of its own accord, which pocket never does: where nobody can demand one."""

from snugvl.core.messages import Request
from tests.client.conftest import ScriptedEngine
from tests.tasks.fake import FakeBackend

CALL = '<tool_call>\n{"name": "count_shapes", "arguments": {"shape": "circle"}}\n</tool_call>'


def willing(request: Request) -> str:
    """A call first; with the tool's answer, a sentence about it."""
    last = request.messages[-1]
    if last.role == "tool":
        return f"The tool says {last.content[0].text}."  # type: ignore[union-attr]
    return CALL if request.tools else "No tool."


def willing_engine() -> ScriptedEngine:
    """The engine behind `willing`."""
    return ScriptedEngine(FakeBackend(willing))
