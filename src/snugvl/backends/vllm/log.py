"""vLLM's log: its form, and its measurements.

Lines are those of vLLM 0.20 to 0.33; what the numbers mean is read by `diagnose`.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from textwrap import shorten
from typing import Final

from snugvl.backends.spawned import LogForm
from snugvl.diagnose.facts import Value, gather
from snugvl.diagnose.scan import blocks, scan

_PREFIX: Final = r"^(?:\([^)]{1,80}\) )?(?:[A-Z]{4,8} \d\d-\d\d [\d:.]+ \[[^\]]*\] )?"
# What was raised, not the traceback before it.
_FAILED: Final = r"[\w.]*(?:Error|Exception)\b|terminate called|Segmentation fault|.*\berror: "
_STAGES: Final = (
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

# pydantic says on the next lines what is wrong: a field at the margin where there is one, its message
# indented by two, and by four where to read more.
_VALIDATION: Final = re.compile(r".*\b\d+ validation errors? for ")
_DETAILS: Final = re.compile(r" \[type=\w+.*")
MAX_SAID: Final = 300  # characters of a message


class _VllmForm(LogForm):
    def exception_lines(self, lines: Sequence[str]) -> list[str]:
        """As of any log; a validation's lines come with its messages."""
        rest = [self.plain(line) for line in lines]
        return [
            "; ".join([line, *_messages(rest[number + 1 :])]) if _VALIDATION.match(line) else line
            for number, line in enumerate(rest)
            if self.is_error(line)
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
        elif field or FORM.is_error(line):
            return
        else:
            field = line


FORM: Final = _VllmForm(_PREFIX, _FAILED, _STAGES)


@dataclass(frozen=True, slots=True)
class Measured:
    """Memory that vLLM's log reports, in bytes of one GPU; None for figures that it doesn't have.

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
