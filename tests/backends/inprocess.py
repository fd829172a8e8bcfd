"""An engine in this process as a service: a server's tests need no child process."""

import asyncio
import time
from functools import partial
from typing import Any

import torch

from snugvl.backends.hosted import Hosted
from snugvl.backends.measure import Meter
from snugvl.backends.preparers import Preparation, Preparers
from snugvl.core.messages import Capabilities, Request, Stream
from snugvl.core.service import Health, Load, Snapshot, State, Tokens
from snugvl.errors import EngineUnavailable


class InProcessEngine:
    """A loaded backend that is ready from the start. A fault of the process takes the server with it."""

    def __init__(self, backend: Hosted[Any]) -> None:
        self._backend = backend
        self._state: State = "ready"
        self._preparers = Preparers()
        memory = backend.memory()
        device = torch.device("cpu" if backend.capabilities.device in ("", "CPU") else "cuda")
        held = memory["kv_cache"] + memory.get("recurrent_state", 0)
        self._meter = Meter(device, {}, {"weights": memory["weights"]}, held)

    @property
    def capabilities(self) -> Capabilities:
        """Of the loaded model."""
        return self._backend.capabilities

    @property
    def health(self) -> Health:
        """Ready until drained or closed."""
        return Health(self._state, f"{self.capabilities.model} is {self._state}")

    @property
    def snapshot(self) -> Snapshot:
        """Read now: waits for the step that runs. Nothing is planned here, so it only has measurements."""
        load = self._backend.stats()
        return Snapshot(time.time(), self._meter.read(self._backend.memory(), load), load)

    async def start(self) -> None:
        """Nothing to do: the model is loaded."""

    async def submit(self, request: Request) -> Stream:
        """Start a request; its prompt is prepared in a thread."""
        if self._state != "ready":
            raise EngineUnavailable("the server is shutting down")
        preparation = Preparation(request.deadline_s)
        return await self._preparers.run(
            preparation,
            lambda: self._backend.submit(request, preparation.go_on),
            self._preparers.weigh(request),
            discard=lambda stream: stream.close(),
        )

    async def tokenize(self, request: Request) -> Tokens:
        """Token ids of a text or a conversation."""
        preparation = Preparation()
        job = partial(self._backend.tokenize, request, preparation.go_on)
        return await self._preparers.run(preparation, job)

    async def detokenize(self, ids: tuple[int, ...]) -> str:
        """The text of token ids."""
        return await asyncio.to_thread(self._backend.detokenize, ids)

    async def drain(self, timeout_s: float) -> bool:
        """Wait until nothing runs."""
        self._state = "draining"
        end = time.monotonic() + timeout_s
        while self._load().running + self._load().waiting:
            if time.monotonic() >= end:
                return False
            await asyncio.sleep(0.05)
        return True

    async def close(self) -> None:
        """Stop the engine."""
        self._state = "failed"
        self._preparers.close()
        await asyncio.to_thread(self._backend.close)

    def _load(self) -> Load:
        return self._backend.stats()
