"""The throw-away process of `context_cost.py`: `python -m snugvl.hardware.context_child UUID`.

It prints NVML's free bytes at each stage, and CUDA's total, as one JSON object. A process of its own starts
this one's work in another, so that the last figure is taken when the context is gone.
"""

import json
import subprocess
import sys
from collections.abc import Callable

WORK = "--work"


def stages(free: Callable[[], int]) -> dict[str, int]:
    """Free bytes with a context, after a kernel, after a cuBLAS product, and with nothing left of ours.

    And CUDA's `total` of the card's memory, which NVML doesn't tell.
    """
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} can't use a GPU here")
    found = {}
    torch.cuda.synchronize()  # makes the context
    found["context"] = free()
    ones = torch.ones(1024, 1024, device="cuda", dtype=torch.float16)
    torch.cuda.synchronize()
    found["kernels"] = free()
    product = ones @ ones
    product.sum().item()
    found["product"] = free()
    del ones, product
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    found["settled"] = free()
    found["total"] = torch.cuda.mem_get_info()[1]
    return found


def main(uuid: str, *, work: bool) -> None:
    """Print the stages; `work`: those in which the context lives."""
    import pynvml  # type: ignore[import-untyped]

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)

    def free() -> int:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)

    if work:
        sys.stdout.write(json.dumps(stages(free)) + "\n")
        return
    before = free()
    command = [sys.executable, "-m", "snugvl.hardware.context_child", uuid, WORK]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603 (ourselves)
    if ran.returncode:
        sys.exit(ran.returncode)
    found = json.loads(ran.stdout.strip().splitlines()[-1])
    sys.stdout.write(json.dumps({"before": before, **found, "end": free()}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], work=WORK in sys.argv)
