"""vLLM's log as it is written: how far its start is, and what it says it measured.

Lines are those of vLLM 0.20 to 0.33; what the numbers mean is read by `diagnose`. A progress bar rewrites one
line, so a carriage return ends a line too.
"""

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from textwrap import shorten
from typing import Final

from snugvl.diagnose.facts import Value, gather
from snugvl.diagnose.scan import blocks, scan

HEAD_LINES: Final = 300  # the command, the version, the arguments
TAIL_LINES: Final = 600
MAX_LINE: Final = 8000  # the list of arguments is one line

_PREFIX: Final = re.compile(r"^(?:\([^)]{1,80}\) )?(?:[A-Z]{4,8} \d\d-\d\d [\d:.]+ \[[^\]]*\] )?")
_END: Final = re.compile(r"[\r\n]")


@dataclass(frozen=True, slots=True)
class Stage:
    """Where a start is. `progress`: of all of it, from 0 to 1."""

    detail: str
    progress: float


# What a line says → what is being done now, and from where to where on the way. A percentage in the pattern
# is how far between the two.
_STAGES: Final[tuple[tuple[str, str, float, float], ...]] = (
    (r"vLLM API server version|version \d+\.\d+|non-default args", "vLLM reads its arguments", 0.05, 0.05),
    (r"Resolved architecture", "vLLM knows the model", 0.10, 0.10),
    (r"LLM engine \(v", "the engine process is up", 0.15, 0.15),
    (r"Starting to load model", "loading the weights", 0.20, 0.20),
    (r"Loading safetensors .*?(\d{1,3})% Completed", "loading the weights", 0.20, 0.60),
    (r"odel loading took", "measuring what a step needs", 0.60, 0.60),
    (r"Encoder cache will be initialized", "measuring what an image needs", 0.63, 0.63),
    (r"Dynamo bytecode|ompiling a graph|Directly load the compiled", "compiling", 0.66, 0.66),
    (r"Available KV cache memory|KV cache size:", "the KV cache is there", 0.80, 0.80),
    (r"Capturing CUDA graphs?.*?(\d{1,3})%", "capturing CUDA graphs", 0.82, 0.94),
    (r"raph capturing finished", "CUDA graphs are captured", 0.94, 0.94),
    (r"init engine \(profile", "the engine is ready", 0.96, 0.96),
    (r"Starting vLLM (?:API )?server", "the server starts", 0.98, 0.98),
)  # fmt: skip
_PATTERNS: Final = tuple((re.compile(stage[0]), *stage[1:]) for stage in _STAGES)
# What was raised, not the traceback before it.
_FAILED: Final = re.compile(r"[\w.]*(?:Error|Exception)\b|terminate called|Segmentation fault|.*\berror: ")

# pydantic says on the next lines what is wrong: a field at the margin where there is one, its message
# indented by two, and by four where to read more.
_VALIDATION: Final = re.compile(r".*\b\d+ validation errors? for ")
_DETAILS: Final = re.compile(r" \[type=\w+.*")
MAX_SAID: Final = 300  # characters of a message


class Log:
    """The lines of one life: the first and the last, as many as a diagnosis needs."""

    def __init__(self) -> None:
        self._head: list[str] = []
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._partial = ""
        self._count = 0
        self._marks = (0, 0)  # lines at the last two times when all was well
        self.was_well = False
        self.stage: Stage | None = None

    def feed(self, text: str) -> list[str]:
        """Take output in any pieces; the lines that it completes."""
        *lines, rest = _END.split(self._partial + text)
        self._partial = rest[-MAX_LINE:]
        lines = [line.rstrip()[:MAX_LINE] for line in lines if line.strip()]
        for line in lines:
            self._keep(line)
        return lines

    @property
    def lines(self) -> tuple[str, ...]:
        """Oldest first; of a long log the middle is missing."""
        rest = (self._partial,) if self._partial.strip() else ()
        return (*self._head, *self._tail, *rest)

    @property
    def fresh(self) -> tuple[str, ...]:
        """The lines since all was well: since the start, before `all_is_well` was called twice."""
        return self.lines[-max(self._count - self._marks[0], 1) :] if self._count else self.lines

    def all_is_well(self) -> None:
        """Told while it serves: what was written before the last time but one is no reason of a death now."""
        self.was_well = True
        self._marks = (self._marks[1], self._count)

    @property
    def last(self) -> str:
        """The last line, without its prefix."""
        return plain(self.lines[-1]) if self.lines else ""

    def _keep(self, line: str) -> None:
        self._count += 1
        if len(self._head) < HEAD_LINES:
            self._head.append(line)
        else:
            self._tail.append(line)
        found = stage_of(line)
        # A parallel start says everything once a process; what is behind us stays behind us.
        if found is not None and (self.stage is None or found.progress >= self.stage.progress):
            self.stage = found


def stage_of(line: str) -> Stage | None:
    """What a line says about the start, or None."""
    for pattern, detail, begin, end in _PATTERNS:
        if match := pattern.search(line):
            if not pattern.groups:
                return Stage(detail, begin)
            percent = min(int(match[1]), 100)
            return Stage(f"{detail} ({percent} %)", begin + (end - begin) * percent / 100)
    return None


def plain(line: str) -> str:
    """A line without the process, the time and the file that vLLM puts before it."""
    return _PREFIX.sub("", line)


def is_error(line: str) -> bool:
    """Whether a line says what failed."""
    return _FAILED.match(plain(line)) is not None


def exception_lines(lines: Sequence[str]) -> list[str]:
    """The lines of a log that say what failed, without their prefixes; a validation's with its messages."""
    rest = [plain(line) for line in lines]
    return [
        "; ".join([line, *_messages(rest[number + 1 :])]) if _VALIDATION.match(line) else line
        for number, line in enumerate(rest)
        if is_error(line)
    ]


def _messages(lines: Sequence[str]) -> Iterator[str]:
    field = ""
    for line in lines:
        if line.startswith("    "):
            continue
        if line.startswith("  "):
            message = shorten(_DETAILS.sub("", line), MAX_SAID)
            yield f"{field}: {message}" if field else message
            field = ""
        elif field or is_error(line):
            return
        else:
            field = line


@dataclass(frozen=True, slots=True)
class Measured:
    """What vLLM said it took, in bytes of one GPU; None for what it did not say.

    Attributes:
        loaded: "Model loading took": weights, and the buffers made with them.
        kv: "Available KV cache memory".
        graphs: of the CUDA graphs.
        activation: the largest step of the start's trial run.
        kv_tokens: "GPU KV cache size".
    """

    loaded: int | None = None
    kv: int | None = None
    graphs: int | None = None
    activation: int | None = None
    kv_tokens: int | None = None


def read_measurements(lines: tuple[str, ...]) -> Measured:
    """The figures of a start."""
    run = scan(blocks(BytesIO("\n".join(lines).encode("utf-8", "replace"))))
    facts = gather(run)
    tokens = run.last("kv_tokens")
    return Measured(
        loaded=_bytes(facts.weights),
        kv=_bytes(facts.kv),
        graphs=_bytes(facts.graphs),
        activation=_bytes(facts.activation),
        kv_tokens=int(tokens.groups[0].replace(",", "")) if tokens else None,
    )


def _bytes(value: Value | None) -> int | None:
    return None if value is None else value.nbytes
