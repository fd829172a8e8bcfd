"""Where a busy second of the engine goes: by phase on the GPU and on the host, and by kernel.

A phase's time on the GPU is what lies between two events on the engine's stream, so it holds the gaps in
which the host was late within the phase; "between" is when no phase was under way. What kernels take
together says how much of all that was work.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from snugvl.engine import engine as engine_module
from snugvl.engine.engine import Engine
from snugvl.engine.graphs.decode import Replay

TOP_KERNELS = 24


class Phases:
    """Marks the beginning and the end of the engine's phases while it is watched."""

    def __init__(self, engine: Engine) -> None:
        self._cuda = engine.model.device.type == "cuda"
        self._marks: list[tuple[str, Any, float]] = []  # phase ("" for an end), event, host's clock
        self._undo: list[tuple[Any, str, Any]] = []
        self._wrap(engine, "step", "host: schedule, deliver")
        self._wrap(engine._encoder, "_encode", "encode")
        self._wrap(engine._runner, "run", "prefill and mixed")
        self._wrap(engine._runner.graphs, "start", "decode")
        self._wrap(engine._runner.graphs, "advance", "decode")
        self._wrap(engine_module, "begin", "sample")
        self._wrap(engine_module, "results_of", "host: wait for tokens")
        self._wrap(Replay, "tokens", "host: wait for tokens")

    def _wrap(self, owner: Any, name: str, phase: str) -> None:
        inner = getattr(owner, name)
        # Only what this object or class has of its own is put back; a method of its class is uncovered.
        self._undo.append((owner, name, vars(owner).get(name)))

        def marked(*args: Any, **kwargs: Any) -> Any:
            self._mark(phase)
            try:
                return inner(*args, **kwargs)
            finally:
                self._mark("")

        setattr(owner, name, marked)

    def _mark(self, phase: str) -> None:
        event = None
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
        self._marks.append((phase, event, time.perf_counter()))

    def stop(self) -> None:
        """Take the marks away."""
        for owner, name, own in self._undo:
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

    def table(self) -> list[dict[str, Any]]:
        """Each phase with its times, without those of the phases within it."""
        if self._cuda:
            torch.cuda.synchronize()
        if not self._marks:
            return []
        counts: Counter[str] = Counter()
        gpu: dict[str, float] = defaultdict(float)
        host: dict[str, float] = defaultdict(float)
        open_: list[str] = []
        before = self._marks[0]
        for mark in self._marks:
            phase = open_[-1] if open_ else "between steps"
            gpu[phase] += before[1].elapsed_time(mark[1]) if self._cuda else 0
            host[phase] += 1e3 * (mark[2] - before[2])
            before = mark
            if mark[0]:
                counts[mark[0]] += 1
                open_.append(mark[0])
            else:
                open_.pop()
        names = sorted(host, key=lambda name: -max(gpu[name], host[name]))
        return [
            {"phase": name, "times": counts[name], "gpu_ms": gpu[name], "host_ms": host[name]}
            for name in names
        ]


@contextmanager
def watched(engine: Engine) -> Iterator[Phases]:
    """Phases of an engine that does nothing at the beginning and at the end."""
    phases = Phases(engine)
    try:
        yield phases
    finally:
        phases.stop()


def kernels(work: Callable[[], Any]) -> dict[str, Any]:
    """What kernels took of `work`'s seconds: all together, and those that took most."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    events = [event for event in seen.key_averages() if event.device_time_total > 0]
    total = sum(event.device_time_total for event in events) / 1e6
    ranked = sorted(events, key=lambda event: -event.device_time_total)[:TOP_KERNELS]
    return {
        "seconds": seconds,
        "kernels_s": total,
        "busy": total / seconds,
        "launches": sum(event.count for event in events),
        "top": [
            {"name": event.key[:160], "times": event.count, "ms": event.device_time_total / 1e3}
            for event in ranked
        ],
    }


def show(table: list[dict[str, Any]], found: dict[str, Any] | None) -> None:
    """Phases and kernels, for people."""
    for row in table:
        print(
            f"    {row['phase']:<26}{row['times']:>6} times"
            f"{row['gpu_ms']:>10.1f} ms on the GPU{row['host_ms']:>10.1f} ms on the host"
        )
    if found is None:
        return
    print(f"    kernels {found['kernels_s']:.3f} of {found['seconds']:.3f} s, {found['launches']} launches")
    for kernel in found["top"]:
        print(f"    {kernel['ms']:>9.2f} ms {kernel['times']:>6} × {kernel['name'][:100]}")
