"""An engine process without an engine: the real child around a fake model that does what its name says.

echo        answers with "0 1 2 …", one word a millisecond, until max_tokens; says that its prompt has as many
            tokens as the first pixel of its picture has red
broken      reports a CheckpointError
once PATH   loads if PATH doesn't exist, and creates it; then reports DoesNotFit
slow        takes its time to load: all there is
sees        counts tokens of pictures by their pixels
cold        can't warm up
start:…, again:…    see `faulty.py`

A request that says a word of `faulty.py` brings that about; the answer to "begin pause" stops after a word.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import faulty

from snugvl.backends.engine_thread import Mailbox
from snugvl.backends.process.child import HostedModel, attach, run
from snugvl.backends.process.wire import EngineChoice
from snugvl.core.ledger import Ledger
from snugvl.core.messages import Capabilities, Delta, GoOn, Picture, Request, Text, Usage, going_on
from snugvl.core.options import Progress
from snugvl.core.resources import Scratch
from snugvl.core.service import Load, Tokens
from snugvl.errors import (
    CheckpointError,
    DoesNotFit,
    EngineError,
    OutputError,
    QueueFull,
    RequestTooLarge,
)


class Stream:
    def __init__(self, backend: "Backend", request: Request) -> None:
        self._mailbox: Mailbox[Delta] = Mailbox()
        self._backend = backend
        self._closed = False
        shown = [part for part in request.messages[0].content if isinstance(part, Picture)]
        self.prompt_tokens = shown[0].image.getpixel((0, 0))[0] if shown else 1  # type: ignore[index]
        self._count = request.sampling.max_tokens or 10
        first = request.messages[0].content[0] if request.messages else None
        self._pauses = isinstance(first, Text) and first.text == "begin pause"
        backend.running += 1
        threading.Thread(target=self._talk, daemon=True).start()

    def _talk(self) -> None:
        for index in range(self._count):
            time.sleep(0.001)
            if self._closed:
                break
            last = index == self._count - 1
            usage = Usage(1, self._count) if last else None
            self._mailbox.put(Delta(f"{index} ", 0, (), "length" if last else None, usage))
            if self._pauses:
                return
        self._backend.running -= 1
        self._mailbox.close()

    def __iter__(self) -> Any:
        while (delta := self._mailbox.get()) is not None:
            yield delta

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def forward(self, put: Callable[[Delta], None], end: Callable[[Exception | None], None]) -> None:
        self._backend.forwarded += 1
        self._mailbox.forward(put, end)

    def close(self) -> None:
        self._closed = True
        self._mailbox.close()


class Backend:
    capabilities = Capabilities("fake", 100, True, True, 100, 10)

    def __init__(self, name: str) -> None:
        self.name = name
        self.capabilities = replace(self.capabilities, counts_by_size=name != "sees")
        self.running = 0
        self.questions = self.waiting = self.forwarded = 0
        self.tired = self.stuck = False
        self.kept: list[Scratch] = []
        self.released = threading.Event()

    def submit(self, request: Request, go_on: GoOn = going_on) -> Stream:
        part = request.messages[0].content[0] if request.messages else None
        text = part.text if isinstance(part, Text) else ""
        if text in REFUSALS:
            raise REFUSALS[text]()
        if text == "print the environment":
            print("\n".join(sorted(os.environ)), flush=True)
        if text == "log":
            log = logging.getLogger("snugvl.somewhere")
            log.debug("a detail")
            log.info("a remark about %d", 1)
            log.warning("a warning")
        if text == "think":
            time.sleep(0.3)
        if text == "wait":
            self.waiting += 1
            self.released.wait()
            self.waiting -= 1
        if text == "release":
            self.released.set()
        if text == "tire":
            self.tired = True
        if text == "stall":
            self.stuck = True
            self.released.wait()
        faulty.act(text)
        if text == "keep":
            self.kept.append(Scratch("fake"))
        if text in ("gibberish", "garbage"):
            return Gibberish()  # type: ignore[return-value]
        return Stream(self, request)

    def warm_up(self) -> bool:
        """Say when it was called."""
        print(f"warming up while {self.running} are running", flush=True)
        if self.name == "cold":
            raise ZeroDivisionError("a bug while warming up")
        return False

    def stats(self) -> Load:
        self.questions += 1
        if self.stuck:
            time.sleep(1000)
        if self.tired:
            raise EngineError("the model is closed")
        # Answers that went to the server are told as encoded pictures, which nothing here encodes.
        return Load(running=self.running, waiting=self.waiting, items_encoded=self.forwarded)

    def memory(self) -> Mapping[str, int]:
        return {}

    def tokenize(self, request: Any, go_on: GoOn = going_on) -> Tokens:
        """A conversation has one token: whether the pixels of its picture came with it."""
        if request.messages:
            return Tokens((int(hasattr(request.messages[0].content[0].image, "tobytes")),))
        return Tokens(tuple(map(ord, request.prompt)))

    def detokenize(self, ids: tuple[int, ...]) -> str:
        return "".join(map(chr, ids))


class Gibberish:
    """A stream whose prompt has as many tokens as nobody can read."""

    @property
    def prompt_tokens(self) -> Any:
        return Unreadable()

    def forward(self, *_: object) -> None:
        """It says nothing."""

    def close(self) -> None:
        """It has nothing."""


class Unreadable:
    def __reduce__(self) -> Any:
        return int, ("no number",)


REFUSALS: Mapping[str, Callable[[], Exception]] = {
    "large": lambda: RequestTooLarge("9 tokens, at most 8 fit", field="messages"),
    "full": lambda: QueueFull("256 requests are waiting already"),
    "output": lambda: OutputError("no boxes", text="the answer"),
    "bug": lambda: ZeroDivisionError("a bug"),
    "odd": lambda: OddError(1, 2),
}


class OddError(OutputError):
    """Can't be pickled as it is."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"odd {first} {second}")


def load(choice: EngineChoice, report: Progress) -> HostedModel:
    name, _, path = choice.model.partition(" ")
    report("pretending", 0.5)
    faulty.at_start(choice.model)
    if name == "broken":
        raise CheckpointError("model.safetensors is truncated")
    if name == "once":
        if Path(path).exists():
            raise DoesNotFit("needs 9 GiB, 1 GiB is free")
        Path(path).touch()
    if name == "slow":
        time.sleep(1000)
    meter = SimpleNamespace(read=lambda _memory, _load: Ledger("nothing", (), 3, 2, 1))
    return HostedModel(Backend(name), meter)  # type: ignore[arg-type]


if __name__ == "__main__":
    run(attach(*sys.argv[1:]), load)
