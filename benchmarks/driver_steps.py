"""What the CUDA driver takes of a GPU for each thing that an engine may ask of it, beside torch's memory.

    python benchmarks/driver_steps.py

Each line: what was done, all that the driver holds for this process then (NVML, less what torch's allocator
holds), and how much more than before. In one process, in this order.
"""

import argparse
import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import machine
from snugvl.backends.measure import process_reader
from snugvl.hardware.probe import probe
from snugvl.layers.driver import in_thread_that_ends

MIB = 1 << 20
Steps = list[tuple[str, int, int]]


class Watch:
    """The driver's part of this process after each step."""

    def __init__(self) -> None:
        self._device = torch.device("cuda", 0)
        self._before = 0
        self.steps: Steps = []

    def __call__(self, done: str) -> None:
        torch.cuda.synchronize()
        held = process_reader(self._device)()
        if held is None:
            raise SystemExit("the driver doesn't say what this process holds (WSL2, or a container)")
        driver = held - torch.cuda.memory_reserved(self._device)
        self.steps.append((done, driver, driver - self._before))
        print(f"{done:<58}{driver / MIB:>9.1f} MiB{(driver - self._before) / MIB:>+9.1f}", flush=True)
        self._before = driver


def products(watch: Watch, ones: torch.Tensor) -> None:
    """Handles of cuBLAS, one after the other and side by side."""

    def multiply() -> None:
        (ones @ ones).sum().item()

    in_thread_that_ends(multiply)
    watch("a product by cuBLAS, in a thread that ended")
    in_thread_that_ends(multiply)
    watch("another, in a second thread that ended")
    multiply()
    watch("another, in the main thread")
    leave, done = threading.Event(), threading.Event()

    def stay() -> None:
        multiply()
        done.set()
        leave.wait()

    thread = threading.Thread(target=stay)
    thread.start()
    done.wait()
    watch("another, in a second thread beside the main one")
    leave.set()
    thread.join()


def streams(watch: Watch) -> None:
    """Streams by the driver and by torch."""
    driver = ctypes.CDLL("libcuda.so.1")
    for number in range(1, 5):
        driver.cuStreamCreate(ctypes.byref(ctypes.c_void_p()), 1)
        watch(f"stream {number} by the driver")
    torch.cuda.Stream()  # type: ignore[no-untyped-call]
    watch("torch.cuda.Stream()")


def libraries(watch: Watch) -> None:
    """Kernels of torch that an engine needs late."""
    q = torch.randn(1, 16, 4096, 64, device="cuda", dtype=torch.bfloat16)
    torch.nn.functional.scaled_dot_product_attention(q, q, q)
    watch("attention by torch")
    torch.sort(torch.randn(32, 151936, device="cuda"))
    torch.multinomial(torch.rand(32, 151936, device="cuda"), 1)
    watch("sorting and drawing")


def graphs(watch: Watch, ones: torch.Tensor) -> None:
    """Recorded graphs of 300 kernels."""
    kept: list[Any] = []
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for count in (1, 10, 50):
        while len(kept) < count:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                graph.capture_begin()
                for _ in range(300):
                    ones = ones + 1
                graph.capture_end()
            kept.append(graph)
        watch(f"{count} graphs of 300 kernels")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    gpu = probe().gpus[0]
    print(f"{gpu.name}, driver {gpu.driver}, torch {torch.__version__}, process {os.getpid()}")
    watch = Watch()
    torch.cuda.synchronize()
    watch("a context")
    ones = torch.ones(1024, 1024, device="cuda", dtype=torch.bfloat16)
    watch("torch's first kernel")
    parts: list[Callable[[], None]] = [
        lambda: products(watch, ones),
        lambda: streams(watch),
        lambda: libraries(watch),
        lambda: graphs(watch, ones),
    ]
    for part in parts:
        part()
    machine.save("driver_steps", {"steps": watch.steps}, chosen.out)


if __name__ == "__main__":
    main()
