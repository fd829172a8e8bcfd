"""`snugvl.load`: from a model's name to a running engine. "auto" is resolved here, once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch

from snugvl.backends.native import NativeBackend
from snugvl.backends.protocol import Capabilities
from snugvl.checkpoint.architecture import ModelConfig, read_config
from snugvl.checkpoint.locate import locate
from snugvl.checkpoint.safetensors import read_tensors
from snugvl.config import DEFAULT_BLOCK_SIZE, EngineConfig
from snugvl.engine.engine import Engine
from snugvl.errors import DoesNotFit, RequestError
from snugvl.inputs.prompt import Processor
from snugvl.model import Model
from snugvl.models.loader import load_model, network_elements

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]

DEFAULT_CONTEXT = 8192  # tokens: a large picture and a long answer; `context` asks for more
POOL_SEQUENCES = 4  # full-length sequences the KV pool holds where memory allows
WORKSPACE_BYTES = 1 << 30  # activations and libraries beside weights and KV, until the plan computes them
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class _Memory:
    """Bytes free on the device now."""

    free: int
    name: str


def load(
    model: str | Path = "pocket",
    *,
    device: str = "auto",
    dtype: DtypeName = "auto",
    context: int | None = None,
    max_pixels: int | None = None,
) -> Model:
    """Load a checkpoint into our own engine, in this process.

    Args:
        model: `pocket`, a checkpoint folder, or a Hub id that is in the local cache.
        device: `cpu`, `cuda`, `cuda:1`, …; auto takes the GPU if there is one.
        dtype: weights and KV cache; auto takes bfloat16 (float16 before Ampere) on a GPU, and on a CPU
            float32 where it leaves half of the free memory.
        context: tokens of one conversation, image tokens included; by default at most 8,192.
        max_pixels: scale larger images down to this many pixels (the checkpoint's own limit at most).

    Raises:
        CheckpointNotFound, CheckpointError, UnsupportedModel: about the checkpoint.
        DoesNotFit: the weights and one conversation need more memory than is free, with the numbers.
        RequestError: an argument is wrong.
    """
    folder = locate(str(model))
    config = read_config(folder)
    target = _device(device)
    memory = _free_memory(target)
    kind = _dtype(dtype, target, config, memory)
    processor = Processor.from_folder(folder, config, max_pixels=max_pixels)
    engine_config = _engine_config(config, kind, context, memory, str(model))
    read_tensors(folder)  # a broken checkpoint is refused before memory is taken
    network = load_model(folder, dtype=kind, device=target)
    engine = Engine(network, engine_config)
    capabilities = Capabilities(
        model=str(model),
        context_tokens=engine_config.max_model_len,
        images=True,
        video=processor.videos is not None,
        max_pixels=processor.images.settings.max_pixels,
        min_pixels=processor.images.settings.min_pixels,
    )
    return Model(NativeBackend(engine, processor, capabilities))


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RequestError(f"device {name!r} is unknown; use auto, cpu or cuda", field="device") from None
    if device.type not in ("cpu", "cuda"):
        raise RequestError(f"device {name!r} is not supported; use auto, cpu or cuda", field="device")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise RequestError(
            f"device {name!r} is not there: torch sees {torch.cuda.device_count()} CUDA GPUs; use cpu",
            field="device",
        )
    return device


def _free_memory(device: torch.device) -> _Memory:
    if device.type == "cuda":
        return _Memory(torch.cuda.mem_get_info(device)[0], torch.cuda.get_device_name(device))
    return _Memory(psutil.virtual_memory().available, "main memory")


def _dtype(name: str, device: torch.device, config: ModelConfig, memory: _Memory) -> torch.dtype:
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise RequestError(f"dtype {name!r} is unknown; use auto, {', '.join(DTYPES)}", field="dtype")
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else torch.float16
    wide = network_elements(config) * 4
    return torch.float32 if wide <= memory.free // 2 else torch.bfloat16


def _engine_config(
    config: ModelConfig, dtype: torch.dtype, context: int | None, memory: _Memory, model: str
) -> EngineConfig:
    """The KV pool that free memory allows, between one and a few conversations of full length."""
    limit = config.text.max_position_embeddings
    if context is not None and not 1 <= context <= limit:
        raise RequestError(
            f"context must be 1 to {limit:,} tokens for {model}, not {context:,}", field="context"
        )
    length = context or min(DEFAULT_CONTEXT, limit)
    block_size = DEFAULT_BLOCK_SIZE
    weights = network_elements(config) * dtype.itemsize
    block_bytes = config.text.kv_bytes_per_token(dtype.itemsize) * block_size
    blocks_per_sequence = -(-length // block_size)
    room = (memory.free - weights - WORKSPACE_BYTES) // block_bytes
    if room < blocks_per_sequence:
        needed = weights + WORKSPACE_BYTES + blocks_per_sequence * block_bytes
        raise DoesNotFit(
            f"{model} in {str(dtype).removeprefix('torch.')} needs {_gib(needed)} ({_gib(weights)} weights, "
            f"{_gib(blocks_per_sequence * block_bytes)} KV cache for {length:,} tokens, "
            f"{_gib(WORKSPACE_BYTES)} workspace), but {memory.name} has {_gib(memory.free)} free; "
            + _way_out(room, block_size, length)
        )
    return EngineConfig(
        num_blocks=min(room, POOL_SEQUENCES * blocks_per_sequence),
        block_size=block_size,
        max_model_len=length,
    )


def _way_out(room: int, block_size: int, length: int) -> str:
    tokens = room * block_size
    if tokens >= min(1024, length // 2):
        return f"a context of {tokens:,} tokens fits (context={tokens})"
    return "free some memory or use a smaller model"


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
