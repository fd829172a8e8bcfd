"""The engine's loop, on one screen.

`StepLoop._overlap_loop` launches the next step, then processes the tokens of the last one; a sequence that
ends with them has its token of the step in flight dropped (`graphs/ahead.py`). `StepLoop._plain_loop` waits
for the tokens of each step: it runs on devices without CUDA graphs, and is the oracle of the other in tests.
"""

import time
from collections.abc import Callable
from itertools import count

import torch

from snugvl.core.config import EngineConfig
from snugvl.engine.choosing import forced_tokens
from snugvl.engine.claims import DeviceClaim
from snugvl.engine.encoder import Encoder
from snugvl.engine.graphs.ahead import choose, decode_in_flight, decodes_on, launch_next
from snugvl.engine.memory import (
    MemoryReclaimer,
    allocate,
    config_for,
    expert_bytes,
    prefill_beside_decodes,
    state_bytes,
)
from snugvl.engine.pressure import POLL_S, PressureMonitor
from snugvl.engine.recovery import Recovery
from snugvl.engine.request import Sampled, TokenOutput
from snugvl.engine.requests import Requests, no_token
from snugvl.engine.runner import InFlight, Runner, chunks_in_flight
from snugvl.engine.sampling.masks import MaskThreads, mask_threads, settle
from snugvl.engine.scheduler import Chunk, Schedule, Scheduler
from snugvl.engine.sequence import Sequence, State
from snugvl.engine.speculation import Speculation
from snugvl.models.batch import Network


class StepLoop:
    """The parts of an engine (`engine.py`), and its steps."""

    def __init__(
        self,
        model: Network,
        config: EngineConfig,
        monitor: PressureMonitor | None = None,
        claim: DeviceClaim | None = None,
    ) -> None:
        """`monitor`: watches the device's memory, which other programs use as well; None: it isn't watched.

        `claim`: the claim on the device under which the model was loaded.
        """
        self.model = model
        self.config = config = config_for(model, config)
        self._cache = allocate(model, config)
        self._scheduler = Scheduler(config, prefill_beside_decodes(model.device))
        self._encoder = Encoder(model, config.encoder_cache_bytes)
        self._runner = Runner(model, self._cache, self._encoder, config)
        self._reclaimer = None
        if monitor is not None:
            block_bytes, beside = self._cache.nbytes // config.num_blocks, expert_bytes(model, config)
            monitor.begin(config, block_bytes, state_bytes(self._cache), beside)
            self._reclaimer = MemoryReclaimer(monitor, config, self._scheduler, self._encoder, self._runner)
        self._in_flight: InFlight | None = None  # a step whose tokens are not read yet
        self._alone: Chunk | None = None  # all of the step that runs, if it has nothing beside it
        self._requests = Requests(self._scheduler, self._keep_encodings)
        self._recovery = Recovery(
            self._scheduler, self._encoder, self._runner, self._requests, self._reclaimer
        )
        self._arrivals = count()
        self._speculation = Speculation(config, self._runner.drafter)
        self._masks = MaskThreads(mask_threads(), model.config.text.vocab_size)
        self._claim = claim or DeviceClaim(model.device)
        self._claim.use(self._runner.graph_cache.note_release, self._masks.close, self._runner.close)
        self.steps = self._computed = self._generated = self._forced = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._requests)

    @property
    def hurries(self) -> bool:
        """Whether the next `step` should begin before the outputs of the last one are delivered.

        That is so with grammars: sampling, and the forward pass after it, wait for the host to begin `step`.
        """
        return self._in_flight is not None and self._in_flight.masked

    @torch.inference_mode()
    def step(self, meanwhile: Callable[[], None] = lambda: None) -> list[TokenOutput]:
        """Advance running sequences by a token or a chunk of prompt; returns outputs, failures among them.

        `meanwhile` may be called once, when everything is started and the host would wait; it may `abort`.
        """
        late = time.monotonic() >= self._requests.deadline
        outputs = self._requests.expire() if late else list[TokenOutput]()
        self._alone = None
        try:
            if self._reclaimer is not None:
                if not self.steps:
                    self._reclaimer.start()
                self.poll_memory()
            if self._in_flight is None or self._in_flight.runs_ahead:  # or its tokens would wait for that
                self._runner.capture_due()
            if self._runner.has_graphs:
                self._overlap_loop(outputs, meanwhile)
            else:
                self._plain_loop(outputs)
        except Exception as error:
            self._in_flight = None
            outputs += self._recovery.recover(error, self._alone)
        return outputs

    def _plain_loop(self, outputs: list[TokenOutput]) -> None:
        """Launch a step and process it: nothing runs ahead of its tokens."""
        step = self._schedule(outputs)
        if step is not None:
            self._process(self._launch(step, outputs), outputs)

    def _overlap_loop(self, outputs: list[TokenOutput], meanwhile: Callable[[], None]) -> None:
        """Launch the next step and process the last one: launch first where the next step can run ahead.

        A step with prompts takes long, and is processed in the same call.
        """
        last, self._in_flight = self._in_flight, None
        if last is not None:
            if last.runs_ahead:
                self._in_flight = self._launch_next(last, outputs)
            meanwhile()
            self._process(last, outputs)
        if last is None or (self._in_flight is None and decodes_on(self._scheduler, self._runner)):
            step = self._schedule(outputs)
            if step is not None:
                launched = self._launch(step, outputs)
                if launched.decodes:
                    self._in_flight = launched
                else:
                    self._process(launched, outputs)

    def poll_memory(self, *, at_once: bool = False) -> None:
        """Make room for other programs that need memory, or take it back; at most every `POLL_S` seconds.

        The KV cache becomes smaller or larger, and empty: running sequences are computed again.
        """
        blocks = None if self._reclaimer is None else self._reclaimer.poll(at_once=at_once)
        if self._reclaimer is not None and blocks is not None:
            self._in_flight = None
            self._reclaimer.resize_cache(blocks)

    def _schedule(self, outputs: list[TokenOutput]) -> Schedule | None:
        """Choose a step; None where nothing can be computed now."""
        late, masked = False, [s for s in self._scheduler.running if s.grammar is not None]
        if masked:
            late = settle((s.grammar for s in masked if not s.prefills), self._masks)
        for sequence in masked if self.config.skip_forced else ():
            outputs += self._skip_forced(sequence)
        preemptions = self._scheduler.preemptions
        step = self._scheduler.schedule(self._encoder.ready)
        if step.chunks:
            self._recovery.waits_since = None
            if self._speculation.on:
                self._speculation.extend(step, self._scheduler.pool)
            if not step.decodes or self._scheduler.preemptions > preemptions:
                self._encoder.keep(self._scheduler.running, self.config.max_batched_tokens)
            return step
        if late and not outputs:
            self._masks.wait(POLL_S)  # no other sequence has anything to compute
        elif self.has_work and not outputs:
            outputs += self._recovery.wait()
        return None

    def _launch(self, step: Schedule, outputs: list[TokenOutput]) -> InFlight:
        """Start a step, in which each sequence whose tokens are all computed gets its next one.

        Then work at the image of the chunk that the step left out; on a GPU, which has work while the host
        reads and delivers the step's tokens, at that of the next prompt if it left none out.
        """
        scheduler, chunks = self._scheduler, step.chunks
        self._alone = chunks[0] if step.alone else None
        logits, replay = self._runner.run(step)
        sequences = [chunk.sequence for chunk in chunks]
        step.settle()
        self._count(step.tokens)
        if replay is not None and all(each.grammar is None or each.grammar.quick for each in sequences):
            launched = decode_in_flight(sequences, replay, self._runner)
        else:
            for each in sequences:
                scheduler.publish(each)
            if scheduler.snapshots.count:
                self._runner.save_states(scheduler.snapshots.leave(chunks))
            heads = [
                (chunk, [chunk.sequence, *(self._fork(chunk.sequence) if chunk.sequence.siblings else ())])
                for chunk in chunks
                if chunk.samples
            ]
            launched = chunks_in_flight(logits, heads, step)
        if not launched.decodes:
            self._keep_encodings()
        waiting = step.later
        if self._runner.has_graphs and not waiting and (upcoming := scheduler.upcoming()):
            waiting = [upcoming]
        for chunk in waiting:
            outputs += self._recovery.encode(chunk)
        return launched

    def _launch_next(self, last: InFlight, outputs: list[TokenOutput]) -> InFlight | None:
        """Start the next step before the tokens in flight are read; None where they are needed first."""
        if self._scheduler.snapshots.count:
            self._runner.save_states(self._scheduler.snapshots.take(last.sequences))
        if last.masked:
            settle((s.grammar for s in last.sequences if s.state is State.RUNNING), self._masks)
            for row, sequence in enumerate(last.sequences if self.config.skip_forced else ()):
                forces = sequence.grammar is not None and sequence.grammar.forced
                if forces and (given := self._skip_forced(sequence)):
                    outputs += given
                    last.void.add(row)
            choose(last, self._runner)
        if self._speculation.on and self._speculation.waits(last.sequences):
            return None
        launched = launch_next(last, self._runner, self._scheduler)
        if launched is not None:
            self._count(launched.tokens)
        return launched

    def _process(self, last: InFlight, outputs: list[TokenOutput]) -> None:
        """Read the tokens of a step, and give them to their sequences; the first of all that waits for it."""
        known = self._generated
        for sequence, drafts, results in last.results():
            if not drafts:
                outputs += self._give(sequence, results[0])
                continue
            state_follows = not self._runner.can_recompute
            outputs += self._speculation.take(
                sequence, drafts, results, self._give, self._scheduler, state_follows=state_follows
            )
        if not last.decodes:
            self._keep_encodings()
        if self._speculation.on:
            if not last.runs_ahead:
                self._speculation.ask_ahead(self._scheduler)
            self._speculation.learn(last.streams, self._generated - known)

    def _give(self, sequence: Sequence, result: Sampled) -> list[TokenOutput]:
        """Give a sequence a token, or end its request where none can be chosen."""
        self._scheduler.publish(sequence)  # before the token, whose own slot may be in the air
        if result.token_id is None:
            self._scheduler.withdraw(sequence)
            return self._requests.fail(sequence.request.request_id, no_token(sequence))
        self._generated += 1
        output = sequence.take(result)
        return [self._requests.end(sequence, output) if output.finish else output]

    def _skip_forced(self, sequence: Sequence) -> list[TokenOutput]:
        """Give a sequence that decodes the tokens that its grammar forces, if they are enough."""
        outputs = list[TokenOutput]()
        for token in forced_tokens(sequence, self._runner.least_run):
            self._forced += 1
            outputs += self._give(sequence, Sampled(token))
        return outputs

    def _count(self, tokens: int) -> None:
        self.steps += 1
        self._computed += tokens

    def _fork(self, head: Sequence) -> list[Sequence]:
        """Start the other choices from a sequence whose prompt is computed; returns them."""
        siblings = self._scheduler.fork(head)
        self._runner.share_state(head, [s for s in siblings if s.state is State.RUNNING])
        return siblings

    def _keep_encodings(self) -> None:
        who = (*self._scheduler.running, *self._scheduler.waiting[:1])
        self._encoder.keep(who, self.config.max_batched_tokens)
