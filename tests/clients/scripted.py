"""An engine that calls a tool of its own accord, which pocket never does: where nobody can demand one."""

from snugvl.core.messages import Request
from tests.client.conftest import ScriptedEngine
from tests.tasks.fake import FakeBackend, prompt_of

CALL = '<tool_call>\n{"name": "count_shapes", "arguments": {"shape": "circle"}}\n</tool_call>'


def willing(request: Request) -> str:
    """A call first; with the tool's answer, a sentence about it.

    smolagents sends the tool's answer as a user's message that begins with "Observation:".
    """
    text = prompt_of(request)
    if request.messages[-1].role == "tool" or text.startswith("Observation:"):
        return f"The tool says {text}."
    return CALL if request.tools else "No tool."


def willing_engine() -> ScriptedEngine:
    """The engine behind `willing`."""
    return ScriptedEngine(FakeBackend(willing))
