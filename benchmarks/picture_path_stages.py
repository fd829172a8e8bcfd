"""The server of `picture_path.py`, and its engine: functions on a picture's way that tell when they run.

python benchmarks/picture_path_stages.py server CHECKPOINT DEVICE     prints the port
python benchmarks/picture_path_stages.py engine …                     started by the server
"""

import functools
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

FILE = "SNUGVL_BENCHMARK_SPANS"  # environment: the file that all processes write to
STAND_IN = "SNUGVL_BENCHMARK_NETWORK_MS"  # environment: what stands in for encoding and prefill, "12,18"

BODY, FIELDS, BASE64 = "body arrives, JSON checked", "fields checked", "base64"
QUEUE, DECODE = "waits for a decoder", "decoder: there, decoding, back"
PACK, CROSS, TURN = "packed for the engine", "crosses, unpacked", "waits for a preparing thread"
PROMPT, PIXELS = "prompt", "pixels"
THREAD, ENGINE = "waits for the engine's thread", "engine, until its first token"
ENCODE, PREFILL = "encode: the host's part", "prefill: the same, and that"
BACK, CLIENT = "first token at the server", "first token at the client"
STAGES = {
    **dict.fromkeys((BODY, FIELDS, BASE64, QUEUE, DECODE, PACK, CROSS, TURN, PROMPT), 0),
    PIXELS: 1,
    THREAD: 0,
    ENCODE: 1,
    PREFILL: 1,
    **dict.fromkeys((ENGINE, BACK, CLIENT), 0),
}
"""Stages in order, with their depth: those of depth 1 lie within one of depth 0 beside them."""

_this = threading.local()  # `key`: the request that this thread of the engine works for


@functools.cache
def _file() -> int:
    return os.open(os.environ[FILE], os.O_WRONLY | os.O_APPEND)


def tell(key: str, stage: str, since: "Mark | None" = None) -> None:
    """Write down a stage that ends now; it began with the end of the one before, unless told.

    One write a line, so that processes don't mix theirs.
    """
    ended = time.monotonic()
    work = (None, 0.0, 0) if since is None else since.work()
    os.write(_file(), (json.dumps([key, stage, ended, *work]) + "\n").encode())


class Mark:
    """A moment of a thread."""

    def __init__(self) -> None:
        self._faults = _faults()
        self._began, self._cpu_s = time.monotonic(), time.thread_time()

    def work(self) -> tuple[float, float, int]:
        """When that was; seconds of processor that the thread had since, and pages that it touched first."""
        return self._began, time.thread_time() - self._cpu_s, _faults() - self._faults


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def watch(owner: Any, name: str, stage: str, key: Callable[..., str | None]) -> None:
    """Let a function tell of itself. `key`: the request it works for, from its arguments; None: not told."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def told(*args: Any, **kwargs: Any) -> Any:
        mark = Mark()
        try:
            return inner(*args, **kwargs)
        finally:
            if (found := key(*args, **kwargs)) is not None:
                tell(found, stage, mark)

    setattr(owner, name, told)


def watch_async(owner: Any, name: str, stage: str) -> None:
    """The same for a coroutine of a request in the server."""
    from snugvl.server.record import current

    inner = getattr(owner, name)

    @functools.wraps(inner)
    async def told(*args: Any, **kwargs: Any) -> Any:
        mark = Mark()
        try:
            return await inner(*args, **kwargs)
        finally:
            tell(current().id, stage, mark)

    setattr(owner, name, told)


def before(owner: Any, name: str, call: Callable[..., None]) -> None:
    """Call `call` with the arguments of a function before it."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def told(*args: Any, **kwargs: Any) -> Any:
        call(*args, **kwargs)
        return inner(*args, **kwargs)

    setattr(owner, name, told)


def server(checkpoint: str, device: str) -> int:
    """Serve until told to stop."""
    from snugvl.backends.process import life as process
    from snugvl.backends.process import wire
    from snugvl.backends.process.supervised import SupervisedEngine
    from snugvl.backends.process.wire import EngineChoice
    from snugvl.server.connection import address_of, listen
    from snugvl.server.intake.decoders import Decoders
    from snugvl.server.intake.intake import Intake
    from snugvl.server.receiving import RequestBody
    from snugvl.server.record import current
    from snugvl.server.run import run
    from snugvl.server.settings import ServerSettings

    jobs: dict[int, str] = {}  # whose bytes a decoder was given
    seen: set[int] = set()

    def delivered(_: Any, event: Any, __: Any) -> None:
        if isinstance(event, tuple) and event[0] not in seen:
            seen.add(event[0])
            tell(f"submit {event[0]}", BACK)

    def decodes(_: Any, __: Any, data: bytes, *___: Any) -> None:
        tell(jobs[id(data)], QUEUE)

    watch_async(RequestBody, "read_json", BODY)
    before(Intake, "picture", lambda *_, **__: tell(current().id, FIELDS))
    watch_async(Intake, "_bytes", BASE64)
    before(Decoders, "_decoded", lambda _, __, data, *___: jobs.update({id(data): current().id}))
    before(Decoders, "_decode", decodes)
    watch(Decoders, "_decode", DECODE, lambda _, __, data, *___: jobs.pop(id(data)))
    watch(
        wire,
        "encode",
        PACK,
        lambda m, *_: f"{current().id} submit {m.id}" if isinstance(m, wire.Submit) else None,
    )
    before(process.EngineProcess, "_deliver", delivered)
    listener = listen(ServerSettings(port=0))
    print(address_of(listener)[1], flush=True)
    choice = EngineChoice(checkpoint, device=device, context=4096)
    engine = SupervisedEngine(choice, command=(sys.executable, __file__, "engine"))
    return run(engine, ServerSettings(), listener, lambda _: None)


def engine(*arguments: str) -> None:
    """The engine's process; never returns."""
    from snugvl.backends import receiver
    from snugvl.backends.native import backend as native
    from snugvl.backends.process import child
    from snugvl.backends.process.engine_process import load, prepare
    from snugvl.backends.process.wire import Submit
    from snugvl.engine import encoder, runner
    from snugvl.inputs import pixels, prompt

    keys: dict[int, str] = {}  # of a receiver
    shown: dict[bytes, str] = {}  # who shows a picture, by its hash

    def arrived(_: Any, message: Any) -> None:
        if isinstance(message, Submit):
            tell(f"submit {message.id}", CROSS)

    def begun(_: Any, message: Submit, *__: Any) -> None:
        _this.key = f"submit {message.id}"
        tell(_this.key, TURN)

    def added(_: Any, request: Any, to: Any) -> None:
        if request.vision:
            keys[id(to)] = shown[request.vision[0].digest]
            tell(keys[id(to)], THREAD)

    def received(to: Any, _: Any) -> None:
        if id(to) in keys:
            tell(keys.pop(id(to)), ENGINE)

    def remember(_: Any, prepared: Any, *__: Any, **___: Any) -> None:
        shown.update({item.digest: _this.key for item in prepared.vision})

    def prefilled(_: Any, step: Any) -> str | None:
        prompts = [c.sequence.prompt for c in step.chunks if c.start < len(c.sequence.prompt)]
        return next((shown.get(prompt.vision[0].digest) for prompt in prompts if prompt.vision), None)

    watch(prompt.Processor, "prepare", PROMPT, _key)
    watch(pixels.ImagePreprocessor, "prepare", PIXELS, _key)
    before(child.Child, "handle", arrived)
    before(child.Child, "_submit", begun)
    before(native, "Receiver", remember)
    before(native.NativeBackend, "_add", added)
    before(receiver.Receiver, "receive", received)
    if STAND_IN in os.environ:
        _stand_in(*(float(value) / 1e3 for value in os.environ[STAND_IN].split(",")))
    watch(encoder.Encoder, "_encode", ENCODE, lambda _, item, *__: shown.get(item.digest))
    watch(runner.Runner, "run", PREFILL, prefilled)
    child.run(child.attach(*arguments), load, prepare)


def _key(*_: Any, **__: Any) -> str | None:
    return getattr(_this, "key", None)


def _stand_in(encode_s: float, prefill_s: float) -> None:
    """Let encoding and prefill be so much Python, as they are for the host of a GPU, and compute nothing."""
    import torch

    from snugvl.engine.encoder import Encoder, Encoding, _key
    from snugvl.engine.runner import Runner

    def encode(self: Any, item: Any, budget: float) -> None:
        _busy(encode_s)
        config = self._model.config
        width = config.text.hidden_size * (1 + len(config.vision.deepstack_layers))
        tokens = len(item.patches) // config.vision.spatial_merge_size**2
        self._encodings[_key(item)] = Encoding(torch.zeros(tokens, width))
        self.items_encoded += 1

    def run(self: Any, step: Any) -> Any:
        for chunk in step.chunks:
            self.encoder.rows(chunk)
        _busy(prefill_s if step.tokens > len(step.chunks) else prefill_s / 10)
        rows = sum(chunk.samples for chunk in step.chunks)
        return torch.zeros(rows, self.model.config.text.vocab_size), None

    Encoder._encode = encode  # type: ignore[method-assign]
    Runner.run = run  # type: ignore[method-assign]


def _busy(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


if __name__ == "__main__":
    if sys.argv[1] == "engine":
        engine(*sys.argv[2:])
    sys.exit(server(*sys.argv[2:]))
