"""EXL3 as a peer: exllamav3's own functions round a decoder's matrices, as its convert.py does.

    git clone --branch v1.4.1 https://github.com/turboderp-org/exllamav3
    PYTHONPATH=benchmarks python -m training.quantized --release coder --device cuda --exl3 exllamav3 4 3

Of its sources (MIT; nothing of them is here) the quantiser and the allocation of bits are imported, without
what its package imports beside them, and of its CUDA files those are compiled that search the trellis and
pack it. What surrounds them is the pass of `snugvl quantize`, which does here what convert.py does: inputs of
a layer's matrices are those behind rounded layers and within the exact layer. Its defaults are kept: the
codebook "mul1", scales of output channels, 0.025 of the mean square as damping, and which layers and
matrices get more bits where the mean is no whole number. Not kept are its head of 6 bits and, unless
--own-rows asks for them, its calibration texts (250 rows of 2,048 tokens).

Sides are padded with zeros to multiples of 128, as it does. Of SmolLM2-135M's 576 columns it stores 640.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.nn.functional import pad
from torch.utils import cpp_extension

from snugvl.checkpoint.families import read_config
from snugvl.engine.admission import check_prompt
from snugvl.engine.request import EngineRequest
from snugvl.fidelity.sweep import Sequences, SweepSizes
from snugvl.models.layered import LayeredNetwork
from snugvl.models.loader import open_checkpoint
from snugvl.models.networks import LoadableNetwork
from snugvl.quantize import passes
from snugvl.quantize.rounding import Moments
from snugvl.quantize.setup import matrices_of

PACKAGES = ("", "modules", "modules/quant", "modules/quant/exl3_lib", "conversion")
CUDA_FILES = ["pack", "quantize", "exl3_devctx"]
CUDA_FILES += [f"comp_units/quantize_tiles_inst_k{bits}" for bits in range(1, 9)]
OPERATORS = """
#include <torch/library.h>
#include "quant/pack.cuh"
#include "quant/quantize.cuh"

using T = const at::Tensor&;

TORCH_LIBRARY(exl3, made) {
  made.def("quantize_tiles", [](T tiles, T found, T codes, T costs, T edges, int64_t bits, bool a, bool b) {
    quantize_tiles(tiles, found, codes, costs, edges, int(bits), a, b);
  });
  made.def("pack_trellis", [](T packed, T codes, int64_t bits) { pack_trellis(packed, codes, int(bits)); });
}
"""
ROW = 2048  # tokens of a row of its texts
RANDOM_IDS = 32_000  # that rows of random tokens are drawn from
SIDE = 128  # that rows and columns are padded to multiples of
FIRST = {"self_attn.qkv_proj": 2, "self_attn.o_proj": 2, "mlp.gate_up_proj": 1, "mlp.down_proj": 1}
"""The matrices of a layer in its order, and its priorities, by which they get more bits."""


class Peer(NamedTuple):
    """exllamav3's `quantize_exl3`, `create_q_strategy`, and `get_default_calibration`."""

    quantise: Callable[..., tuple[torch.Tensor, float, dict[str, torch.Tensor]]]
    allocate: Callable[..., tuple[dict[str, int], float]]
    texts: Callable[..., list[torch.Tensor]]


class Way(NamedTuple):
    """Bits of a matrix' codes, the rows of each of its parts, and the seed of its random signs."""

    bits: int
    parts: tuple[int, ...]
    seed: int


class Found(NamedTuple):
    """A rounded matrix in float32, `[rows, columns]`, its bytes as stored, the share that each part loses."""

    wide: torch.Tensor
    nbytes: int
    lost: list[float]

    def values(self) -> torch.Tensor:
        """The matrix, as `snugvl.quantize.rounding.Rounded` returns it."""
        return self.wide


def exllamav3(sources: Path) -> Peer:
    """exllamav3's functions out of a folder of its sources; its kernels are compiled there the first time.

    Raises:
        RuntimeError: the kernels can't be compiled.
        ImportError: something of the sources isn't there.
    """
    inner = (sources / "exllamav3").resolve()
    if not hasattr(torch.ops.exl3, "quantize_tiles"):
        _load_kernels(inner)
    made: list[tuple[str, dict[str, Any]]] = [
        (".".join(("exllamav3", *Path(name).parts)), {"__path__": [str(inner / name)]}) for name in PACKAGES
    ]
    made += [
        ("exllamav3.ext", {"exllamav3_ext": torch.ops.exl3}),
        ("exllamav3.util.progress", {"ProgressBar": mock.MagicMock()}),
        ("exllamav3.util.memory", {"free_mem": torch.cuda.empty_cache, "list_gpu_tensors": None}),
        ("exllamav3.modules.module", {"Module": SimpleNamespace}),
        ("exllamav3.modules.linear", {"Linear": SimpleNamespace}),
    ]
    for name, members in made:
        sys.modules[name] = module = ModuleType(name)
        vars(module).update(members)
    from exllamav3.conversion.allocation import create_q_strategy  # type: ignore[import-not-found]
    from exllamav3.conversion.calibration_data import (  # type: ignore[import-not-found]
        get_default_calibration,
    )
    from exllamav3.modules.quant.exl3_lib.quantize import quantize_exl3  # type: ignore[import-not-found]

    return Peer(quantize_exl3, create_q_strategy, get_default_calibration)


def _load_kernels(inner: Path) -> None:
    made, kernels, operators = inner / "exl3.so", inner / "exllamav3_ext", inner / "exl3_operators.cpp"
    if made.exists():
        torch.ops.load_library(made)  # type: ignore[no-untyped-call]
        return
    operators.write_text(OPERATORS)
    cpp_extension.load(
        made.stem,
        [str(operators), *(str(kernels / f"quant/{name}.cu") for name in CUDA_FILES)],
        extra_include_paths=[str(kernels)],
        extra_cuda_cflags=["-lineinfo", "-O3", "--use_fast_math"],
        build_directory=str(inner),
        is_python_module=False,
    )


def own_rows(peer: Peer, encode: Callable[[str], Sequence[int]], rows: int) -> list[tuple[int, ...]]:
    """Token ids of so many rows of exllamav3's calibration texts; `encode` returns those of a text."""
    tokenizer = SimpleNamespace(
        encode=lambda text, **_: torch.tensor([encode(text)]), actual_vocab_size=RANDOM_IDS
    )
    found = peer.texts({"cal_rows": rows, "cal_cols": ROW}, tokenizer)
    return [tuple(row[0].tolist()) for row in found]


def allocated(
    peer: Peer, matrices: Mapping[passes.Place, passes.Matrix], bits: float
) -> dict[passes.Place, int]:
    """Bits of each matrix' codes for a mean of `bits`; the parts of a matrix are one of its groups."""
    names = {place: f"model.layers.{place[0]}.{place[1]}" for place in matrices}
    order = [*FIRST]
    planned = [
        SimpleNamespace(
            key=names[place], qgroup=names[place], q_priority=FIRST[place[1]], qmap="", qbits_key="bits",
            select_hq_bits=0, modules=(),
            weights_numel=partial(int, _up(each.columns) * sum(_up(rows) for _, rows in each.parts)),
        )
        for place, each in sorted(matrices.items(), key=lambda pair: (pair[0][0], order.index(pair[0][1])))
    ]  # fmt: skip
    found, _ = peer.allocate(SimpleNamespace(modules=planned), None, None, bits, 0, 0, False)
    return {place: found[name] for place, name in names.items()}


def rounded(peer: Peer, weight: torch.Tensor, way: Way, moments: Moments) -> Found:
    """A matrix `[rows, columns]`, rounded part by part for inputs like these."""
    columns = weight.shape[1]
    more = _up(columns) - columns
    given: dict[str, Any] = {"H": pad(moments.sums, (0, more, 0, more)), "count": moments.count}
    given["finalized"] = False
    found, lost, nbytes = [], [], 0
    for part in torch.split(weight.float(), [*way.parts]):
        padded = part.new_zeros(columns + more, _up(len(part)))
        padded[:columns, : len(part)] = part.T
        how = {"seed": way.seed, "K": way.bits, "devices": [padded.device]}
        values, share, stored = peer.quantise(
            padded, given, how | {"apply_out_scales": True, "mul1": True}, return_weight_q=True
        )
        found.append(values[:columns, : len(part)].T)
        lost.append(share)
        nbytes += sum(each.nbytes for each in stored.values())
    return Found(torch.cat(found), nbytes, lost)


def round_network(
    peer: Peer,
    model: LoadableNetwork,
    folder: Path,
    pieces: Sequence[tuple[int, ...]],
    bits: float,
    layers: int | None = None,
) -> float:
    """Round the decoder's matrices, and embedding and head to ggml's Q8_0, in place.

    Args:
        model: the network of `folder` in float32.
        pieces: token ids of the calibration texts.
        bits: the mean that is wished for.
        layers: round so many layers alone, evenly spread; None: all.

    Returns:
        Bits of a weight of the rounded matrices as they are stored.
    """
    opened, began = open_checkpoint(folder, torch.float32), time.perf_counter()
    matrices, _ = matrices_of(opened, lambda *_: True)
    widths, depth = allocated(peer, matrices, bits), len(model.decoder.layers)
    chosen = {number * depth // (layers or depth) for number in range(layers or depth)}
    ways: Any = {  # in place of our grids
        (layer, name): Way(widths[layer, name], tuple(rows for _, rows in each.parts), layer + 1)
        for (layer, name), each in matrices.items()
        if layer in chosen
    }
    held = 0

    def done(index: int, made: Mapping[str, Any], _: passes.Factors) -> None:
        nonlocal held
        layer: Any = model.decoder.layers[index]
        for name, each in made.items():
            layer.get_submodule(name).weight.copy_(each.values())
            held += 8 * each.nbytes
        lost = " ".join(f"{share:.1e}" for each in made.values() for share in each.lost)
        print(f"{bits:g} bits, layer {index}: {time.perf_counter() - began:.1f} s, lost {lost}", flush=True)

    def by_peer(weight: torch.Tensor, way: Any, moments: Moments, **_: Any) -> Found:
        return rounded(peer, weight, way, moments)

    config = read_config(folder)
    sequences = [Sequences(check_prompt(EngineRequest("", piece), config), ()) for piece in pieces]
    sizes, rounds = SweepSizes(ROW, "bf16", model.device), passes.Rounds(ways, matrices, {})
    theirs: dict[str, Any] = {"rounded": by_peer, "_fold": lambda *_: {}, "_share": lambda _: 1.0}
    with closing(LayeredNetwork(opened, model.device)) as network, mock.patch.multiple(passes, **theirs):
        passes.quantise(network, sequences, sizes, rounds, done, compensate=False)
    tied = model.config.tie_word_embeddings
    for each in (model.decoder.embed_tokens, *(() if tied else (model.lm_head,))):
        each.weight.copy_(in_q8_0(each.weight))
    return held / sum(matrices[place].weights for place in ways)


def in_q8_0(values: torch.Tensor) -> torch.Tensor:
    """`values` `[rows, columns]` as ggml's Q8_0 has them: 8 bits, and a scale in 16 bits for 32 columns."""
    blocks = values.view(-1, 32)
    step = blocks.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return ((blocks / step).round() * step.half().float()).view_as(values)


def _up(side: int) -> int:
    return -(-side // SIDE) * SIDE
