"""The engines that keep one contract, each over the same tiny checkpoint, as the server holds them."""

import asyncio
import os
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from snugvl.backends.process.supervised import EngineChoice, SupervisedEngine, Supervision
from snugvl.backends.process.wire import HostedEngine
from snugvl.core.messages import Capabilities, Delta, Request, Stream
from snugvl.core.options import LoadOptions
from snugvl.core.service import EngineService
from snugvl.errors import EngineError
from tests.backends.inprocess import InProcessEngine
from tests.backends.vllm.real.install import missing
from tests.patience import NEVER_S, PATIENCE_S
from tests.patience import until_async as until

CONTEXT = 768
QUICK = Supervision(ping_s=0.2, snapshot_s=0.05, watchdog_s=NEVER_S)

T = TypeVar("T")


def native(folder: Path, *, language_only: bool = False) -> EngineService:
    """Our engine in this process."""
    from snugvl.backends.native.loading import load_engine

    options = LoadOptions(
        str(folder), device="cpu", dtype="float32", context=CONTEXT, language_only=language_only
    )
    loaded = load_engine(options)
    return InProcessEngine(loaded.backend)


def transformers(folder: Path, *, language_only: bool = False) -> EngineService:
    """transformers in this process."""
    from snugvl.backends.transformers.loading import load_engine

    options = LoadOptions(
        str(folder), device="cpu", dtype="float32", context=CONTEXT, language_only=language_only
    )
    loaded = load_engine(options)
    return InProcessEngine(loaded.backend)


def supervised(engine: HostedEngine) -> Callable[[Path], EngineService]:
    """One of them in a child process, as `snugvl serve` runs it."""

    def make(folder: Path) -> EngineService:
        choice = EngineChoice(str(folder), device="cpu", dtype="float32", context=CONTEXT, engine=engine)
        return SupervisedEngine(choice, QUICK)

    return make


def vllm(folder: Path) -> EngineService:
    """A real vLLM on the CPU; see `tests/backends/vllm/real/install.py`."""
    from snugvl.backends.vllm.service import VllmEngine
    from snugvl.backends.vllm.settings import read_facts
    from snugvl.checkpoint.read import facts_of
    from snugvl.planner.inventory import inventory
    from tests.backends.vllm.real.install import pocket

    arguments = ("--max-model-len", str(CONTEXT), "--max-num-batched-tokens", str(CONTEXT))
    counted = inventory(facts_of(str(folder), offline=True))
    # As `snugvl serve` does it: the plan adds what vLLM doesn't tell.
    facts = replace(read_facts(str(folder)), device="CPU", parameters=counted.parameters)
    return VllmEngine(replace(pocket(*arguments), model=str(folder), facts=facts), QUICK)


def llamacpp(folder: Path) -> EngineService:
    """A real llama.cpp on the CPU, in float32 with a cache in float32: the checkpoint, exported as GGUF."""
    if find_spec("xllamacpp") is None:
        missing("llama.cpp isn't installed: pip install xllamacpp")
    from training.gguf_export import export

    from snugvl.backends.child.settings import Facts
    from snugvl.backends.llamacpp.service import LlamacppEngine
    from snugvl.backends.llamacpp.settings import LlamacppChoice
    from snugvl.checkpoint.read import facts_of
    from snugvl.planner.inventory import inventory

    file = folder / "model.gguf"
    beside = export(str(folder), file, "F32")
    words = ("-m", str(file), *(("--mmproj", str(beside)) if beside else ()))
    words += ("-c", str(4 * CONTEXT), "-np", "4", "-fa", "off", "-fit", "off", "--cache-ram", "0", "-t", "1")
    words += (
        "-ctk",
        "f32",
        "-ctv",
        "f32",
        "-dev",
        "none",
        "--image-min-tokens",
        "4",
        "--image-max-tokens",
        "256",
    )
    counted = inventory(facts_of(str(file), offline=True))
    facts = Facts(device="CPU", parameters=counted.parameters)
    return LlamacppEngine(LlamacppChoice(str(folder), words, facts=facts), QUICK)


IN_PROCESS: dict[str, Callable[[Path], EngineService]] = {"native": native, "transformers": transformers}
BLIND: dict[str, Callable[[Path], EngineService]] = {
    "native": partial(native, language_only=True),
    "transformers": partial(transformers, language_only=True),
}
# What `running` is, by the environment variable SNUGVL_CONTRACT: a vLLM is started once, not once a worker.
CHOSEN = (
    {"vllm": vllm} if os.environ.get("SNUGVL_CONTRACT") == "vllm" else {**IN_PROCESS, "llamacpp": llamacpp}
)
CHILDREN: dict[str, Callable[[Path], EngineService]] = {
    "native": supervised("native"),
    "transformers": supervised("transformers"),
}


class Running:
    """A service in an event loop that lives as long as the tests that share it."""

    def __init__(self, name: str, service: EngineService) -> None:
        self.name = name
        self.service = service
        self._runner = asyncio.Runner()
        self.run(service.start())
        self.run(ready(service))

    @property
    def capabilities(self) -> Capabilities:
        """Of the loaded model."""
        assert self.service.capabilities is not None
        return self.service.capabilities

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine in the service's loop."""
        return self._runner.run(coroutine)

    def ask(self, request: Request) -> list[Delta]:
        """Every delta of a request's answer."""

        async def asked() -> list[Delta]:
            return await read(await self.service.submit(request))

        return self.run(asked())

    def text(self, request: Request) -> str:
        """The text of a request with one choice."""
        return "".join(delta.text for delta in self.ask(request))

    def idle(self) -> None:
        """Wait until the engine itself says that nothing runs or waits."""

        def nothing() -> bool:
            snapshot = self.service.snapshot
            return snapshot is not None and not snapshot.load.running and not snapshot.load.waiting

        self.run(until(nothing))

    def close(self) -> None:
        """End the service and its loop."""
        self.run(self.service.close())
        self._runner.close()


async def read(stream: Stream) -> list[Delta]:
    """All of an answer."""
    with stream:
        return [delta async for delta in stream]


async def ready(service: EngineService) -> None:
    """Wait until it serves. One that dies as it loads would come again and again: it fails here at once.

    A real vLLM on a busy machine takes its time; its service ends one that hangs.
    """
    await until(lambda: service.health.state != "starting", 2 * PATIENCE_S)
    assert service.health.ready, service.health.detail


def load_is(service: EngineService, requests: int) -> bool:
    """Whether it has so many requests, running or (where one runs at a time) waiting."""
    snapshot = service.snapshot
    return snapshot is not None and snapshot.load.running + snapshot.load.waiting == requests


async def closing_ends_every_answer(service: EngineService, long: Request) -> None:
    """Close a service while three long answers run: each ends with an error."""
    streams = [await service.submit(long) for _ in range(3)]
    readers = [asyncio.ensure_future(read(stream)) for stream in streams]
    await until(lambda: load_is(service, 3))
    assert not await service.drain(0.01)
    await service.close()
    results = await asyncio.wait_for(asyncio.gather(*readers, return_exceptions=True), PATIENCE_S)
    assert all(isinstance(result, EngineError) for result in results)
