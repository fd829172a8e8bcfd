"""What multiplying prompts in FP8 (W8A8) could gain over widening FP8 weights (W8A16), on this GPU.

    python benchmarks/w8a8.py [--sizes 2b 4b 8b] [--tokens 256 1050 2048] [--out FILE]

Of each product of a decoder layer: microseconds as the package computes it from stored FP8 blocks, and of
PyTorch's product of FP8 by FP8 with scales by row (the quickest there is) and by block (as the checkpoints
have them: 1x128 of inputs, 128x128 of weights). Turning the inputs into FP8 is not counted: what is printed
as gained is the most that it could be. Weights come from memory, not from the L2 cache, as in a model.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import ScalingType, scaled_mm

import machine
from kernel_tiles import SHAPES, Cell, Products, replay_us
from snugvl.layers.kernels.products.widen import swiglu

LAYERS = {"2b": 28, "4b": 36, "8b": 36}
BLOCK = 128
E4M3 = torch.float8_e4m3fn


def by_row(x: torch.Tensor, weights: torch.Tensor) -> Callable[[], torch.Tensor]:
    """One scale a row on both sides."""
    one, many = (torch.ones(count, 1, device="cuda") for count in (x.shape[0], weights.shape[0]))
    return lambda: scaled_mm(
        x, weights.T, one, ScalingType.RowWise, many.T, ScalingType.RowWise, output_dtype=torch.bfloat16
    )


def by_block(x: torch.Tensor, weights: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Scales as DeepSeek-V3 and these checkpoints have them."""
    groups = x.shape[1] // BLOCK
    padded = -(-groups // 4) * 4
    one = torch.ones(groups, x.shape[0], device="cuda").T
    many = torch.ones(weights.shape[0] // BLOCK, padded, device="cuda")[:, :groups].T
    return lambda: scaled_mm(
        x, weights.T, one, ScalingType.BlockWise1x128, many, ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )  # fmt: skip


def library_us(products: Products, way: Callable[..., Callable[[], torch.Tensor]]) -> float | None:
    """Microseconds of FP8 by FP8 with what comes after it; None where PyTorch has no such product here."""
    x = products.x.to(E4M3)
    runs = [way(x, weights.data) for weights in products.stored]
    out = torch.empty(x.shape[0], products.stored[0].rows // 2, device="cuda", dtype=torch.bfloat16)

    def all_of_them() -> None:
        for run in runs:
            found = run()
            if products.swiglu:
                swiglu(found, out, 0)
            elif products.residual is not None:
                found += products.residual

    try:
        all_of_them()
        return replay_us(all_of_them, len(runs))
    except (RuntimeError, NotImplementedError, ValueError) as error:
        print(f"    {way.__name__}: {type(error).__name__}: {str(error)[:160]}")
        return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[256, 1050, 2048])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    print(machine.describe())
    rows = []
    for size in arguments.sizes:
        for tokens in arguments.tokens:
            gained = {"row": 0.0, "block": 0.0}
            for shape in SHAPES[size]:
                if shape == "head":
                    continue
                products = Products(Cell(size, shape, "fp8", tokens))
                products.all()
                ours = replay_us(products.all, len(products.stored))
                row, block = library_us(products, by_row), library_us(products, by_block)
                rows.append(
                    {"size": size, "shape": shape, "tokens": tokens, "ours": ours, "row": row, "block": block}
                )
                told = " ".join(f"{'–' if us is None else f'{us:.1f}':>8}" for us in (ours, row, block))
                print(
                    f"{size} {shape:<8} {tokens:>5} tokens, us: W8A16, FP8 by row, by block {told}",
                    flush=True,
                )
                for name, us in (("row", row), ("block", block)):
                    gained[name] += 0.0 if us is None else max(ours - us, 0.0)
            most = {name: us * LAYERS[size] / 1e3 for name, us in gained.items()}
            print(
                f"{size} {tokens:>5} tokens: at most {most['row']:.2f} ms of a prefill by row, "
                f"{most['block']:.2f} ms by block",
                flush=True,
            )
            rows.append({"size": size, "tokens": tokens, "most_ms": most})
    machine.save("w8a8", {"results": rows}, arguments.out)


if __name__ == "__main__":
    main()
