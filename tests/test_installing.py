"""The README's commands on others' machines: every Python that the classifiers name, torch's CUDA builds.

This machine's own index may give another build of torch (as CI's does for Python 3.11), so an installation
here says little about theirs. The quick tests resolve by metadata alone, with uv, which reads none of pip's
configuration; the extended ones really install.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from uv import find_uv_bin

from snugvl.hardware.advice import CUDA_12
from tests.docs.test_readme import ROOT, block
from tests.missing import missing
from tests.patience import PATIENCE_S
from tests.test_dependencies import PROJECT, normal, pins

PYTHONS = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)]
EXTRAS = PROJECT["optional-dependencies"]
VLLM = "vllm"  # has a torch of its own
USERS = sorted(set(EXTRAS) - {"dev", VLLM})
PLATFORM = "x86_64-manylinux_2_31"  # Debian 11, Ubuntu 20.04 and everything newer
ONLY_SOURCES = "docopt"  # has no wheel anywhere; pip builds it without a compiler
# What a build of torch asks for by exact versions, and another build in other versions.
OF_TORCH = re.compile(r"triton$|cuda-|nvidia-(?!ml-py$)")
PICTURE = ROOT / "examples" / "images" / "shapes.png"
# Typed in an environment of its own: a server, our client, a typed answer.
TALK = """
import json, re, subprocess, sys, openai, snugvl
words = [sys.executable, "-m", "snugvl", "serve", "pocket", "--port", "0", "--device", "cpu"]
with subprocess.Popen(words, stdout=-1, stderr=-1, text=True) as server:
    url = next(filter(None, (re.search(r"http://127[.]0[.]0[.]1:[0-9]+", line) for line in server.stdout)))[0]
    next(line for line in server.stderr if "ready in" in line)
    with snugvl.Client(url) as client:
        print(client.caption(sys.argv[1]).text)
    schema = {"type": "object", "properties": {"circles": {"type": "integer", "maximum": 9}}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema | {"required": ["circles"]}}}
    asked = [{"role": "user", "content": "How many circles are there?"}]
    with openai.OpenAI(base_url=url + "/v1", api_key="none") as sdk:
        told = sdk.chat.completions.create(model="pocket", messages=asked, response_format=form)
    print(json.loads(told.choices[0].message.content).keys())
    server.terminate()
sys.exit(server.returncode)
"""
CONSTRAINTS = ROOT / "constraints.txt"
DEV_CONSTRAINTS = ROOT / "constraints-dev.txt"
NEEDED_BYTES = 10**10  # of the disk: an environment with CUDA's torch, and what pip keeps while it installs


def uv(python: str, *words: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    """uv's answer to what would be installed on that Python, on Linux; all but one package as wheels."""
    environment = {name: value for name, value in os.environ.items() if name != "UV_TORCH_BACKEND"}
    command = (
        find_uv_bin(), "pip", "compile", "--quiet", "--no-header", "--no-annotate",
        "--python", sys.executable, "--python-version", python, "--python-platform", PLATFORM,
        "--only-binary", ":all:", "--no-binary", ONLY_SOURCES, *words,
    )  # fmt: skip
    return subprocess.run(
        command, cwd=ROOT, env=environment, input=given, capture_output=True, text=True, timeout=PATIENCE_S
    )


def registry() -> None:
    """Skip, or fail in CI, where no package index answers."""
    asked = uv(PYTHONS[0], "-", given="filelock")
    if asked.returncode != 0:
        missing(f"no package index answers: {asked.stderr.strip()[-300:]}")


def resolved(python: str, *extras: str, constraints: Path | None = None) -> dict[str, str]:
    """The version of every package that the project with `extras` brings on that Python.

    What exact versions ask for never changes: where uv has asked for all of them before, it does not again.
    """
    words = ["pyproject.toml", *(word for extra in extras for word in ("--extra", extra))]
    if constraints is not None:
        words += ["--constraints", constraints.name]
    found = uv(python, *words, *(["--offline"] if constraints is not None else []))
    if found.returncode != 0:
        registry()
        found = uv(python, *words)
    assert found.returncode == 0, f"Python {python}, {extras or 'no extra'}: {found.stderr}"
    lines = (line.partition(" ;")[0] for line in found.stdout.splitlines() if "==" in line)
    return {normal(name): version for name, _, version in (line.partition("==") for line in lines)}


# The oldest and the newest; one between them asks for nothing that neither does.
@pytest.mark.parametrize(
    "python",
    [PYTHONS[0], *(pytest.param(each, marks=pytest.mark.extended) for each in PYTHONS[1:-1]), PYTHONS[-1]],
)
@pytest.mark.sample("3.13")
def test_the_constraints_hold_with_the_cuda_builds_of_torch(python: str) -> None:
    """With and without each extra; what torch doesn't pin itself is pinned, and nothing else: what users
    install in one file, what only tests need in another one."""
    everything = resolved(python, *USERS, "dev", constraints=DEV_CONSTRAINTS)
    assert {"triton", "nvidia-cudnn-cu13"} <= set(everything), "this is no CUDA build of torch"
    users = resolved(python, *USERS, constraints=CONSTRAINTS)
    for extra in ("", *USERS):
        alone = resolved(python, *filter(None, [extra]), constraints=CONSTRAINTS)
        assert alone.items() <= users.items()
    assert resolved(python, "dev", constraints=DEV_CONSTRAINTS).items() <= everything.items()
    of_torch = {name for name in everything if OF_TORCH.match(name)}
    assert pins(CONSTRAINTS).keys() == users.keys() - of_torch
    assert pins(DEV_CONSTRAINTS).keys() == everything.keys() - users.keys() | {"triton"}


@pytest.mark.parametrize("python", PYTHONS[-1:])  # resolving vLLM takes ten seconds
@pytest.mark.extended
def test_vllm_installs_without_the_constraints_and_not_with_them(python: str) -> None:
    """As docs/vllm.md says: it asks for a torch of its own."""
    free = resolved(python, VLLM)
    assert free["torch"] != pins(CONSTRAINTS)["torch"]
    words = ["pyproject.toml", "--extra", VLLM, "--constraints", CONSTRAINTS.name]
    held = uv(python, *words, "--offline")
    if "network was disabled" in held.stderr:  # nothing has asked for those versions before
        registry()
        held = uv(python, *words)
    assert held.returncode != 0
    assert "vllm" in held.stderr
    assert "torch" in held.stderr


@pytest.mark.extended
def test_a_torch_for_cuda_12_can_be_had_for_an_older_driver() -> None:
    """The README's and doctor's command for a driver that is too old for CUDA 13."""
    wanted = "\n".join([CUDA_12, *PROJECT["dependencies"]])
    found = uv(PYTHONS[-1], "-", "--offline", given=wanted)
    if found.returncode != 0:
        registry()
        found = uv(PYTHONS[-1], "-", given=wanted)
    assert found.returncode == 0, found.stderr
    assert "nvidia-cuda-runtime-cu12==12." in found.stdout


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.timeout(6 * PATIENCE_S)
@pytest.mark.parametrize("python", PYTHONS[1:])  # CI itself has the first
def test_it_installs_captions_and_passes_its_quick_tests(python: str, tmp_path: Path) -> None:
    """A fresh clone on that Python, by the README's own commands, with the torch that its index gives."""
    found = shutil.which(f"python{python}") or _pyenv(python)
    if found is None:
        missing(f"Python {python} is not installed")
    if shutil.disk_usage(tmp_path).free < NEEDED_BYTES:
        missing(f"{tmp_path} has less than {NEEDED_BYTES / 1e9:.0f} GB free")
    clone = tmp_path / "snugvl"
    known = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, known.split("\0")):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    path = tmp_path / "bin"
    path.mkdir()
    (path / "python3").symlink_to(found)
    try:
        _type(block("install").rstrip() + f" &&\n{block('run')}", clone, path, block("prints"))
        quick = block("tests").replace(".venv/bin/pytest", ".venv/bin/pytest -m 'not slow and not extended'")
        _type("git init -q . && git add -A &&\n" + quick, clone, path, " passed")
    finally:
        shutil.rmtree(clone)


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.timeout(6 * PATIENCE_S)
def test_what_pyproject_declares_at_its_oldest_runs(tmp_path: Path) -> None:
    """Each dependency of its own at the least version declared, those of dependencies at their newest."""
    if shutil.disk_usage(tmp_path).free < NEEDED_BYTES:
        missing(f"{tmp_path} has less than {NEEDED_BYTES / 1e9:.0f} GB free")
    python, venv = f"{sys.version_info.major}.{sys.version_info.minor}", tmp_path / "venv"
    extras = [word for extra in USERS for word in ("--extra", extra)]
    found = uv(python, "pyproject.toml", "--resolution", "lowest-direct", *extras)
    if found.returncode != 0:
        registry()
    assert found.returncode == 0, found.stderr
    (tmp_path / "oldest.txt").write_text(found.stdout, encoding="utf-8")
    for words in (
        ["venv", venv, "--python", sys.executable],
        ["pip", "install", "--python", venv, "--no-deps", "-r", tmp_path / "oldest.txt", ROOT],
    ):
        made = subprocess.run([find_uv_bin(), *words], capture_output=True, text=True)
        assert made.returncode == 0, made.stderr
    try:
        for typed, printed in (
            ((venv / "bin/snugvl", "--version"), "snugvl "),
            ((venv / "bin/snugvl", "plan", "--gpu", "rtx-3060", "--offline"), "GeForce RTX 3060"),
            ((venv / "bin/snugvl", "caption", PICTURE), block("prints")),
            ((venv / "bin/snugvl", "caption", PICTURE, "--backend", "transformers"), block("prints")),
            ((venv / "bin/python", "-c", TALK, PICTURE), f"{block('prints')}dict_keys(['circles'])\n"),
        ):
            ran = subprocess.run(typed, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
            assert ran.returncode == 0, f"{typed}\n{ran.stdout}\n{ran.stderr}"
            assert printed in ran.stdout
    finally:
        shutil.rmtree(venv)


def _pyenv(python: str) -> str | None:
    """pyenv's interpreter of that version, the newest."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = sorted(root.glob(f"versions/{python}.*/bin/python3"), key=lambda path: path.stat().st_mtime)
    return str(found[-1]) if found else None


def _type(commands: str, folder: Path, path: Path, printed: str) -> None:
    """Run shell commands whose `python3` is the one in `path`; they succeed and print that."""
    environment = os.environ | {"PATH": f"{path}:{os.environ['PATH']}"}
    for name in [name for name in environment if name.startswith(("PYTEST_", "VIRTUAL_ENV", "TRITON_"))]:
        del environment[name]
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert ran.returncode == 0, f"{commands}\n{ran.stdout[-6000:]}\n{ran.stderr[-3000:]}"
    assert printed in ran.stdout
