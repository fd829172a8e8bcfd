"""Recovery from a step or an encoding that fails, and the end of requests that wait for memory in vain.

A step takes workspace. The plan has room for it, but another program may have taken that meanwhile, or the
plan was wrong. So a step that runs out of memory is tried again in parts, and only what fails alone ends:

    step  a ▒▒▒▒  b ▒  c ▒        out of memory: all three wait, what torch keeps goes back to the driver
          a ▒                     alone, a quarter as long, without a graph; it fails again: a ends
          b ▒                     alone, until it has a token; then it shares steps again
          c ▒  b ▒
"""

import logging
import re
import time
from traceback import clear_frames

import torch

from snugvl.engine import pressure
from snugvl.engine.encoder import Encoder
from snugvl.engine.memory import MemoryReclaimer
from snugvl.engine.pressure import POLL_S
from snugvl.engine.request import TokenOutput
from snugvl.engine.requests import Requests
from snugvl.engine.runner import Runner
from snugvl.engine.scheduler import Chunk, Scheduler
from snugvl.engine.sequence import BlockPool, State
from snugvl.errors import EngineError, OutOfMemory, SnugvlError, engine_failed
from snugvl.layers.device import out_of_memory, release

logger = logging.getLogger(__name__)
_ASKED = re.compile(r"Tried to allocate ([\d.]+ (?:[KMGT]iB|bytes))")


class Recovery:
    """Goes on after failures. No step is in flight when it is called.

    Attributes:
        faults: number of steps and encodings that failed with an error other than too little memory.
        shortages: number of those that ran out of memory.
        waits_since: when the oldest request began to wait for memory that other programs hold, or None.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        encoder: Encoder,
        runner: Runner,
        requests: Requests,
        reclaimer: MemoryReclaimer | None,
    ) -> None:
        self.faults = self.shortages = 0
        self.waits_since: float | None = None
        self._scheduler = scheduler
        self._encoder = encoder
        self._runner = runner
        self._requests = requests
        self._reclaimer = reclaimer

    def recover(self, error: Exception, alone: Chunk | None) -> list[TokenOutput]:
        """Go on after a step that failed: try again with less at once, or end what may have caused it.

        `alone`: all of the step, if it had nothing beside it.
        """
        if not out_of_memory(error) or not self._scheduler.running:
            fault = self._fault(error, "a step")
            # Nothing had started: the fault is in what waits, and would come back for ever.
            return self.reset(fault) or self._requests.fail_all(fault)
        self.shortages += 1
        outputs = list[TokenOutput]()
        if alone is None:
            logger.warning("a step ran out of memory, its requests go on one by one: %s", error)
            self._scheduler.preempt_all()
        else:
            failure = refusal(error, alone, self._runner.model.device)
            logger.warning("%s", failure)
            outputs = self._requests.fail(alone.sequence.request.request_id, failure)
        self._encoder.clear()
        clear_frames(error.__traceback__)  # they hold the step's tensors
        self._runner.graph_cache.stop()
        release(self._runner.model.device)
        if self._reclaimer is not None:
            self._reclaimer.claim_workspace()
            self._reclaimer.adapt(at_once=True)
        return outputs

    def reset(self, error: SnugvlError) -> list[TokenOutput]:
        """End every request that has started, with `error`; the cache is empty then."""
        self._scheduler.reset()
        self._encoder.clear()
        return self._requests.fail_all(error, started=True)

    def encode(self, chunk: Chunk) -> list[TokenOutput]:
        """Work a slice at an image of a chunk that waits for it. Only its own request ends with a fault."""
        if chunk.sequence.state is State.FINISHED:  # a choice that decodes has ended the request
            return []
        try:
            self._encoder.advance(chunk)
        except Exception as error:
            if out_of_memory(error):  # the next step is its own; others keep what they have
                self.shortages += 1
                chunk.sequence.alone = True
                self._runner.graph_cache.stop()
                if self._reclaimer is not None:
                    self._reclaimer.claim_workspace()
                return []
            fault = self._fault(error, "encoding an image")
            return self._requests.fail(chunk.sequence.request.request_id, fault)
        return []

    def wait(self) -> list[TokenOutput]:
        """Let some time pass: other programs hold the memory that the oldest request needs.

        One that has waited for long enough ends, so that those behind it that need less have their turn.
        """
        now = time.monotonic()
        self.waits_since = now if self.waits_since is None else self.waits_since
        if now - self.waits_since < pressure.PATIENCE_S:
            time.sleep(POLL_S)
            return []
        self.waits_since = None
        head = self._scheduler.waiting[0]
        return self._requests.fail(head.request.request_id, no_room(head.length, self._scheduler.pool))

    def _fault(self, error: Exception, what: str) -> EngineError:
        """Log and count what the model raised, to be reported."""
        # Logged here and not chained: a traceback would keep the step's tensors alive in the outputs.
        logger.exception("%s failed", what)
        self.faults += 1
        return engine_failed(error)


def refusal(error: BaseException, chunk: Chunk, device: torch.device) -> OutOfMemory:
    """The error of a request whose step failed even alone: its size, memory asked for, memory allowed."""
    tokens = chunk.end - chunk.start
    pictures = chunk.sequence.prompt.vision_in(chunk.start, chunk.end)
    what = f"{tokens:,} tokens" if tokens > 1 else "1 token"
    if pictures:
        largest = max(t * h * w for t, h, w in (part.item.grid_thw for part in pictures))
        what += f" with {len(pictures)} images or videos of up to {largest:,} patches"
    found = _ASKED.search(str(error))
    asked = f" asked for {found[1]} more than there was" if found else " needed more than there was"
    smaller = "send smaller or fewer images, or " if pictures else ""
    return OutOfMemory(
        f"out of memory: a step of {what}, with nothing beside it,{asked}{_held(device)}; {smaller}"
        "try again when other programs have given memory back"
    )


def no_room(tokens: int, pool: BlockPool) -> OutOfMemory:
    """The error of a request that waited in vain for memory that other programs have taken."""
    held = pool.num_blocks * pool.block_size
    assert tokens > held, "a request waits for nothing"
    return OutOfMemory(
        f"out of memory: other programs have taken the KV cache's memory; {held:,} tokens of it are left, "
        f"and this request has {tokens:,}; try again when they have given memory back"
    )


def _held(device: torch.device) -> str:
    """Text with torch's memory, its limit, and the free memory of the card; empty on a CPU."""
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    most = total * torch.cuda.get_per_process_memory_fraction(device)
    held = torch.cuda.memory_reserved(device)
    return f" ({_mib(held)} held of {_mib(most)} allowed, {_mib(free)} free on the card)"


def _mib(nbytes: float) -> str:
    return f"{nbytes / (1 << 20):,.0f} MiB"
