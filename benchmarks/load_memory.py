"""Host memory while weights are loaded: what lies beyond the model itself.

    python benchmarks/load_memory.py CHECKPOINT [--dtype bfloat16] [--device cpu] [--out FILE]

The peak is sampled every millisecond in a thread. "Beyond" is the peak above what the process held before,
less the model itself where it stays in host memory; it must not exceed two of its largest tensors.
"""

import argparse
import threading
import time
from pathlib import Path

import psutil
import torch

import machine
from snugvl.models.loader import load_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Peak:
    """Highest resident memory of this process while it is open, in bytes."""

    def __enter__(self) -> "Peak":
        self.process = psutil.Process()
        self.before = self.bytes = self.process.memory_info().rss
        self.open = True
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.open = False
        self.thread.join()

    def _watch(self) -> None:
        while self.open:
            self.bytes = max(self.bytes, self.process.memory_info().rss)
            time.sleep(0.001)


def main() -> None:
    """Load once and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.zeros(1, device=arguments.device)  # the device's own libraries are not the loader's
    with Peak() as peak:
        start = time.perf_counter()
        model = load_model(arguments.checkpoint, dtype=DTYPES[arguments.dtype], device=arguments.device)
        seconds = time.perf_counter() - start
    sizes = [parameter.nbytes for parameter in model.parameters()]
    beyond = peak.bytes - peak.before - (sum(sizes) if arguments.device.type == "cpu" else 0)
    values = {
        "checkpoint": arguments.checkpoint.name,
        "dtype": arguments.dtype,
        "seconds": seconds,
        "model_bytes": sum(sizes),
        "largest_tensor_bytes": max(sizes),
        "host_bytes_beyond_model": beyond,
    }
    print(machine.describe())
    print(f"{arguments.checkpoint.name} in {arguments.dtype} on {arguments.device}, {seconds:.1f} s")
    for name, value in (("model", sum(sizes)), ("largest tensor", max(sizes)), ("host beyond model", beyond)):
        print(f"{name:<20}{value / 2**20:>12,.1f} MiB")
    machine.save(f"load_memory_{arguments.checkpoint.name}", values, arguments.out)


if __name__ == "__main__":
    main()
