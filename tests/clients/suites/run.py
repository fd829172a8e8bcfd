"""Test suites that other people wrote for their clients, against our server: counts, and why a case fails.

PYTHONPATH=benchmarks python tests/clients/suites/run.py PYTHON [--openai-tests CHECKOUT PYTHON]

PYTHON is the interpreter of an environment with tests/clients/requirements-extended.txt (the extended tests
keep one in ~/.cache/snugvl-foreign-clients) and pytest-timeout. CHECKOUT is a copy of the openai-python
repository, its PYTHON of an environment with just that version of openai[aiohttp] and what its tests need.
Only its cases that speak synchronously run: the others send the same. A case's reason is the last line of its
failure, mostly the server's own words.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from machine import describe
from serving import NAME, serve

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results" / "clients"
LANGCHAIN = ROOT / "tests" / "clients" / "suites" / "langchain_standard.py"
API = Path("tests/api_resources")
OPENAI = ("chat/test_completions.py", "test_completions.py", "test_models.py", "test_responses.py")
# Models that the cases of openai-python name; pocket answers to these.
NAMES = ("gpt-5.4", "gpt-5.1", "gpt-5.6-sol", "gpt-3.5-turbo-instruct", "gpt-4o-mini", "model")
CASE_S = 120


def reason(failure: str) -> str:
    """One line of a failure: what the server said, or the last error."""
    said = re.findall(r"'message': [\"'](.+?)[\"'], '(?:type|param)'", failure)
    raised = re.findall(r"^E +(\S.*)", failure, re.MULTILINE)
    lines = failure.strip().splitlines() or [""]
    return str((said or raised[:1] or lines)[-1])[:160]


def run(python: str, folder: Path, cases: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """A suite's counts, and a line for each case that fails."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        options = ["-q", "-p", "no:cacheprovider", f"--timeout={CASE_S}", f"--junitxml={report}"]
        # One loop for all cases: SDKs keep a client, and the connections of the loop that it met first.
        settings = [
            "addopts=",
            "asyncio_mode=auto",
            *(f"asyncio_default_{kind}_loop_scope=session" for kind in ("test", "fixture")),
        ]
        options += [word for setting in settings for word in ("-o", setting)]
        command = [python, "-m", "pytest", *options, *cases]
        environment = {**os.environ, **variables, "NO_PROXY": "127.0.0.1", "PYTHONPATH": ""}
        subprocess.run(command, cwd=folder, env=environment, check=False, stdout=sys.stderr)
        found = ElementTree.parse(report).getroot()
    counts: Counter[str] = Counter()
    lines = []
    for case in found.iter("testcase"):
        kinds = {child.tag: child for child in case}
        outcome = next((kind for kind in ("failure", "error", "skipped") if kind in kinds), "passed")
        counts[outcome] += 1
        if outcome in ("failure", "error"):
            why = reason(f"{kinds[outcome].get('message', '')}\n{kinds[outcome].text or ''}")
            lines.append(f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}: {why}")
    counted = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))
    return [f"{sum(counts.values())} cases: {counted}", *sorted(lines)]


def main() -> None:
    """Run the suites and write what they say to benchmarks/results/clients/."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("python")
    parser.add_argument("--openai-tests", nargs=2, metavar=("CHECKOUT", "PYTHON"))
    given = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    served = [word for name in (NAME, *NAMES) for word in ("--served-model-name", name)]
    with serve("pocket", served) as server:
        langchain = [str(LANGCHAIN), "--noconftest", "-c", os.devnull]
        suites: dict[str, tuple[str, Path, list[str], dict[str, str]]] = {
            "langchain_tests": (given.python, ROOT, langchain, {"SNUGVL_SUITE_URL": server.url})
        }
        if given.openai_tests is not None:
            cases = [str(API / name) for name in OPENAI]
            told = {"TEST_API_BASE_URL": f"{server.url}/v1"}
            checkout, python = given.openai_tests
            suites["openai_python"] = (python, Path(checkout).resolve(), [*cases, "-k", "not Async"], told)
        for name, (python, folder, cases, variables) in suites.items():
            counted = run(python, folder, cases, variables)
            text = "\n".join([name, json.dumps(describe()), *counted]) + "\n"
            (RESULTS / f"{name}.txt").write_text(text, encoding="utf-8")
            print(text)


if __name__ == "__main__":
    main()
