"""Why a process ended, in a sentence: its signal or exit code, and the cause where its last words tell."""

import re
import signal
from collections import deque
from typing import Final

KEPT_LINES = 40
MAX_LINE = 500  # characters; what a library prints beyond is no sentence

# What the last lines say → what it means. The first that matches counts.
_CAUSES: Final = (
    (r"CUDA out of memory|OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation",
     "the GPU's memory ran out; another program may have taken it"),
    (r"MemoryError|std::bad_alloc|can't allocate memory|Cannot allocate memory",
     "host memory ran out"),
    (r"uncorrectable ECC|Xid|fallen off the bus|device unavailable",
     "the GPU reported a hardware fault"),
    (r"device-side assert|illegal memory access|misaligned address|unspecified launch failure",
     "a GPU kernel failed"),
    (r"driver version is insufficient|driver too old|no kernel image is available",
     "the NVIDIA driver is too old for this torch, or the GPU for its kernels"),
    (r"No CUDA GPUs are available|no CUDA-capable device|CUDA unknown error|Driver/library version mismatch",
     "CUDA can't reach the GPU"),
    (r"No module named|cannot open shared object file", "the installation is incomplete"),
)  # fmt: skip
_ERROR_LINE: Final = re.compile(r"(?i)[\w.]*(?:error|exception)\b.*: |terminate called|.*\berror:")
# The traceback that faulthandler prints after a signal says where, not why.
_TRACEBACK: Final = re.compile(r'Fatal Python error|(?:Current )?[Tt]hread 0x|  File "|Extension modules:')
# Of "out of memory": what torch says of other processes and of its own settings.
_TENANTS: Final = re.compile(r" GPU \d+ has a total capacity.*")


class LastWords:
    """The last lines that a process wrote."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._partial = ""

    def feed(self, text: str) -> list[str]:
        """Take output in any pieces; the lines that it completes."""
        *lines, rest = (self._partial + text).split("\n")
        self._partial = rest[-MAX_LINE:]
        lines = [line.rstrip()[:MAX_LINE] for line in lines if line.strip()]
        self._lines.extend(lines)
        return lines

    @property
    def lines(self) -> tuple[str, ...]:
        """Oldest first."""
        return (*self._lines, self._partial) if self._partial.strip() else tuple(self._lines)


def describe(returncode: int | None, lines: tuple[str, ...]) -> str:
    """How a process ended and, where its last lines tell, why; no full stop at the end."""
    return _how(returncode) + _why(returncode, lines)


def _how(returncode: int | None) -> str:
    if returncode is None:
        return "the engine process broke the connection"
    if returncode >= 0:
        return f"the engine process ended with exit code {returncode}"
    try:
        name = f", {signal.Signals(-returncode).name}"
    except ValueError:  # a real-time signal
        name = ""
    return f"the engine process died (signal {-returncode}{name})"


def _why(returncode: int | None, lines: tuple[str, ...]) -> str:
    text = "\n".join(lines)
    cause = next((meaning for pattern, meaning in _CAUSES if re.search(pattern, text)), None)
    if cause is None and returncode == -signal.SIGKILL and not lines:
        cause = "killed from outside, perhaps by the system because host memory ran out"
    lines = tuple(line for line in lines if not _TRACEBACK.match(line))
    said = [line for line in lines if _ERROR_LINE.match(line)] or list(lines)
    quoted = f' (it said: "{_TENANTS.sub("", said[-1])}")' if said else ""
    return (f": {cause}" if cause else "") + quoted
