"""Random blocks of a GGUF's types, with scales that a model could have."""

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import torch

from snugvl.layers.ggml import LAYOUTS, GgmlType, parts_of, sort_bytes
from snugvl.layers.weights import Weights

KNOWN = find_spec("gguf") is not None
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q5_0": (0,),
    "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (),
}  # fmt: skip
SPREAD = {
    "Q4_0": 9.0, "Q4_1": 9.0, "Q8_0": 74.0, "Q4_K": 300.0, "Q5_K": 600.0, "Q6_K": 1370.0, "Q5_0": 18.0,
    "Q5_1": 18.0, "Q2_K": 12.0, "Q3_K": 45.0, "IQ4_NL": 66.0, "IQ4_XS": 1300.0,
}  # fmt: skip


def random_blocks(kind: GgmlType, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Rows as a file has them, `[rows, bytes]`; values spread by about 0.05."""
    rng, layout = np.random.default_rng(seed), LAYOUTS[kind]
    raw = rng.integers(0, 256, (rows, columns // layout.block, layout.nbytes), dtype=np.uint8)
    for at in HALVES[kind]:
        scale = rng.uniform(0.5, 1.5, raw.shape[:2]) * 0.05 / SPREAD[kind]
        raw[..., at : at + 2] = scale.astype(np.float16)[..., None].view(np.uint8)
    if kind == "MXFP4":  # an exponent
        raw[..., 0] = rng.integers(118, 124, raw.shape[:2])
    return raw.reshape(rows, -1)


def reference(raw: np.ndarray, kind: GgmlType) -> torch.Tensor:
    """What ggml's own code makes of them, `[rows, columns]` float32."""
    import gguf

    return torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))


def stored(
    kinds: list[tuple[GgmlType, int]], columns: int, device: torch.device | str = "cpu"
) -> tuple[Weights, torch.Tensor]:
    """A matrix of parts of so many rows each, and what it means, to ggml's own code.

    Where gguf isn't installed (a machine that is there for its GPU): to torch on the CPU, which the same
    tests hold to ggml's code where it is.
    """
    parts = parts_of(kinds, columns)
    data = torch.empty(sum(part.nbytes(columns) for part in parts), dtype=torch.uint8)
    wide = []
    for seed, part in enumerate(parts):
        raw = random_blocks(part.type, part.rows, columns, seed)
        for plane, values in zip(
            part.planes(data, columns), sort_bytes(torch.from_numpy(raw), part.type), strict=True
        ):
            plane.copy_(values)
        wide += [reference(raw, part.type)] if KNOWN else []
    here = Weights("ggml", sum(part.rows for part in parts), columns, data, parts=parts)
    meant = torch.cat(wide) if wide else here.wide(torch.float32)
    return replace(here, data=data.to(device)), meant.to(device)
