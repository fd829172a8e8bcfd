"""One pass over a log in bounded memory: finds the known lines of its last start, with their numbers.

Any size, any bytes, lines of any length: a block is searched for the literals of `known.toml` first, at the
speed of C; nothing is decoded, and no pattern runs, before a line holds its literal. UTF-16, which PowerShell
writes, is turned into UTF-8.
"""

import codecs
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from snugvl.diagnose.result import Engine, Evidence, clean, known

BLOCK_BYTES: Final = 1 << 18
LINE_BYTES: Final = 1 << 15  # the longest real line, vLLM's configuration, has about 8 KiB
EXCERPT: Final = 220
_ANSI: Final = re.compile(rb"\x1b\[[0-9;?]{0,20}[A-Za-z]|\x1b\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)")
BUSY: Final = 8  # lines of one kind read at each end of a block: a log may repeat one error for days
KEPT: Final = 12  # hits kept of a pattern: the first half and the last half
MAX_CONTINUED: Final = 60  # lines of one command
_ORDER: Final = {"command": 0, "version": 1, "args": 2, "namespace": 2, "engine": 3}
# Lines that describe the machine or the user's command, true before a start and after it.
_LASTING: Final = frozenset({"gpu", "wsl", "smi_row", "version_line", "env_v1"})
# Lines that may be the only word on a failure. All ranks of a parallel start say the same: each is kept once.
_ERRORS: Final = frozenset({"raised", "error_line"})
# A line may say this of many, one after the other: each is a hit of its own.
_REPEATED: Final = frozenset({"oom_others"})
_PREFIX: Final = re.compile(r"^(?:[\w.-]{1,60} +\| +)?")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A known line of a log. `engine`: the program that writes it; `fails`: the run or a request failed."""

    key: str
    needle: bytes
    regex: re.Pattern[str]
    engine: Engine | None = None
    fails: bool = False


def _pattern(key: str, find: str, take: str = "", **about: Any) -> Pattern:
    """The pattern of an entry of `known.toml`; without `take` the literal itself is the pattern."""
    for name, part in reversed(known()["parts"].items()):
        take = take.replace(f"<{name}>", part)
    return Pattern(key, find.encode(), re.compile(take or re.escape(find)), **about)


PATTERNS: Final = tuple(_pattern(**entry) for table in known()["patterns"].values() for entry in table)


class ByteSource(Protocol):
    """A source of bytes: an open binary file, standard input, BytesIO."""

    def read(self, size: int = -1, /) -> bytes: ...


def blocks(source: ByteSource) -> Iterator[bytes]:
    """Whole lines in blocks of about BLOCK_BYTES. Lines are cut at LINE_BYTES."""
    pending = b""
    skipping = False  # inside the rest of a line that was too long
    for chunk in _utf8(source):
        if skipping:
            end = chunk.find(b"\n")
            if end < 0:
                continue
            chunk, skipping = chunk[end:], False
        pending += chunk
        end = pending.rfind(b"\n")
        while end > 0 and pending[end - 1 : end] == b"\\":  # a command that goes on stays in one piece
            end = pending.rfind(b"\n", 0, end)
        if end >= 0:
            yield _without_escapes(pending[: end + 1])
            pending = pending[end + 1 :]
        if len(pending) > LINE_BYTES:
            pending, skipping = pending[:LINE_BYTES], True
    if pending:
        yield _without_escapes(pending)


def _utf8(source: ByteSource) -> Iterator[bytes]:
    first = source.read(BLOCK_BYTES)
    for mark, name in ((codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be")):
        if first.startswith(mark):
            decoder = codecs.getincrementaldecoder(name)(errors="replace")
            chunk = first[len(mark) :]
            while chunk:
                yield decoder.decode(chunk).encode("utf-8", "replace")
                chunk = source.read(BLOCK_BYTES)
            return
    chunk = first.removeprefix(codecs.BOM_UTF8)
    while chunk:
        yield chunk
        chunk = source.read(BLOCK_BYTES)


def _without_escapes(block: bytes) -> bytes:
    return _ANSI.sub(b"", block) if b"\x1b" in block else block


def decode(raw: bytes) -> str:
    """A line as clean text."""
    return clean(raw[:LINE_BYTES].decode("utf-8", "replace"))


def excerpt(text: str, start: int = 0) -> str:
    """At most EXCERPT characters of a line, from a little before `start` if it is long."""
    if len(text) <= EXCERPT:
        return text
    begin = max(0, min(start - 40, len(text) - EXCERPT))
    head, tail = "…" if begin else "", "…" if begin + EXCERPT < len(text) else ""
    return f"{head}{text[begin : begin + EXCERPT].strip()}{tail}"


@dataclass(frozen=True, slots=True)
class Hit:
    """A known line."""

    line: int
    text: str
    start: int
    groups: tuple[str, ...]
    named: dict[str, str]

    @property
    def evidence(self) -> Evidence:
        """The line as evidence, to be shown."""
        return Evidence(self.line, excerpt(self.text, self.start))


@dataclass(slots=True)
class LoggedRun:
    """The known lines that one start left in the log."""

    hits: dict[str, list[Hit]] = field(default_factory=dict)
    engines: set[Engine] = field(default_factory=set)
    failures: set[str] = field(default_factory=set)
    starts: int = 0
    lines: int = 0
    before: tuple[dict[str, list[Hit]], set[str]] | None = None  # the start before a command line

    def first(self, key: str) -> Hit | None:
        """The first line of that kind."""
        found = self.hits.get(key)
        return found[0] if found else None

    def last(self, key: str) -> Hit | None:
        """The last line of that kind."""
        found = self.hits.get(key)
        return found[-1] if found else None

    def all(self, key: str) -> list[Hit]:
        """The lines of that kind that were kept."""
        return self.hits.get(key, [])

    def has(self, *keys: str) -> bool:
        """Whether a line of any of these kinds was found."""
        return any(key in self.hits for key in keys)

    @property
    def version(self) -> str | None:
        """Version of the engine by its own line, or None."""
        lines = ("version", "engine", "version_line", "ollama_version", "gguf_build")
        return next((hit.groups[0][:40] for key in lines if (hit := self.last(key))), None)

    def evidence(self, *keys: str) -> tuple[Evidence, ...]:
        """The last line of each kind, in the log's order, none twice."""
        found = {hit.line: hit.evidence for key in keys if (hit := self.last(key))}
        return tuple(found[line] for line in sorted(found))


def scan(log: Iterable[bytes]) -> LoggedRun:
    """Find the known lines of the last start. `log`: the log in blocks of whole lines (see `blocks`)."""
    run = LoggedRun()
    line = 0
    for block in log:
        joined = 0  # lines up to this one belong to a command that was read already
        for number, start, end, found in _known_lines(block):
            if number <= joined:
                continue
            _take(run, found, line + number, decode(block[start:end]))
            command = run.last("command")
            if command and command.line == line + number and command.text.endswith("\\"):
                joined = number + _join(run, block[end + 1 : end + 1 + LINE_BYTES])
        line += block.count(b"\n") + (not block.endswith(b"\n"))
    if run.before and not run.failures and not run.has("version", "args", "namespace", "engine", "weights"):
        # The command was written below its log.
        hits, run.failures = run.before
        run.hits = hits | {"command": run.hits["command"]}
        run.starts -= 1
    run.lines = line
    return run


def _known_lines(block: bytes) -> Iterator[tuple[int, int, int, list[Pattern]]]:
    """Lines with a literal in them: number in the block from 1, start, end, patterns. Costs the hits only."""
    found: dict[int, list[Pattern]] = {}
    for pattern in PATTERNS:
        many = pattern.key in _ORDER or pattern.key in _ERRORS
        for start in _line_starts(block, pattern.needle, 8 * BUSY if many else BUSY):
            found.setdefault(start, []).append(pattern)
    number, counted = 1, 0
    for start in sorted(found):
        number, counted = number + block.count(b"\n", counted, start), start
        end = block.find(b"\n", start)
        yield number, start, end if end >= 0 else len(block), found[start]


def _line_starts(block: bytes, needle: bytes, most: int) -> list[int]:
    """Where lines with `needle` start; of more than 2 · `most` only those at both ends of the block."""
    starts: list[int] = []
    at = block.find(needle)
    while at >= 0 and len(starts) < most:
        starts.append(block.rfind(b"\n", 0, at) + 1)
        end = block.find(b"\n", at)
        at = block.find(needle, end) if end >= 0 else -1
    if at < 0:
        return starts
    late: list[int] = []
    end = len(block)
    while len(late) < most and (last := block.rfind(needle, at, end)) >= 0:
        late.append(block.rfind(b"\n", 0, last) + 1)
        end = late[-1]
    return starts + late[::-1]


def _take(run: LoggedRun, found: list[Pattern], number: int, text: str) -> None:
    for pattern in found:
        every = pattern.key in _REPEATED
        for match in pattern.regex.finditer(text):
            _keep(run, pattern, number, match, 8 * KEPT if every else KEPT)
            if not every:
                break


def _keep(run: LoggedRun, pattern: Pattern, number: int, match: re.Match[str], most: int) -> None:
    if pattern.key in _ORDER:
        _begin(run, pattern.key)
    groups = tuple(value or "" for value in match.groups())
    named = {name: value or "" for name, value in match.groupdict().items()}
    hits = run.hits.setdefault(pattern.key, [])
    if pattern.key in _ERRORS and any(hit.groups == groups for hit in hits):
        return
    if len(hits) >= most:
        del hits[most // 2]
    hits.append(Hit(number, match.string, match.start(), groups, named))
    if pattern.engine:
        run.engines.add(pattern.engine)
    if pattern.fails:
        run.failures.add(pattern.key)


def _begin(run: LoggedRun, key: str) -> None:
    """Take a line that opens a start: forget the start before, unless the line belongs to that."""
    reached = max((rank for name, rank in _ORDER.items() if run.has(name)), default=-1)
    rank = _ORDER[key]
    if key == "engine":  # every rank of a parallel start prints one, before it loads anything
        again = run.has("engine") and (run.has("weights") or bool(run.failures))
    else:
        again = rank <= reached
    if again:
        run.before = (dict(run.hits), set(run.failures)) if key == "command" else None
        for name in [name for name in run.hits if name not in _LASTING]:
            del run.hits[name]
        run.failures.clear()
        run.starts += 1
    run.starts = max(run.starts, 1)


def _join(run: LoggedRun, rest: bytes) -> int:
    """Join a command over several lines into its first one; returns the number of lines that it took."""
    hit = run.hits["command"].pop()
    words = hit.groups[0]
    taken = 0
    for raw in rest.split(b"\n", MAX_CONTINUED)[:MAX_CONTINUED]:
        if not words.endswith("\\"):
            break
        taken += 1
        words = words.rstrip("\\") + _PREFIX.sub("", decode(raw).removeprefix("> "))
    run.hits["command"].append(Hit(hit.line, hit.text, hit.start, (words.rstrip("\\"),), {}))
    return taken
