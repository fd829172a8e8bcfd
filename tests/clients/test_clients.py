"""Official clients in their own environments: each holds a streamed conversation about a picture, gets an
answer in the form of a JSON schema, and has a tool called. The scripts beside this are what a user writes.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import SCRIPTS, run
from tests.patience import PATIENCE_S

PICTURE = Path(__file__).parents[2] / "examples" / "images" / "shapes.png"
ABOUT = """
import about, json
names = "server willing data_url first second structure schema tool_question tool_answer".split()
print(json.dumps({name: vars(about)[name.upper()] for name in names} | {"tool": about.OPENAI_TOOL}))
"""
PYTHON = ["openai_sdk", "ollama_client", "anthropic_sdk"]
# Beyond CI's time: programs that stand on those, and speak the same protocols.
FRAMEWORKS = ["langchain_chat", "litellm_chat", "llm_cli"]
# Beyond CI's time, too. Each says in its heading which packages it is about and what it runs; docs/clients.md
# is written from that.
EXTENDED = [
    "openai_history",
    "sdk_histories",
    "litellm_loop",
    "langchain_three",
    "instructor_modes",
    "pydantic_ai_agent",
    "openai_agents_loop",
    "smolagents_model",
    "llama_index_llms",
    "haystack_chat",
    "outlines_typed",
]
EXTENDED_NODE = ["openai_history", "ai_sdk", "ollama_js"]
WITH_FRAMEWORKS = {"litellm_loop"}  # whose pins don't agree with the others'

pytestmark = [pytest.mark.slow, pytest.mark.timeout(6 * PATIENCE_S)]


def test_the_python_clients(foreign_python: Path, url: str, willing_url: str) -> None:
    hold_conversations(PYTHON, foreign_python, url, willing_url)


@pytest.mark.extended
def test_the_python_frameworks(framework_python: Path, url: str, willing_url: str) -> None:
    hold_conversations(FRAMEWORKS, framework_python, url, willing_url)


def hold_conversations(names: list[str], python: Path, url: str, willing_url: str) -> None:
    """One after the other in one process: what they import takes most of their time, and is much the same."""
    scripts = [str(SCRIPTS / f"{name}.py") for name in names]
    together = (str(python), str(SCRIPTS / "together.py"), url, willing_url, str(PICTURE), *scripts)
    outcomes = spoken(*together)
    assert list(outcomes) == scripts
    for script, outcome in outcomes.items():
        print(script)  # which a failure shows
        check(outcome)


def test_the_openai_sdk_for_node(foreign_node: Path, url: str, willing_url: str) -> None:
    check(spoken_by_node("openai_sdk.mjs", foreign_node, url, willing_url))


@pytest.mark.extended
@pytest.mark.parametrize("script", EXTENDED)
def test_a_client_and_its_own_history(
    script: str, extended_python: Path, framework_python: Path, url: str, willing_url: str
) -> None:
    python = framework_python if script in WITH_FRAMEWORKS else extended_python
    check_loop(spoken(str(python), str(SCRIPTS / f"{script}.py"), url, willing_url, str(PICTURE)))


@pytest.mark.extended
@pytest.mark.parametrize("script", EXTENDED_NODE)
def test_a_client_for_node_and_its_own_history(
    script: str, foreign_node: Path, url: str, willing_url: str
) -> None:
    check_loop(spoken_by_node(f"{script}.mjs", foreign_node, url, willing_url))


def spoken_by_node(script: str, folder: Path, url: str, willing_url: str) -> Any:
    """The JSON that a script for Node prints, which is told in JSON what about.py says."""
    shutil.copy(SCRIPTS / script, folder)  # modules are looked for beside the script
    about = ("-c", ABOUT, url, willing_url, str(PICTURE))
    told = run(sys.executable, *about, cwd=SCRIPTS)
    return spoken("node", str(folder / script), told)


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


def check_loop(outcome: dict[str, Any]) -> None:
    """Of a client of the extended group: what pocket sees is true, each turn called the tool and went on."""
    assert "red circle" in outcome["first"].lower()
    for turn in outcome["turns"]:
        assert turn["call"] == {"name": "count_shapes", "arguments": {"shape": "circle"}}
        assert "1 circle" in turn["after"]
    assert set(outcome["structured"]) == {"color", "count"}
    assert outcome["structured"]["color"] in ("red", "green", "blue")
    assert outcome["structured"]["count"] in range(10)
    if "forced" in outcome:
        assert outcome["forced"]["name"] == "count_shapes"
        assert set(outcome["forced"]["arguments"]) <= {"shape", "notes"}
