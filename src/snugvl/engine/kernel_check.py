"""Every kernel that an engine will use, once, at its real shapes, beside plain torch.

    network of the job's outline, with random weights, one layer of each kind ─► the steps of a rehearsal
       └► a door: kernels ─┬─ equal? ─► next
                    torch ─┘    └► which kernel is it? ─► withdrawn, and what takes its place is looked at

A door is a function that has both: kernels on a GPU, and plain torch that says what they mean. Whenever one
is to launch a variant that was not checked yet, it is run by kernels and by torch on copies of the same
inputs. Outputs, and all that it writes over, must agree as far as in the kernels' tests: in 16 bits, and
where a cache has 8, what is rounded last differs. What launches nothing is torch's own.

For a process of its own on the GPU: a kernel may never return, or take its process along. So each is named
before it is launched, and waited for. Weights of the same shape are one tensor, so the memory is that of a
layer of each kind, an embedding and a step's workspace: a part of what the plan has, before weights are read.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, is_dataclass, replace
from functools import partial, wraps
from subprocess import SubprocessError
from types import ModuleType
from typing import Any, Final

import torch
from torch import nn

from snugvl.core.formats import FEW_BITS, FORMATS
from snugvl.core.kernel_checks import OK, UNCHECKED, KernelVerdict
from snugvl.engine import batch
from snugvl.engine.graphs import decode as decode_graphs
from snugvl.engine.precompile import MOST_BEFORE, CompileJob, fresh, network_from, rehearse
from snugvl.engine.sampling import filters
from snugvl.layers import attention, experts, weights
from snugvl.layers.device import out_of_memory
from snugvl.layers.kv_cache import E4M3, KVCache, StateCache
from snugvl.layers.linear import Linear, RMSNorm
from snugvl.layers.replaced import plainly, usable, withdraw, without
from snugvl.layers.weights import FormatName
from snugvl.models import decoder, linear_attention, patches, rope, vision_blocks
from snugvl.models.networks import LoadableNetwork

# How far kernels may be from torch: the norm of the difference, as a share of the norm of torch's.
CLOSE: Final = {torch.float64: 1e-3, torch.float32: 5e-3, torch.bfloat16: 0.02, torch.float16: 0.01}
STATES_CLOSE: Final = 0.04  # of the delta rule, whose products are in 16 bits where torch's are in float32
FP8_CLOSE: Final = 0.06  # of a cache in e4m3, whose steps are an eighth
ONE_CLOSE: Final = 8  # times as far may one value be, of the largest one
Door = tuple[Any, str]  # an owner, and the name of what it has
# What has kernels and their twin in one place.
DOORS: Final[tuple[Door, ...]] = (
    (Linear, "forward"), (Linear, "with_tail"), (Linear, "lookup"), (Linear, "_dequantize"),
    (RMSNorm, "forward"), (attention.AttentionMetadata, "token_by_token"), (attention, "paged_attention"),
    (decoder.Attention, "_queries"), (linear_attention.GatedDeltaNet, "_attend"), (rope, "rotation_of"),
    (patches.Rotation, "rotate"), (vision_blocks, "_added"), (decode_graphs, "places"),
    (experts, "scored"), (experts, "chosen"), (experts.Experts, "forward"), (experts, "added"),
    (decode_graphs, "choose"), (batch, "likeliest"), (filters, "_kept"),
)  # fmt: skip
Tell = Callable[[str | KernelVerdict], None]


def check_kernels(job: CompileJob, device: torch.device, tell: Tell) -> int:
    """Look at all kernels of a job; `tell` gets each one's name before it is launched, then verdicts.

    Wrong ones are also withdrawn in this process. Returns bytes that the driver took meanwhile, which
    are kernels, their local memory and libraries; −1 where there is no GPU.
    """
    taken = _driver_bytes(device)
    withdraw(job.withdrawn)
    network = network_from(job.outline)
    give_values(network, device)
    _renumber(network)
    each = -(-(MOST_BEFORE + 1) // job.engine.block_size)
    longest = -(-(MOST_BEFORE + job.engine.max_batched_tokens) // job.engine.block_size)
    sizes = replace(job.engine, num_blocks=max(longest, each * job.engine.max_num_seqs))
    few = {linear.format for linear in network.modules() if isinstance(linear, Linear)} & set(FEW_BITS)
    checker = Checker(tell)
    with torch.inference_mode(), checker:
        for name in sorted(few):
            rounded(fresh((64, 512), torch.float32, device), name)
        with suppress(_Stuck):
            rehearse(network, sizes)
    return max(_driver_bytes(device) - taken, -1)


def _driver_bytes(device: torch.device) -> int:
    """Bytes of a GPU's memory that are neither free nor torch's; 0 without a GPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


class _Stuck(Exception):
    """Neither kernels nor torch could do a part of a step, mostly for want of memory."""


def rounded(values: torch.Tensor, kind: FormatName) -> torch.Tensor:
    """How far rows of `values` are from what rounding leaves of them: equal, whichever code a tie took."""
    made = weights.to_few_bits(values, kind, FORMATS[kind].group)
    apart: torch.Tensor = torch.linalg.vector_norm(made.wide(torch.float32) - values, dim=1)
    return apart


class Checker:
    """Runs what has kernels by kernels and by torch. Within it the doors of this process are watched."""

    def __init__(self, tell: Tell, doors: Sequence[Door] = DOORS) -> None:
        self._tell, self._doors = tell, doors
        self._seen: set[object] = set()
        self._begun: set[object] = set()
        self._good: set[str] = set()  # kernels of which some variant was right
        self._launched: dict[object, tuple[str, str]] = {}  # by the last run: variants, kernel and shape
        self._inside = False
        self._undo = ExitStack()

    def __enter__(self) -> "Checker":
        from snugvl.layers.kernels.compiler.launch import watched  # needs triton, which only GPUs bring

        self._undo.enter_context(watched(self._launch))
        for owner, name in (*self._doors, (sys.modules[__name__], "rounded")):
            self._undo.enter_context(_replaced(owner, name, self._door))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _door(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return call(*args, **kwargs)
            self._inside = True
            try:
                return self._checked(partial(call, *args, **kwargs), (args, kwargs))
            finally:
                self._inside = False

        return watched

    def _launch(self, name: str, variant: object, shape: str, launch: Callable[[], None]) -> None:
        """One launch. Those of a new variant are waited for, so that it is known which one doesn't return."""
        new = (name, variant) not in self._begun
        self._launched.setdefault((name, variant), (name, shape))
        if new:
            self._begun.add((name, variant))
            self._tell(name)
        launch()
        if new:
            _wait()

    def _checked(self, run: Callable[[], Any], given: object) -> Any:
        inputs = [tensor for tensor, _ in _tensors(given)]
        before = [tensor.clone() for tensor in inputs]

        def again(call: Callable[[], Any] = run) -> tuple[Any, list[tuple[torch.Tensor, float]]]:
            """Result of the inputs as they were, and copies of it and of what was written over."""
            for tensor, copy in zip(inputs, before, strict=True):
                tensor.copy_(copy)
            self._launched = {}
            result = call()
            _wait()
            made, place = list(_tensors(result)), {tensor.data_ptr() for tensor, _ in _tensors(result)}
            # An input that the result takes the place of may be left as it was.
            made += [(t, math.inf if t.data_ptr() in place else close) for t, close in _tensors(given)]
            return result, [(tensor.clone(), close) for tensor, close in made]

        def plain() -> Any:
            with plainly():
                return run()

        while True:
            result, ours, wrong = None, None, ""
            try:
                result, ours = again()
            except Exception as error:
                _wait()  # raises where the GPU's context is lost, which ends this process
                wrong = _named(error)
            launched = dict(self._launched)
            if not (launched.keys() - self._seen) and not wrong:
                return result
            names = list(dict.fromkeys(name for name, _ in launched.values()))
            try:
                twins = again(plain)[1]
            except Exception as error:
                why = _named(error).removeprefix(f"{UNCHECKED}: ")
                self._say(launched, None, 0.0, f"{UNCHECKED}: plain torch's twin: {why}")
                if ours is None:
                    raise _Stuck from None
                return again()[0]
            worst = None
            if ours is not None:
                worst, wrong = compared(ours, twins)
            if not wrong or wrong.startswith(UNCHECKED) or not names:
                begun = time.perf_counter()
                found = again(plain if ours is None else run)[0]
                self._say(launched, worst, 1000 * (time.perf_counter() - begun), wrong or OK)
                return found
            if not usable(*names):
                raise AssertionError(f"{names} run though they are withdrawn")
            self._replace(names, launched, again, twins, worst, wrong)

    def _replace(
        self, names: list[str], launched: dict[object, tuple[str, str]],
        again: Callable[[], tuple[Any, list[tuple[torch.Tensor, float]]]],
        twins: list[tuple[torch.Tensor, float]], worst: float | None, wrong: str,
    ) -> None:  # fmt: skip
        """Withdraw each kernel of these without which the door is right.

        Where there is none: the one that raised, or those that were right nowhere yet, or all.
        """
        guilty = set()
        for name in names if len(names) > 1 else ():
            with without((name,)), suppress(Exception):
                if not compared(again()[1], twins)[1]:
                    guilty.add(name)
        if not guilty:
            guilty = {names[-1]} if worst is None else set(names) - self._good or set(names)
        withdraw(guilty)
        mine = {key: each for key, each in launched.items() if each[0] in guilty}
        self._say(mine, worst, 0.0, wrong)

    def _say(
        self, launched: dict[object, tuple[str, str]], worst: float | None, ms: float, verdict: str
    ) -> None:
        worst = -1.0 if worst is None else worst
        for key, (name, shape) in launched.items():
            if key not in self._seen:
                self._seen.add(key)
                if verdict == OK:
                    self._good.add(name)
                self._tell(KernelVerdict(name, shape, float(f"{worst:.2g}"), round(ms, 3), verdict))


def compared(
    ours: list[tuple[torch.Tensor, float]], twins: list[tuple[torch.Tensor, float]]
) -> tuple[float, str]:
    """The largest of the errors, as a share of what torch found; what is wrong, or "" where nothing is."""
    worst, wrong = 0.0, ""
    for (mine, close), (right, other) in zip(ours, twins, strict=True):
        if math.isinf(max(close, other)):
            continue
        if not right.is_floating_point():
            if not torch.equal(mine, right):
                wrong = wrong or f"{int((mine != right).sum())} of {right.numel()} whole numbers differ"
            continue
        right = right.float()
        there = right.isfinite()
        mine = torch.where(there, mine.float(), 0.0)
        right = torch.where(there, right, 0.0)
        if not mine.isfinite().all():
            worst, wrong = -1.0, "not finite"
            break
        difference = mine - right
        error = _share(difference.norm(), right.norm())
        worst = max(worst, error)
        if error > close or _share(difference.abs().amax(), right.abs().amax()) > ONE_CLOSE * close:
            wrong = wrong or "not equal to plain torch"
    return worst, wrong


def _share(part: torch.Tensor, whole: torch.Tensor) -> float:
    return float(part) / max(float(whole), 1e-12)


def _named(error: Exception) -> str:
    """The kind of an error, without its message, which may name this machine's folders."""
    if out_of_memory(error) or isinstance(error, MemoryError):
        return f"{UNCHECKED}: no memory"
    if isinstance(error, OSError):  # a full disk, say, where Triton keeps kernels
        return f"{UNCHECKED}: {error.strerror or 'the system refuses something'}"
    if isinstance(error, SubprocessError):  # the C compiler's, of a launcher; ptxas' is Triton's own error
        return f"{UNCHECKED}: the C compiler fails"
    kind = type(error).__name__
    return "doesn't compile" if "Compil" in kind or "Assembl" in kind else f"raises {kind}"


def _wait() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def _tensors(value: object) -> Iterator[tuple[torch.Tensor, float]]:
    """All tensors of a value but a module's own, each with how close it must be."""
    if isinstance(value, torch.Tensor):
        if value.numel():
            yield value, CLOSE.get(value.dtype, 0.0)
    elif isinstance(value, KVCache):
        stored = value.storage.view(E4M3) if value.fp8 else value.storage
        yield stored, FP8_CLOSE if value.fp8 else CLOSE[stored.dtype]
    elif isinstance(value, StateCache):
        yield from ((each, STATES_CLOSE) for each in (value.recurrent, value.inputs))
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif is_dataclass(value):
        yield from _tensors([getattr(value, field.name) for field in fields(value)])


@contextmanager
def _replaced(owner: Any, name: str, by: Callable[[Any], Any]) -> Iterator[None]:
    """Put something in the place of a function, wherever a module of ours has it."""
    made, first = getattr(owner, name), by(getattr(owner, name))
    ours = [module for key, module in sys.modules.items() if key.startswith("snugvl.")]
    owners = ours if isinstance(owner, ModuleType) else [owner]
    places = [(each, key) for each in owners for key, value in list(vars(each).items()) if value is made]
    for each, key in places:
        setattr(each, key, first)
    try:
        yield
    finally:
        for each, key in places:
            setattr(each, key, made)


def give_values(network: LoadableNetwork, device: torch.device) -> None:
    """Weights for a network without memory, such that what comes of them stays about 1.

    Those of the same shape and format are the same.
    """
    made: dict[object, torch.Tensor] = {}
    for module in network.modules():
        form = (module.format, module.group, module.parts) if isinstance(module, Linear) else ()
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            key = (type(module), form, name, tensor.dtype, tensor.shape)
            if key not in made:
                made[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                _fill(module, name, made[key])
            held = made[key]
            parameter = name in module._parameters
            setattr(module, name, nn.Parameter(held, requires_grad=False) if parameter else held)


def _fill(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    form = module.format if isinstance(module, Linear) else "bf16"
    few = FORMATS[form] if form in FEW_BITS else None
    codes = (1 << few.bits) * 0.29 if few is not None else {"fp8": 50.0}.get(form, 74.0)  # their spread
    if name == "zero" and few is not None:
        tensor.uniform_(-1, 1).add_((1 << few.bits) / 2)
    elif name == "scale" and isinstance(module, Linear):
        tensor.uniform_(0.8, 1.2).mul_(module.columns**-0.5 / codes)
    elif form == "ggml" and name == "weight":
        _fill_blocks(module, tensor)
    elif tensor.dtype == E4M3:
        for part in torch.split(tensor, 1024):
            part.copy_((torch.randn(part.shape, device=part.device) * codes).clamp(-448, 448))
    elif not tensor.is_floating_point():
        tensor.view(torch.uint8).random_(0, 256)
    elif tensor.dim() == 1:
        tensor.normal_(1.0 if name == "weight" else 0.0, 0.1)
    else:
        tensor.normal_(0.0, tensor[0].numel() ** -0.5)


def _fill_blocks(linear: Any, tensor: torch.Tensor) -> None:
    """A GGUF's: any codes, with scales such that values stay small."""
    tensor.random_(0, 256)
    for part in linear.parts:
        last, wished = part.planes(tensor, linear.columns)[-1], linear.columns**-0.5
        if part.type == "MXFP4":  # exponents; its codes spread by 5 halves
            last.fill_(128 + round(math.log2(wished / 5)))
            continue
        spread = {"IQ4_NL": 66, "IQ4_XS": 1300}.get(part.type, 500 if part.type.endswith("K") else 10)
        last.view(torch.float16).uniform_(0.8, 1.2).mul_(wished / spread)


def _renumber(network: LoadableNetwork) -> None:
    """Renumber the layers of a network cut to a few, so that its cache has no more layers than it has."""
    text, kinds = network.config.text, list[str]()
    for module in network.modules():
        kind = {decoder.Attention: "full", linear_attention.GatedDeltaNet: "linear"}.get(type(module))
        if kind is not None:
            module.layer = kinds.count(kind)  # type: ignore[assignment]
            kinds.append(kind)
    kinds = sorted(kinds)[: len(kinds) - text.predictors]  # whose keys and values are counted besides
    network.config = replace(network.config, text=replace(text, kinds=tuple(kinds)))  # type: ignore[arg-type]
