"""The numbers of one run, gathered from its lines. Sizes are bytes; None: the log does not say."""

import re
from dataclasses import dataclass
from functools import cache
from typing import Final

from snugvl.checkpoint.catalogue import catalogue_facts, entries
from snugvl.checkpoint.locate import POCKET
from snugvl.diagnose import command as commands
from snugvl.diagnose.command import LoggedCommand
from snugvl.diagnose.result import Engine, Origin
from snugvl.diagnose.scan import Hit, LoggedRun
from snugvl.planner.footprint.kv import block_bytes
from snugvl.planner.footprint.vision import encoder_bytes_per_token, largest_image, scales, vllm_workspace
from snugvl.planner.footprint.weights import weight_bytes
from snugvl.planner.inventory import Inventory, inventory
from snugvl.planner.settings import BLOCK_TOKENS, Settings

_UNITS: Final = {"bytes": 1, "B": 1} | {
    prefix + unit: 1 << power
    for unit in ("iB", "B")
    for prefix, power in zip("KMGT", (10, 20, 30, 40), strict=True)
}  # old versions wrote GB for GiB
_ENGINES: Final[tuple[Engine, ...]] = ("vllm", "ollama", "llama.cpp", "transformers", "pytorch")
CONTEXT_AT_MOST: Final = 2 << 30  # of one process beside its tensors: context, libraries, graphs
MAX_BYTES: Final = 1 << 50  # beyond it a number is garbage, whatever its line looks like


@dataclass(frozen=True, slots=True)
class Value:
    """A number of bytes with its origin and its line in the log."""

    nbytes: int
    origin: Origin = "measured"
    line: int | None = None


@dataclass(frozen=True, slots=True)
class HeldByOthers:
    """GPU memory that other processes hold at a failure, as PyTorch's message says.

    Attributes:
        nbytes: bytes in all, as far as the message tells.
        processes: bytes of each process that it names, by process id.
        ours_bytes: bytes of the process that failed; a lower bound where only its tensors are counted.
    """

    nbytes: int
    processes: tuple[tuple[str, int], ...]
    ours_bytes: int


@dataclass(frozen=True, slots=True)
class Card:
    """The GPU before the run, as the caller knows it: vLLM's share is of it, and logs seldom have it."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class KnownModel:
    """A model of the catalogue that a log names, with the planner's figures for it under vLLM.

    Attributes:
        repo: its Hub id in the catalogue.
        as_published: False for an edition of other weights (AWQ, GGUF …): its cache and images are the same.
        untied_bytes: bytes of a stored lm_head that the model ties, or 0.
    """

    repo: str
    as_published: bool
    model: Inventory
    untied_bytes: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values of one token in bf16."""
        return block_bytes(self.model, Settings("vllm")) // BLOCK_TOKENS

    @property
    def weights_bytes(self) -> int | None:
        """Bytes of its weights as vLLM loads them; None for another edition."""
        if not self.as_published:
            return None
        fp8 = self.model.facts.quantization == "fp8"
        return weight_bytes(self.model, Settings("vllm", "fp8" if fp8 else "bf16"))

    @property
    def max_image_tokens(self) -> int:
        """Tokens of the largest image that the checkpoint allows; 0 for a text model."""
        return largest_image(self.model, None).tokens

    @property
    def profile_bytes(self) -> int:
        """Bytes of vLLM's encoder profile and output, per image token; 0 where pixels do not decide it."""
        image = largest_image(self.model, None)
        if not image.tokens or not self.pixels_per_token:
            return 0
        return vllm_workspace(self.model, image) // image.tokens + encoder_bytes_per_token(self.model)

    @property
    def pixels_per_token(self) -> int:
        """Pixels behind one image token, or 0 where pixels do not decide."""
        vision = self.model.facts.vision
        return (vision.patch_size * vision.merge_size) ** 2 if vision and scales(self.model) else 0


_OTHER_EDITION: Final = re.compile(r"awq|gptq|int[48]|[48]bit|bnb|nvfp4|w[48]a\d|gguf|\bq\d_", re.IGNORECASE)
_NAME_ENDS: Final = re.compile(r"(-(instruct|chat|hf|it|fp8|2507))+$")


@cache
def known_model(name: str | None) -> KnownModel | None:
    """The model of the catalogue for a Hub id, a path or a GGUF's name, or None."""
    plain = _letters(name or "").replace("metallama", "llama")
    found, longest = None, ""
    for entry in entries():
        key = _letters(_NAME_ENDS.sub("", entry.name.rpartition("/")[2].lower()))
        if entry.name != POCKET and key in plain and len(key) > len(longest):
            found, longest = entry, key
    if found is None or name is None:
        return None
    fp8 = [form for form in found.forms if form.quantization == "fp8"] if "fp8" in plain else []
    form = (fp8 or found.forms)[0]
    facts = catalogue_facts(form.repo)
    if facts is None:
        return None
    published = not _OTHER_EDITION.search(name) and ("fp8" not in plain or bool(fp8))
    head = facts.text.vocab_size * facts.text.hidden_size * 2 if form.stores_head and facts.tied else 0
    return KnownModel(form.repo, published, inventory(facts), head)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@dataclass(frozen=True, slots=True)
class RunFacts:
    """A run in numbers. `overhead`: ceiling − weights − KV, so activations, encoder, context, libraries."""

    run: LoggedRun
    engine: Engine | None
    version: str | None
    model: str | None
    known: KnownModel | None
    command: LoggedCommand | None
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
    held: HeldByOthers | None = None
    card: Card | None = None

    @property
    def overhead(self) -> Value | None:
        """Bytes that vLLM's profile takes beside weights and KV cache, or None."""
        if self.non_torch and self.activation:
            return Value(self.non_torch.nbytes + self.activation.nbytes, "measured", self.activation.line)
        if self.ceiling and self.weights and self.kv:
            return Value(self.ceiling.nbytes - self.weights.nbytes - self.kv.nbytes, "computed")
        return None

    @property
    def explicit_pixels(self) -> bool:
        """Whether the command already bounds the pixels of an image."""
        given = self.command.get("--mm-processor-kwargs") if self.command else None
        return bool(given and re.search(r"max_pixels|longest_edge|size", given))


def size(number: str, unit: str = "GiB", hit: Hit | None = None) -> Value | None:
    """A number and its unit as bytes, or None where that is not a sensible size."""
    try:
        nbytes = round(float(number) * _UNITS[unit])
    except (ValueError, OverflowError, KeyError):
        return None
    return Value(nbytes, "measured", hit.line if hit else None) if abs(nbytes) < MAX_BYTES else None


def sized(hit: Hit, group: int) -> Value | None:
    """Size in bytes from two neighbouring groups of a line: number and unit."""
    return size(hit.groups[group], hit.groups[group + 1], hit)


def whole(text: str) -> int | None:
    """An integer of a log, commas allowed."""
    digits = text.replace(",", "")
    return int(digits) if digits.isdigit() and len(digits) <= 15 else None


def gather(run: LoggedRun, card: Card | None = None) -> RunFacts:
    """The facts in all lines of a run. `card`: facts of the GPU, used where the lines have none."""
    command = commands.find(run)
    engine = next((name for name in _ENGINES if name in run.engines), "vllm" if command else None)
    model = _model(run, command)
    known = known_model(model)
    utilisation, given = _utilisation(run, command, engine)
    total, free = _card(run)
    if total is None and card is not None:
        total, free = Value(card.total_bytes), Value(card.free_bytes)
    ceiling = _ceiling(run, total, utilisation, given)
    kv, needed, token, context = _cache(run, command, known)
    weights = _first_size(run, (("v0_parts", 0), ("weights", 0)))
    return RunFacts(
        run=run,
        engine=engine,
        version=run.version,
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
        image_tokens=whole(hit.groups[0]) if (hit := run.last("encoder")) else None,
        held=held_by_others(run),
        card=card,
    )


def held_by_others(run: LoggedRun) -> HeldByOthers | None:
    """Memory of other processes, from the last out-of-memory message; None where that has none."""
    hit, last = run.last("oom_new"), run.last("oom_others")
    parts, process = run.last("oom_parts"), run.last("oom_process")
    total, free = (sized(hit, 1), sized(hit, 3)) if hit else (None, None)
    tensors = sum(value.nbytes for at in (0, 4) if parts and (value := sized(parts, at)))
    named = {
        each.groups[0]: value.nbytes
        for each in run.all("oom_others")
        if last and each.line == last.line and (value := sized(each, 1))
    }
    mine = value.nbytes if process and (value := sized(process, 0)) else 0
    if not mine and named and tensors:
        # In a container PyTorch does not know its own process by its number.
        own = min((pid for pid in named if named[pid] >= tensors), key=named.__getitem__, default=None)
        if own and (len(named) == 1 or named[own] - tensors < CONTEXT_AT_MOST):
            mine = named.pop(own)
    if not mine and not named:
        return None
    rest = total.nbytes - free.nbytes - (mine or tensors) if total and free and mine else 0
    if total and mine > total.nbytes:
        rest = 0  # more than the card has: the rest is system memory, and says nothing of others
    return HeldByOthers(max(rest, sum(named.values()), 0), tuple(named.items()), mine or tensors)


def _first_size(run: LoggedRun, places: tuple[tuple[str, int], ...]) -> Value | None:
    for key, group in places:
        if (hit := run.last(key)) and group < len(hit.groups) and hit.groups[group]:
            return size(hit.groups[group], "GiB", hit)
    return None


def _gpu(run: LoggedRun) -> str | None:
    for key in ("gpu", "ollama"):
        if hit := run.last(key):
            return hit.groups[0].strip()
    if hit := run.last("gguf_free"):
        return hit.groups[1].removeprefix("NVIDIA ")
    return None


def _model(run: LoggedRun, command: LoggedCommand | None) -> str | None:
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


def _utilisation(
    run: LoggedRun, command: LoggedCommand | None, engine: Engine | None
) -> tuple[float | None, bool]:
    """(utilisation, whether the log has it); without it in the log, the version's default."""
    for key, group in (("over_free", 2), ("v0_ceiling", 1), ("summary", 2), ("utilisation", 0)):
        if (hit := run.last(key)) and (value := _fraction(hit.groups[group])):
            return value, True
    given = command.get("--gpu-memory-utilization") if command else None
    if given and (value := _fraction(given)):
        return value, True
    if engine != "vllm":
        return None, False
    version = re.match(r"0\.(\d{1,4})", run.version or "")
    # 0.92 in 0.33; 0.9 in every release up to 0.12 at least. In between we have not looked.
    return (0.92 if version and int(version[1]) >= 20 else 0.9), False


def _fraction(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value <= 1 else None


def _card(run: LoggedRun) -> tuple[Value | None, Value | None]:
    """(total, free) memory of the first GPU."""
    for key, total, free in (("over_free", 1, 0), ("summary", 1, 0), ("ollama", 1, 2)):
        if hit := run.last(key):
            return size(hit.groups[total], "GiB", hit), size(hit.groups[free], "GiB", hit)
    if hit := run.last("v0_ceiling"):
        return size(hit.groups[0], "GiB", hit), None
    if hit := run.last("oom_new"):
        whole_card, held = size(hit.groups[1], hit.groups[2], hit), held_by_others(run)
        if whole_card and held and 0 < held.ours_bytes <= whole_card.nbytes:  # the rest is free without us
            return whole_card, Value(max(whole_card.nbytes - held.nbytes, 0), "computed", hit.line)
        return whole_card, None
    if hit := run.last("oom_old"):
        return size(hit.groups[1], hit.groups[2], hit), None
    if hit := run.first("smi_row"):
        used, total_mib = size(hit.groups[0], "MiB", hit), size(hit.groups[1], "MiB", hit)
        if used and total_mib and 0 < total_mib.nbytes >= used.nbytes:
            return total_mib, Value(total_mib.nbytes - used.nbytes, "measured", hit.line)
    if hit := run.last("gguf_free"):
        return None, size(hit.groups[2], "MiB", hit)
    return None, None


def _ceiling(run: LoggedRun, total: Value | None, utilisation: float | None, given: bool) -> Value | None:
    for key, group in (("over_free", 3), ("v0_ceiling", 2), ("summary", 3)):
        if hit := run.last(key):
            return size(hit.groups[group], "GiB", hit)
    if total is None or utilisation is None:
        return None
    return Value(round(total.nbytes * utilisation), "computed" if given else "inferred")


def _cache(
    run: LoggedRun, command: LoggedCommand | None, known: KnownModel | None
) -> tuple[Value | None, Value | None, Value | None, int | None]:
    """(KV available, KV needed, KV of one token, tokens of the context asked for)."""
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


def _context(run: LoggedRun, command: LoggedCommand | None) -> int | None:
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
