"""Official clients in their own environments: each holds a streamed conversation about a picture, gets an
answer in the form of a JSON schema, and has a tool called. The scripts beside this are what a user writes.
"""

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import SCRIPTS, run
from tests.patience import PATIENCE_S

PICTURE = Path(__file__).parents[2] / "examples" / "images" / "shapes.png"
PYTHON = ["openai_sdk", "langchain_chat", "litellm_chat", "llm_cli", "ollama_client", "anthropic_sdk"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(6 * PATIENCE_S)]


def test_the_python_clients(foreign_python: Path, url: str, willing_url: str) -> None:
    """One after the other: each in a test of its own, several processes would wait for one installation."""
    for script in PYTHON:
        print(script)  # which a failure shows
        check(spoken(str(foreign_python), str(SCRIPTS / f"{script}.py"), url, willing_url, str(PICTURE)))


def test_the_openai_sdk_for_node(foreign_node: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["about.py", url, "", str(PICTURE)])
    about = runpy.run_path(str(SCRIPTS / "about.py"))
    names = ("server", "data_url", "first", "second", "structure", "schema", "tool_question", "tool_answer")
    told = {name: about[name.upper()] for name in names} | {"tool": about["OPENAI_TOOL"]}
    shutil.copy(SCRIPTS / "openai_sdk.mjs", foreign_node)  # modules are looked for beside the script
    check(spoken("node", str(foreign_node / "openai_sdk.mjs"), json.dumps(told)))


def spoken(*command: str) -> Any:
    """The JSON that a script prints, and nothing else."""
    try:
        return json.loads(run(*command))
    except subprocess.CalledProcessError as error:
        pytest.fail(f"{command[1]}: {error.stderr[-3000:]}")


def check(outcome: dict[str, Any]) -> None:
    """What pocket says is true, what a schema promises holds."""
    assert set(outcome) == {"pieces", "second", "structured", "call", "after"}
    assert len([piece for piece in outcome["pieces"] if piece]) >= 2  # it was streamed
    text = "".join(outcome["pieces"]).lower()
    assert "red circle" in text
    assert "green triangle" in text
    assert outcome["second"].strip()
    assert set(outcome["structured"]) == {"color", "count"}
    assert outcome["structured"]["color"] in ("red", "green", "blue")
    assert outcome["structured"]["count"] in range(10)
    assert outcome["call"]["name"] == "count_shapes"
    assert set(outcome["call"]["arguments"]) == {"shape"}
    assert outcome["call"]["arguments"]["shape"] in ("circle", "square", "triangle")
    assert outcome["after"].strip()
