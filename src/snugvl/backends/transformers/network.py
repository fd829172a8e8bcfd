"""The network of a checkpoint with its weights where the plan wants them: GPU, host memory, disk."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers.utils import logging

from snugvl.backends.transformers.opening import Checkpoint, explained
from snugvl.core.formats import BITSANDBYTES, Bitsandbytes
from snugvl.core.memory_kinds import Kind
from snugvl.core.resources import Scratch
from snugvl.errors import CheckpointError, RequestError, UnsupportedModel

HOST_WEIGHTS = Kind.HOST.value  # the ledger's row of what waits beside a GPU
_BAR = "Loading weights"  # over a checkpoint's weights: the only one of transformers' that takes long
_TOWERS = frozenset(
    ("visual", "vision_tower", "vision_model", "vision_encoder", "image_tower", "vision_embed_tokens")
)

_auto: Any = transformers  # only partly typed
_bars: Any = logging


def open_model(
    checkpoint: Checkpoint, *, dtype: torch.dtype, device_map: Mapping[str, str] | None, weights: str
) -> Any:
    """The network, its weights in place.

    Args:
        dtype: of what the checkpoint doesn't quantise.
        device_map: module to device, or None for host memory.
        weights: those of `BITSANDBYTES` are made by it on the way.

    Raises:
        CheckpointError: weights are missing, broken or another model's; or the map names no such module.
        UnsupportedModel: what it needs isn't installed, or it can't generate.
        DoesNotFit: memory ran out on the way.
    """
    options: dict[str, Any] = {"dtype": dtype, "local_files_only": True}
    options["trust_remote_code"] = checkpoint.own_code
    if checkpoint.widened:
        checkpoint.config.quantization_config["dequantize"] = True
    on_disk = Scratch("offload") if device_map is not None and "disk" in device_map.values() else None
    if device_map is not None:
        options["device_map"] = dict(device_map)
    if on_disk is not None:
        options["offload_folder"] = str(on_disk.path)
    if (form := BITSANDBYTES.get(weights)) is not None:
        options["quantization_config"] = _bitsandbytes(form, dtype)
    with explained(checkpoint.name):
        model, report = _opener(checkpoint).from_pretrained(
            checkpoint.folder, config=checkpoint.config, output_loading_info=True, **options
        )
    if not callable(getattr(model, "generate", None)):
        raise UnsupportedModel(
            f"{checkpoint.name} ({type(model).__name__}) can't generate text; choose a model for text or chat"
        )
    _check_report(checkpoint.name, report)
    plain_generation(model)
    model.on_disk = on_disk  # which is removed when the model is gone
    return model.eval()


def skeleton_of(checkpoint: Checkpoint, dtype: torch.dtype) -> torch.nn.Module:
    """The network without memory, to ask its modules' names."""
    with explained(checkpoint.name), torch.device("meta"):
        return _opener(checkpoint).from_config(  # type: ignore[no-any-return]
            checkpoint.config, dtype=dtype, trust_remote_code=checkpoint.own_code
        )


def _opener(checkpoint: Checkpoint) -> Any:
    return _auto.AutoModelForImageTextToText if checkpoint.sees else _auto.AutoModelForCausalLM


def _check_report(name: str, report: Mapping[str, Any]) -> None:
    """Refuse missing weights, which transformers would fill with random numbers."""
    missing = sorted(report.get("missing_keys") or ())
    mismatched = sorted(str(each[0]) for each in report.get("mismatched_keys") or ())
    if missing or mismatched:
        few = ", ".join((missing or mismatched)[:3])
        what = "are missing" if missing else "have another shape than config.json says"
        raise CheckpointError(f"{len(missing or mismatched)} weights of {name} {what}: {few}")


def plain_generation(model: Any) -> None:
    """Clear all generation settings but tokens: snugvl samples and sets the limits."""
    own = model.generation_config
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    kept = {name: getattr(own, name, None) for name in names}
    if kept["pad_token_id"] is None:  # else a warning at every prompt; nothing is ever padded with it
        eos = kept["eos_token_id"]
        kept["pad_token_id"] = eos[0] if isinstance(eos, list) else eos
    suppressed = getattr(own, "suppress_tokens", None)
    model.generation_config = _auto.GenerationConfig(**kept, suppress_tokens=suppressed)


def _bitsandbytes(form: Bitsandbytes, dtype: torch.dtype) -> Any:
    if form.bits == 8:
        return _auto.BitsAndBytesConfig(load_in_8bit=True)
    return _auto.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype=dtype, bnb_4bit_quant_type=form.name
    )


def by_bits_bytes(skeleton: torch.nn.Module, weights: str) -> int:
    """Bytes of the weights that bitsandbytes makes. It replaces plain linear layers alone: the head stays,
    and so do experts that a mixture has in one tensor."""
    head = skeleton.get_output_embeddings()  # type: ignore[operator]
    linear = (each for each in skeleton.modules() if isinstance(each, torch.nn.Linear) and each is not head)
    made = [each.weight for each in linear]
    form = BITSANDBYTES[weights]
    share = form.bits / 8 + (4 / form.block if form.block else 0)  # and a float32 for a block of values
    whole = sum(each.nbytes for each in skeleton.parameters()) - sum(each.nbytes for each in made)
    return whole + int(sum(each.numel() for each in made) * share)


def checked(
    placement: tuple[tuple[str, str], ...], skeleton: torch.nn.Module, device: torch.device
) -> dict[str, str]:
    """The plan's placement as transformers takes it. `skeleton`: the network without memory ("meta").

    Raises:
        RequestError: an unknown device, or another GPU than the one that was asked for; a module that the
            network doesn't have, or weights without a place.
    """
    placed = dict(placement)
    names = {name for name, _ in skeleton.named_modules()} | {name for name, _ in skeleton.named_parameters()}
    for module, where in placement:
        if where not in ("cpu", "disk", str(device)):
            raise RequestError(
                f"module {module!r} is placed on {where!r}; it can be on {device}, cpu or disk",
                field="placement",
            )
        if module not in names:
            raise RequestError(f"the placement names {module!r}, not a module here", field="placement")
    for name, _ in skeleton.named_parameters():
        if not any(_holds(module, name) for module in placed):
            raise RequestError(f"the placement leaves out {name!r}", field="placement")
    return placed


def without_tower(skeleton: torch.nn.Module, device: torch.device) -> dict[str, str]:
    """Everything on `device` but the vision tower, which is never asked, in host memory.

    `skeleton`: the network without memory ("meta").
    """
    towers = [name for name, _ in skeleton.named_modules() if name.rpartition(".")[2] in _TOWERS]
    outer = [name for name in towers if not any(name.startswith(other + ".") for other in towers)]
    placed: dict[str, str] = dict.fromkeys(outer, "cpu")
    _spread(skeleton, "", outer, str(device), placed)
    return placed


def _spread(
    module: torch.nn.Module, name: str, towers: list[str], device: str, placed: dict[str, str]
) -> None:
    """Put what is beside the towers on `device`, in pieces as large as possible."""
    prefix = f"{name}." if name else ""
    for child_name, child in module.named_children():
        path = prefix + child_name
        if path in placed:
            continue
        if any(tower.startswith(path + ".") for tower in towers):
            _spread(child, path, towers, device, placed)
        else:
            placed[path] = device
    direct = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    placed.update({prefix + own: device for own, _ in direct})


def split_bytes(model: Any, placed: Mapping[str, str] | None, device: torch.device) -> dict[str, int]:
    """Bytes of the weights by row of the ledger: on the device, and offloaded to host memory."""
    rows: dict[str, int] = {Kind.WEIGHTS: 0}
    main = device.type
    seen: set[int] = set()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        where = _where(name, placed) if placed else tensor.device.type
        if where == "disk":
            continue
        row = Kind.WEIGHTS if torch.device(where).type == main else HOST_WEIGHTS
        rows[row] = rows.get(row, 0) + tensor.nbytes
    return rows


def _where(name: str, placed: Mapping[str, str]) -> str:
    """The place of the longest module that holds a parameter."""
    holding = [module for module in placed if _holds(module, name)]
    return placed[max(holding, key=len)] if holding else "cpu"


def _holds(module: str, name: str) -> bool:
    """Whether a parameter belongs to a module; everything belongs to ""."""
    return not module or name == module or name.startswith(module + ".")


class _Bar:
    """A progress bar for transformers over `items`; `tell` hears the share that is done."""

    def __init__(self, items: Iterable[Any], count: int, tell: Callable[[float], None]) -> None:
        self._items = items
        self._count = max(count, 1)
        self._tell = tell

    def __iter__(self) -> Iterator[Any]:
        told = -1
        for index, item in enumerate(self._items):
            percent = 100 * index // self._count
            if percent != told:
                told = percent
                self._tell(index / self._count)
            yield item

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_args, **_options: None  # set_postfix, close, …


@contextmanager
def told(tell: Callable[[float], None]) -> Iterator[None]:
    """Tell `tell` the share of the weights that are loaded, and draw nothing, while inside."""

    def hook(factory: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if options.get("desc") != _BAR or not args or not hasattr(args[0], "__len__"):
            return factory(*args, **options)
        return _Bar(args[0], len(args[0]), tell)

    shown, before = _bars.is_progress_bar_enabled(), _bars.set_tqdm_hook(hook)
    _bars.disable_progress_bar()
    try:
        yield
    finally:
        _bars.set_tqdm_hook(before)
        if shown:
            _bars.enable_progress_bar()
