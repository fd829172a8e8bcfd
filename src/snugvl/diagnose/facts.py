"""The numbers of one run, gathered from its lines. Sizes are bytes; None: the log does not say."""

import json
import re
from dataclasses import dataclass
from typing import Final

from snugvl.diagnose import command as commands
from snugvl.diagnose import models
from snugvl.diagnose.command import Command
from snugvl.diagnose.models import Known
from snugvl.diagnose.result import Engine, Origin
from snugvl.diagnose.scan import Hit, Run

GIB: Final = 1 << 30
MIB: Final = 1 << 20
_UNITS: Final = {"bytes": 1, "B": 1} | {
    prefix + unit: 1 << power
    for unit in ("iB", "B")
    for prefix, power in zip("KMGT", (10, 20, 30, 40), strict=True)
}  # old versions wrote GB for GiB
_ENGINES: Final[tuple[Engine, ...]] = ("vllm", "ollama", "llama.cpp", "transformers", "pytorch")
MAX_BYTES: Final = 1 << 50  # beyond it a number is garbage, whatever its line looks like


@dataclass(frozen=True, slots=True)
class Value:
    """Bytes, where they come from, and the line."""

    nbytes: int
    origin: Origin = "measured"
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Card:
    """The GPU as whoever started the run saw it before, and computed vLLM's share from. Logs seldom say."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Facts:
    """A run in numbers. `overhead`: ceiling − weights − KV, so activations, encoder, context, libraries."""

    run: Run
    engine: Engine | None
    version: str | None
    model: str | None
    known: Known | None
    command: Command | None
    gpu: str | None
    wsl2: bool
    total: Value | None
    free: Value | None
    utilisation: float | None
    utilisation_given: bool
    ceiling: Value | None
    weights: Value | None
    non_torch: Value | None
    activation: Value | None
    graphs: Value | None
    kv: Value | None
    kv_needed: Value | None
    kv_token: Value | None
    context: int | None
    image_tokens: int | None
    card: Card | None = None

    @property
    def overhead(self) -> Value | None:
        """What profiling took beside the weights, or None."""
        if self.non_torch and self.activation:
            return Value(self.non_torch.nbytes + self.activation.nbytes, "measured", self.activation.line)
        if self.ceiling and self.weights and self.kv:
            return Value(self.ceiling.nbytes - self.weights.nbytes - self.kv.nbytes, "computed")
        return None

    @property
    def explicit_pixels(self) -> bool:
        """The command already bounds the pixels of an image."""
        given = self.command.get("--mm-processor-kwargs") if self.command else None
        return bool(given and re.search(r"max_pixels|longest_edge|size", given))


def size(number: str, unit: str = "GiB", hit: Hit | None = None) -> Value | None:
    """A number and its unit as bytes, or None for what is no sensible size."""
    try:
        nbytes = round(float(number) * _UNITS[unit])
    except (ValueError, OverflowError, KeyError):
        return None
    return Value(nbytes, "measured", hit.line if hit else None) if abs(nbytes) < MAX_BYTES else None


def sized(hit: Hit, group: int) -> Value | None:
    """The same of two neighbouring groups of a line."""
    return size(hit.groups[group], hit.groups[group + 1], hit)


def whole(text: str) -> int | None:
    """An integer of a log, commas allowed."""
    digits = text.replace(",", "")
    return int(digits) if digits.isdigit() and len(digits) <= 15 else None


def gather(run: Run, card: Card | None = None) -> Facts:
    """Everything that the lines of a run say. `card`: what is known of the GPU where they say nothing."""
    command = commands.find(run)
    engine = next((name for name in _ENGINES if name in run.engines), "vllm" if command else None)
    model = _model(run, command)
    known = models.find(model)
    utilisation, given = _utilisation(run, command, engine)
    total, free = _card(run)
    if total is None and card is not None:
        total, free = Value(card.total_bytes), Value(card.free_bytes)
    ceiling = _ceiling(run, total, utilisation, given)
    kv, needed, token, context = _cache(run, command, known)
    weights = _first_size(run, (("v0_parts", 0), ("weights", 0)))
    return Facts(
        run=run,
        engine=engine,
        version=_version(run),
        model=model,
        known=known,
        command=command,
        gpu=_gpu(run),
        wsl2=run.has("wsl", "resident", "dxg"),
        total=total,
        free=free,
        utilisation=utilisation,
        utilisation_given=given,
        ceiling=ceiling,
        weights=weights,
        non_torch=_first_size(run, (("v0_parts", 1),)),
        activation=_first_size(run, (("v0_parts", 2), ("summary", 5))),
        graphs=_first_size(run, (("graphs", 0), ("summary", 6), ("graphs_estimated", 0))),
        kv=kv,
        kv_needed=needed,
        kv_token=token,
        context=context,
        image_tokens=_image_tokens(run, known),
        card=card,
    )


def _first_size(run: Run, places: tuple[tuple[str, int], ...]) -> Value | None:
    for key, group in places:
        if (hit := run.last(key)) and group < len(hit.groups) and hit.groups[group]:
            return size(hit.groups[group], "GiB", hit)
    return None


def _version(run: Run) -> str | None:
    for key in ("version", "engine", "version_line", "ollama_version", "gguf_build"):
        if hit := run.last(key):
            return hit.groups[0][:40]
    return None


def _gpu(run: Run) -> str | None:
    for key in ("gpu", "ollama"):
        if hit := run.last(key):
            return hit.groups[0].strip()
    if hit := run.last("gguf_free"):
        return hit.groups[1].removeprefix("NVIDIA ")
    return None


def _model(run: Run, command: Command | None) -> str | None:
    if command and command.model:
        return command.model
    if hit := run.last("engine"):
        named = commands.arguments(hit.groups[1]).get("model")
        if isinstance(named, str):
            return named
    for key in ("loading", "gguf_name", "missing_model"):
        if (hit := run.last(key)) and hit.groups and hit.groups[0]:
            return hit.groups[0].strip("'\"").rstrip(".")
    return None


def _utilisation(run: Run, command: Command | None, engine: Engine | None) -> tuple[float | None, bool]:
    """The fraction of the card, and whether the log says it (otherwise: the version's default)."""
    for key, group in (("over_free", 2), ("v0_ceiling", 1), ("summary", 2), ("utilisation", 0)):
        if (hit := run.last(key)) and (value := _fraction(hit.groups[group])):
            return value, True
    given = command.get("--gpu-memory-utilization") if command else None
    if given and (value := _fraction(given)):
        return value, True
    if engine != "vllm":
        return None, False
    version = re.match(r"0\.(\d{1,4})", _version(run) or "")
    # 0.92 in 0.33; 0.9 in every release up to 0.12 at least. In between we have not looked.
    return (0.92 if version and int(version[1]) >= 20 else 0.9), False


def _fraction(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value <= 1 else None


def _card(run: Run) -> tuple[Value | None, Value | None]:
    """Total and free memory of the (first) GPU."""
    for key, total, free in (("over_free", 1, 0), ("summary", 1, 0), ("ollama", 1, 2)):
        if hit := run.last(key):
            return size(hit.groups[total], "GiB", hit), size(hit.groups[free], "GiB", hit)
    if hit := run.last("v0_ceiling"):
        return size(hit.groups[0], "GiB", hit), None
    if hit := run.last("oom_new"):
        return size(hit.groups[1], hit.groups[2], hit), None  # free after our own use: says nothing of before
    if hit := run.last("oom_old"):
        return size(hit.groups[1], hit.groups[2], hit), None
    if hit := run.first("smi_row"):
        used, total_mib = size(hit.groups[0], "MiB", hit), size(hit.groups[1], "MiB", hit)
        if used and total_mib and 0 < total_mib.nbytes >= used.nbytes:
            return total_mib, Value(total_mib.nbytes - used.nbytes, "measured", hit.line)
    if hit := run.last("gguf_free"):
        return None, size(hit.groups[2], "MiB", hit)
    return None, None


def _ceiling(run: Run, total: Value | None, utilisation: float | None, given: bool) -> Value | None:
    for key, group in (("over_free", 3), ("v0_ceiling", 2), ("summary", 3)):
        if hit := run.last(key):
            return size(hit.groups[group], "GiB", hit)
    if total is None or utilisation is None:
        return None
    return Value(round(total.nbytes * utilisation), "computed" if given else "inferred")


def _cache(
    run: Run, command: Command | None, known: Known | None
) -> tuple[Value | None, Value | None, Value | None, int | None]:
    """KV available, KV needed, KV of one token, tokens of context asked for."""
    available = _first_size(run, (("kv", 0), ("kv_short", 2), ("v0_parts", 3)))
    context = _context(run, command)
    eight = bool(command and (command.get("--kv-cache-dtype") or "").startswith("fp8"))
    token = Value(known.kv_bytes // (2 if eight else 1), "computed") if known else None
    needed = None
    if hit := run.last("kv_short"):
        needed, asked = size(hit.groups[1], "GiB", hit), whole(hit.groups[0])
        if needed and asked and token is None:
            token = Value(needed.nbytes // asked, "computed", hit.line)
    elif token and context:
        needed = Value(token.nbytes * context, "computed")
    if (hit := run.last("kv_tokens")) and available and token is None:
        tokens = whole(hit.groups[0])
        token = Value(available.nbytes // tokens, "computed", hit.line) if tokens else None
    return available, needed, token, context


def _context(run: Run, command: Command | None) -> int | None:
    for key in ("kv_short", "kv_short_tokens", "concurrency", "n_ctx"):
        if hit := run.last(key):
            return whole(hit.groups[0])
    if hit := run.last("autofit"):
        return whole(hit.groups[1])
    if command and (given := command.get("--max-model-len")):
        return whole(given)
    if hit := run.last("engine"):
        value = commands.arguments(hit.groups[1]).get("max_seq_len")
        return value if isinstance(value, int) else None
    return None


def _image_tokens(run: Run, known: Known | None) -> int | None:
    """Tokens of the image that the encoder was profiled with; a video counts as what the budget says."""
    if hit := run.last("encoder"):
        return whole(hit.groups[0])
    return None


def pixels(command: Command | None) -> int | None:
    """`max_pixels` of the command's --mm-processor-kwargs."""
    given = command.get("--mm-processor-kwargs") if command else None
    try:
        value = json.loads(given) if given else None
    except ValueError:
        return None
    found = value.get("max_pixels") if isinstance(value, dict) else None
    return found if isinstance(found, int) else None
