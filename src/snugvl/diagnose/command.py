"""The user's command: found in the log, taken apart, changed, and put together safely quoted; vLLM's flags.

Nothing here runs anything. A log is data: every word is quoted for the shell on its way out, and a command
that can't be taken apart, or holds more than one command, is not given back.
"""

# ruff: noqa: E501 - one pattern or one whole sentence a line reads better than a wrapped one

import ast
import difflib
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from snugvl.diagnose.result import Change, known
from snugvl.diagnose.scan import LoggedRun

_NAMES: Final = {"--device-memory-utilization": "--gpu-memory-utilization", "-tp": "--tensor-parallel-size"}
_OPERATOR: Final = re.compile(r"[;&|<>`]|\$\(")
_SKIPPED: Final = frozenset({"model_tag", "model", "subparser", "config", "served_model_name_list"})


@dataclass(frozen=True, slots=True)
class LoggedCommand:
    """A command line. `start`: its words up to and with the model; `flags`: in order, None for a switch."""

    env: tuple[tuple[str, str], ...]
    start: tuple[str, ...]
    flags: tuple[tuple[str, str | None], ...]
    line: int
    rebuilt: bool = False

    def get(self, flag: str) -> str | None:
        """The value of a flag."""
        return next((value for name, value in reversed(self.flags) if name == flag), None)

    def has(self, flag: str) -> bool:
        """Whether the command has the flag."""
        return any(name == flag for name, _ in self.flags)

    @property
    def model(self) -> str | None:
        """The model that the command serves."""
        if named := self.get("--model"):
            return named
        return self.start[-1] if len(self.start) > 1 and self.start[-2:-1] == ("serve",) else None

    def changed(self, changes: tuple[Change, ...]) -> str:
        """One line for a shell with the changes applied."""
        env = dict(self.env)
        flags = dict(self.flags)
        for change in changes:
            target = flags if change.flag.startswith("-") else env
            if change.new is None:
                target.pop(change.flag, None)
            else:
                target[change.flag] = change.new or None  # type: ignore[assignment]
        words = [f"{name}={shlex.quote(value)}" for name, value in env.items()]
        words += [shlex.quote(word) for word in self.start]
        for name, value in flags.items():
            words.append(shlex.quote(name))
            if value is not None:
                words.append(shlex.quote(value))
        return " ".join(words)


def find(run: LoggedRun) -> LoggedCommand | None:
    """The command of the log: as typed, or put together from vLLM's own list of arguments."""
    for hit in reversed(run.all("command")):
        if parsed := parse(hit.groups[0], hit.line):
            return parsed
    for key in ("args", "namespace"):
        if listed := run.last(key):
            values = arguments(listed.groups[0])
            if key == "namespace":
                values = {name: values[name] for name in _NAMESPACE if values.get(name) is not None}
            if values:
                return _rebuild(values, listed.line)
    return None


def parse(text: str, line: int = 0) -> LoggedCommand | None:
    """A typed `vllm serve …`, `python -m vllm.entrypoints.openai.api_server …` or `docker run …` line."""
    text = re.split(r"\s(?:2>|&>|>|\||&&|;|&)", text.rstrip("\\").rstrip("`"), maxsplit=1)[0]
    try:
        words = shlex.split(text)
    except ValueError:
        return None
    env = []
    while words and re.fullmatch(r"[A-Za-z_]\w{0,60}=.*", words[0]):
        name, _, value = words.pop(0).partition("=")
        env.append((name, value))
    split = next((i for i, word in enumerate(words) if _opens(word)), None)
    if split is None or any(_OPERATOR.search(word) for word in words[: split + 1]):
        return None
    start, rest = words[: split + 1], words[split + 1 :]
    if rest and start[-1] == "serve" and not rest[0].startswith("-"):
        start.append(rest.pop(0))
    return LoggedCommand(tuple(env), tuple(start), _flags(rest), line)


def _opens(word: str) -> bool:
    return word == "serve" or word == "vllm.entrypoints.openai.api_server" or "vllm/vllm-openai" in word


def _flags(words: list[str]) -> tuple[tuple[str, str | None], ...]:
    found: list[tuple[str, str | None]] = []
    for index, word in enumerate(words):
        if not re.match(r"--?[A-Za-z]", word):
            if found and index and found[-1][1] is None and found[-1][0] not in known()["switches"]:
                found[-1] = (found[-1][0], word)
            elif found and found[-1][1] is not None and not word.startswith("-"):
                found[-1] = (found[-1][0], f"{found[-1][1]} {word}")  # a flag with several values
            continue
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        found.append((_NAMES.get(name, name), value if equals else None))
    return tuple(found)


_NAMESPACE: Final = (
    "model_tag", "model", "max_model_len", "gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens",
    "limit_mm_per_prompt", "mm_processor_kwargs", "quantization", "cpu_offload_gb", "port", "served_model_name",
)  # fmt: skip
_PAIR: Final = re.compile(
    r"['\"]?(\w{1,60})['\"]?\s{0,3}[:=]\s{0,3}('[^']{0,300}'|\"[^\"]{0,300}\"|\{(?:[^{}]|\{[^{}]{0,100}\}){0,300}\}|\[[^\]]{0,300}\]|[\w.+-]{1,60})"
)


def arguments(text: str) -> dict[str, object]:
    """The pairs of `{'model': …}` or `model='…', …`, also of a line that is cut off or not plain Python."""
    if text.startswith("{"):
        try:
            value = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            pass
        else:
            return {str(name): item for name, item in value.items()} if isinstance(value, dict) else {}
    found: dict[str, object] = {}
    for name, raw in _PAIR.findall(text[:16384]):
        try:
            found.setdefault(name, ast.literal_eval(raw))
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            found.setdefault(name, raw)
    return found


def _rebuild(values: Mapping[str, object], line: int) -> LoggedCommand | None:
    model = values.get("model_tag") or values.get("model")
    if not isinstance(model, str) or not model:
        return None
    flags: list[tuple[str, str | None]] = []
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        if name in _SKIPPED or value is None or not re.fullmatch(r"\w{1,60}", name):
            continue
        if value is True:
            flags.append((flag, None))
        elif isinstance(value, dict):
            flags.append((flag, json.dumps(value)))
        elif isinstance(value, list):
            flags.append((flag, " ".join(str(item) for item in value)))
        elif value is not False:
            flags.append((flag, str(value)))
    return LoggedCommand((), ("vllm", "serve", model), tuple(flags), line, rebuilt=True)


def removed(name: str) -> str:
    """The sentence on a flag or variable that vLLM has removed, or "" for any other."""
    became: str = known()["removed"].get(name, "")
    return became


def _is_gone(name: str, version: str | None) -> bool:
    """Whether the version that ran no longer has a flag, or none ever had; False for an unknown version."""
    since = known()["removed_since"].get(name)
    if since is None:
        return bool(removed(name))
    return bool(version) and _numbers(version) >= _numbers(since)


def _numbers(version: str | None) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d{1,6}", version or "")[:3])


def meant(flag: str) -> str:
    """The flag that a misspelt one is close to, or ""."""
    flags: list[str] = known()["flags"]
    near = [] if flag in flags else difflib.get_close_matches(flag[:60], sorted(flags), n=1, cutoff=0.85)
    return near[0] if near else ""


def suggestion(flag: str) -> str:
    """The clause on what to use instead of a flag that vLLM refused."""
    if gone := removed(flag):
        return gone
    if near := meant(flag):
        return f"unknown; {near} is meant, perhaps."
    if flag in known()["flags"]:
        return "unknown to this version though newer ones have it; update vLLM or leave it out."
    return "unknown; leave it out, or see vllm serve --help=all."


def refused_flags(run: LoggedRun) -> list[str]:
    """The flags that vLLM's parser, or its arguments' class, did not take."""
    words = hit.groups[0].split()[:40] if (hit := run.last("bad_flags")) else []
    found = [word.partition("=")[0] for word in words if word.startswith("-")]
    return found + (["--" + hit.groups[0].replace("_", "-")] if (hit := run.last("bad_keyword")) else [])


def removed_switches(command: LoggedCommand | None, run: LoggedRun) -> list[str]:
    """The flags and variables of a start that its vLLM no longer has, by our table or its own log."""
    used = {name for name, _ in command.flags} if command else set()
    used |= (
        {name for name, value in command.env if name != "VLLM_USE_V1" or value == "0"} if command else set()
    )
    used |= {"VLLM_USE_V1"} if run.has("env_v1") else set()
    said = {hit.groups[0] for key in ("bad_env", "deprecated_flag") for hit in run.all(key)}
    refused = set(refused_flags(run))
    # A version that refuses a flag is at least the one that dropped it.
    dropped = [since for name, since in known()["removed_since"].items() if name in refused]
    version = run.version or max(dropped, key=_numbers, default=None)
    said |= refused
    return sorted(name for name in used | said if removed(name) and (name in said or _is_gone(name, version)))
