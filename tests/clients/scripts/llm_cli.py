"""The `llm` command, with our servers as OpenAI-compatible models of its configuration.

Packages: llm
Ran: a streamed conversation about a picture, a schema, a tool that the command runs
"""

import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path

import about
from llm.cli import cli

sys.stdin = io.StringIO()  # the command reads the rest of its prompt there
HOME = Path(tempfile.mkdtemp())
os.environ["LLM_USER_PATH"] = str(HOME)
HOME.joinpath("extra-openai-models.yaml").write_text(
    "".join(
        f"- model_id: {name}\n  model_name: pocket\n  api_base: {server}/v1\n  vision: true\n"
        "  supports_schema: true\n  supports_tools: true\n"
        for name, server in (("pocket", about.SERVER), ("willing", about.WILLING))
    )
)
FUNCTION = f'''
def {about.TOOL_NAME}(shape: str) -> str:
    "{about.TOOL_DESCRIPTION}"
    return "{about.TOOL_ANSWER}"
'''


class Pieces(io.BytesIO):
    """Keeps what is written piece by piece as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, data: bytes) -> int:
        self.pieces.append(bytes(data).decode())
        return len(data)


def llm(*args: str) -> list[str]:
    """What the command prints, piece by piece as it comes. Here: processes would import it five times."""
    printed = Pieces()
    with contextlib.redirect_stdout(io.TextIOWrapper(printed, encoding="utf-8", write_through=True)):
        cli.main(args, prog_name="llm", standalone_mode=False)
    return printed.pieces


pieces = llm("-m", "pocket", "-a", about.PICTURE, about.FIRST)
second = "".join(llm("-c", about.SECOND)).strip()
structured = llm("-m", "pocket", "-a", about.PICTURE, "--schema", json.dumps(about.SCHEMA), about.STRUCTURE)
after = llm("-m", "willing", "--functions", FUNCTION, about.TOOL_QUESTION)
responses = json.loads("".join(llm("logs", "--json", "-n", "2")))  # the call, and what came of its answer
(call,) = [call for response in responses for call in response["tool_calls"]]

about.report(
    pieces=pieces,
    second=second,
    structured=json.loads("".join(structured)),
    call={"name": call["name"], "arguments": call["arguments"]},
    after="".join(after).strip(),
)
