"""The engine: `add` requests, call `step` while it `has_work`, deliver what comes out.

Every request that `add` accepts ends with exactly one finished output per choice, or is aborted by the
caller.

    add ─ refused (RequestError, RequestTooLarge, QueueFull): nothing happened
     └─ step … step ─ "stop" | "length" | "error" for each choice
     └─ abort ─ its outputs say "abort"

The loop, on one screen: `_overlap_loop` launches the next step, then processes the tokens of the last one; a
sequence that ends with them has its token of the step in flight dropped (`in_flight.py`). `_plain_loop` waits
for the tokens of each step: it runs on devices without CUDA graphs, and is the oracle of the other in tests.

Not thread-safe by design: one thread drives it (`backends/native/worker.py`), and nothing here needs a lock.
"""

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from itertools import count, zip_longest
from traceback import clear_frames

import torch

from snugvl.core.config import EngineConfig
from snugvl.core.service import Load
from snugvl.engine import pressure
from snugvl.engine.admission import check_prompt, max_tokens_now
from snugvl.engine.claims import DeviceClaim
from snugvl.engine.encoder import Encoder
from snugvl.engine.in_flight import InFlight, choose, chunks_in_flight, decode_in_flight, launch_next
from snugvl.engine.memory import MemoryReclaimer, allocate, config_for, state_bytes
from snugvl.engine.oom import no_room, out_of_memory, refusal, release
from snugvl.engine.pressure import POLL_S, PressureMonitor
from snugvl.engine.request import EngineRequest, TokenOutput
from snugvl.engine.runner import Runner
from snugvl.engine.sampling.masks import Mask, MaskPace, MaskThreads, mask_threads, settle
from snugvl.engine.sampling.sampler import Sampled
from snugvl.engine.scheduler import Chunk, Schedule, Scheduler, prefill_beside_decodes
from snugvl.engine.sequence import Sequence, State, choices_of, heir_of, no_token, past_deadline
from snugvl.engine.speculation import Speculation
from snugvl.errors import EngineError, QueueFull, RequestError, SnugvlError, engine_failed
from snugvl.models.batch import Network

logger = logging.getLogger(__name__)


class Engine:
    """Runs requests on a model with a KV cache of fixed size, made smaller only for other programs."""

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
        self.capture_next = self._runner.capture_next
        self._reclaimer = None
        if monitor is not None:
            monitor.begin(config, self._cache.nbytes // config.num_blocks, state_bytes(self._cache))
            self._reclaimer = MemoryReclaimer(monitor, config, self._scheduler, self._encoder, self._runner)
        self._in_flight: InFlight | None = None  # a step whose tokens are not read yet
        self._waits_since: float | None = None  # the oldest request, as other programs hold the memory
        self._alone: Chunk | None = None  # all of the step that runs, if it has nothing beside it
        self._requests = OutputProcessor(self._scheduler, self._runner, self._keep_encodings)
        self._arrivals = count()
        self._speculation = Speculation(config, self._runner.drafter)
        self._masks = MaskThreads(
            mask_threads(), model.config.text.vocab_size, pinned=model.device.type == "cuda"
        )
        self._claim = claim or DeviceClaim(model.device)
        self._claim.use(self._runner.graph_cache.note_release, self._masks.close, self._runner.close)
        self.steps = self._computed = self._faults = self._shortages = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._requests)

    @property
    def stats(self) -> Load:
        """Load and counters of the engine now."""
        pool = self._scheduler.pool
        return Load(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            free_blocks=pool.num_free,
            num_blocks=pool.num_blocks,
            planned_blocks=self.config.num_blocks if self._reclaimer is None else self._reclaimer.most,
            block_size=self.config.block_size,
            preemptions=self._scheduler.preemptions,
            prefix_query_tokens=self._scheduler.prefix_query_tokens,
            prefix_hit_tokens=self._scheduler.prefix_hit_tokens,
            prompt_tokens=self._computed,
            generated_tokens=self._requests.generated,
            forced_tokens=self._requests.forced,
            draft_method=self._speculation.method,
            drafted_tokens=self._speculation.drafted,
            accepted_tokens=self._speculation.accepted,
            items_encoded=self._encoder.items_encoded,
            encoder_queries=self._encoder.queries,
            encoder_hits=self._encoder.hits,
            faults=self._faults,
            shortages=self._shortages,
            kernel_compilations=self._runner.compilations.count,
            graph_captures=self._runner.graph_cache.captures,
            recorded=self._runner.graph_cache.spare,
        )

    def add(self, request: EngineRequest) -> None:
        """Queue a request. It has not been touched when this raises.

        Raises:
            RequestError: the prompt, its images or its id are wrong.
            RequestTooLarge, OutOfMemory: it could not finish even alone, or not while others hold memory.
            QueueFull: `max_waiting` requests are waiting already.
        """
        if request.request_id in self._requests:
            raise RequestError(f"request {request.request_id!r} is already running", field="request_id")
        prompt = check_prompt(request, self.model.config)
        blocks = None if self._reclaimer is None else self._reclaimer.limit
        max_tokens = max_tokens_now(request, prompt, self.config, blocks)
        if self._scheduler.num_new >= self.config.max_waiting:
            raise QueueFull(f"{self.config.max_waiting} requests are waiting already; try again later")
        choices = choices_of(request, prompt, next(self._arrivals), max_tokens)
        if request.grammar is not None:
            pace = MaskPace()
            for each in choices:
                each.grammar = Mask(request.grammar.start(), self._masks, pace, each.ends)
        if self._speculation.on:
            self._speculation.prepare(choices)
        choices[0].siblings = choices[1:]
        self._requests[request.request_id] = choices
        self._scheduler.add(choices[0])

    def abort(self, request_id: str, choice: int | None = None) -> list[TokenOutput]:
        """End a request, or one choice of it; returns the outputs that say so, none for an unknown one."""
        return self._requests.abort(request_id, choice)

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
        outputs = self._requests.expire()
        self._alone = None
        try:
            if self._reclaimer is not None and not self.steps:
                self._reclaimer.start()
            self.poll_memory()
            if self._in_flight is None or self._in_flight.runs_ahead:  # or its tokens would wait for that
                self._runner.capture_due()
            if self._runner.has_graphs:
                self._overlap_loop(outputs, meanwhile)
            else:
                self._plain_loop(outputs)
        except Exception as error:
            outputs += self._recover(error)
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
        if last is None or (self._in_flight is None and self._decodes_on):
            step = self._schedule(outputs)
            if step is not None:
                launched = self._launch(step, outputs)
                if launched.decodes:
                    self._in_flight = launched
                else:
                    self._process(launched, outputs)

    def reset(self, error: SnugvlError | None = None) -> list[TokenOutput]:
        """End every request that has started with `error` and go on with an empty cache.

        Those that still wait for their first step stay in the queue.
        """
        error = error or EngineError("the engine was reset while this request was running")
        self._in_flight = None
        self._scheduler.reset()
        self._encoder.clear()
        return self._requests.fail_all(error, started=True)

    def close(self) -> None:
        """Give back network, cache and graphs; running requests end without outputs. Safe to call twice."""
        claim = self._claim
        vars(self).clear()
        self._claim = claim
        claim.release()

    def poll_memory(self, *, at_once: bool = False) -> None:
        """Make room for other programs that need memory, or take it back; at most every `POLL_S` seconds.

        The KV cache becomes smaller or larger, and empty: running sequences are computed again.
        """
        blocks = None if self._reclaimer is None else self._reclaimer.poll(at_once=at_once)
        if self._reclaimer is not None and blocks is not None:
            self._in_flight = None
            self._reclaimer.resize_cache(blocks)

    def memory(self) -> dict[str, int]:
        """Bytes held, by component. `vision_inputs` are the patches of unfinished requests, on the host."""
        return {**self._runner.memory(), "vision_inputs": self._requests.vision_bytes}

    def check_integrity(self) -> None:
        """Assert that blocks, queues and requests agree; when idle, that everything is free again."""
        self._scheduler.check_integrity(in_flight=self._in_flight is not None)
        self._requests.check()
        if not self.has_work:
            assert self._scheduler.pool.num_used == 0, "blocks are held without a request"
            assert self._encoder.idle, "encoder outputs are held without a request"

    @property
    def _decodes_on(self) -> bool:
        """Whether the next step only decodes, and needs nothing done before: it starts at once."""
        running = self._scheduler.running
        return (
            bool(running)
            and not self._scheduler.could_admit
            and not any(each.prefills or each.alone for each in running)
            and not self._runner.graph_cache.has_due
        )

    def _schedule(self, outputs: list[TokenOutput]) -> Schedule | None:
        """Choose a step; None where nothing can be computed now."""
        running = self._scheduler.running
        late, masked = False, [s for s in running if s.grammar is not None]
        if masked:
            late = settle((s.grammar for s in masked if not s.prefills), self._masks)
        for sequence in masked if self.config.skip_forced else ():
            outputs += self._requests.skip_forced(sequence)
        preemptions = self._scheduler.preemptions
        step = self._scheduler.schedule(self._encoder.ready)
        if step.chunks:
            self._waits_since = None
            if self._speculation.on:
                self._speculation.extend(step, self._scheduler.pool)
            if not step.decodes or self._scheduler.preemptions > preemptions:
                self._encoder.keep(self._scheduler.running, self.config.max_batched_tokens)
            return step
        if late and not outputs:
            self._masks.wait(POLL_S)  # no other sequence has anything to compute
        elif self.has_work and not outputs:
            outputs += self._wait()
        return None

    def _launch(self, step: Schedule, outputs: list[TokenOutput]) -> InFlight:
        """Start a step, in which each sequence whose tokens are all computed gets its next one."""
        self._alone = step.chunks[0] if step.alone else None
        logits, replay = self._runner.run(step)
        sequences = [chunk.sequence for chunk in step.chunks]
        step.settle()
        self._count(step.tokens)
        if replay is not None and all(each.grammar is None or each.grammar.quick for each in sequences):
            launched = decode_in_flight(sequences, replay, self._runner.graphs)
        else:
            for each in sequences:
                self._scheduler.publish(each)
            if self._scheduler.snapshots.count:
                self._runner.save_states(self._scheduler.snapshots.leave(step.chunks))
            heads = [
                (chunk, [chunk.sequence, *self._fork(chunk.sequence)])
                for chunk in step.chunks
                if chunk.samples
            ]
            launched = chunks_in_flight(logits, heads, step)
        self._encode_ahead(step, launched, outputs)
        return launched

    def _launch_next(self, last: InFlight, outputs: list[TokenOutput]) -> InFlight | None:
        """Start the step after the one in flight, before its tokens are read; None where they are needed
        first."""
        if self._scheduler.snapshots.count:
            self._runner.save_states(self._scheduler.snapshots.take(last.sequences))
        if last.masked:
            settle((s.grammar for s in last.sequences if s.state is State.RUNNING), self._masks)
            for row, sequence in enumerate(last.sequences if self.config.skip_forced else ()):
                if forced := self._requests.skip_forced(sequence):
                    outputs += forced
                    last.void.add(row)
            choose(last, self._runner)
        if self._speculation.on and self._speculation.waits(last.sequences):
            return None
        launched = launch_next(last, self._runner, self._scheduler)
        if launched is not None:
            self._count(launched.tokens)
        return launched

    def _process(self, last: InFlight, outputs: list[TokenOutput]) -> None:
        """Read the tokens of a step, waiting for it, and give them to their sequences."""
        known = self._requests.generated
        for sequence, drafts, results in last.results():
            if not drafts:
                outputs += self._requests.give(sequence, results[0])
                continue
            told = self._requests.take(sequence, drafts, results)
            self._speculation.count(sequence, drafts, told)
            outputs += told
        if not last.decodes:
            self._keep_encodings()
        if self._speculation.on:
            if not last.runs_ahead:
                self._speculation.ask_ahead(self._scheduler)
            self._speculation.learn(last.streams, self._requests.generated - known)

    def _count(self, tokens: int) -> None:
        self.steps += 1
        self._computed += tokens

    def _fork(self, head: Sequence) -> list[Sequence]:
        """Start the other choices from a sequence whose prompt is computed; returns them."""
        siblings = self._scheduler.fork(head)
        self._runner.share_state(head, [s for s in siblings if s.state is State.RUNNING])
        return siblings

    def _wait(self) -> list[TokenOutput]:
        """Let some time pass: other programs hold the memory that the oldest request needs.

        One that has waited for long enough ends, so that those behind it that need less have their turn.
        """
        now = time.monotonic()
        self._waits_since = now if self._waits_since is None else self._waits_since
        if now - self._waits_since < pressure.PATIENCE_S:
            time.sleep(POLL_S)
            return []
        self._waits_since = None
        head = self._scheduler.waiting[0]
        return self._requests.fail(head.request.request_id, no_room(head.length, self._scheduler.pool))

    def _encode(self, chunk: Chunk, outputs: list[TokenOutput]) -> None:
        """Work a slice at an image of a chunk that waits for it. Only its own request ends with a fault."""
        if chunk.sequence.state is State.FINISHED:  # a choice that decodes has ended the request
            return
        try:
            self._encoder.advance(chunk)
        except Exception as error:
            if out_of_memory(error):  # the next step is its own; others keep what they have
                self._shortages += 1
                chunk.sequence.alone = True
                self._runner.drop_graphs()
                if self._reclaimer is not None:
                    self._reclaimer.claim_workspace()
                return
            fault = self._fault(error, "encoding an image")
            outputs += self._requests.fail(chunk.sequence.request.request_id, fault)

    def _encode_ahead(self, step: Schedule, launched: InFlight, outputs: list[TokenOutput]) -> None:
        """Work at the image of the chunk that the step left out, or of the next prompt if it left none out.

        The latter on a GPU, which has work then while the host reads and delivers the step's tokens.
        """
        if not launched.decodes:
            self._keep_encodings()
        for chunk in step.later:
            self._encode(chunk, outputs)
        if self._runner.has_graphs and not step.later and (upcoming := self._scheduler.upcoming()):
            self._encode(upcoming, outputs)

    def _recover(self, error: Exception) -> list[TokenOutput]:
        """Go on after a step that failed: try again with less at once, or end what may have caused it."""
        if not out_of_memory(error) or not self._scheduler.running:
            fault = self._fault(error, "a step")
            # Nothing had started: the fault is in what waits, and would come back for ever.
            return self.reset(fault) or self._requests.fail_all(fault)
        self._shortages += 1
        self._in_flight = None
        outputs = list[TokenOutput]()
        if self._alone is None:
            logger.warning("a step ran out of memory, its requests go on one by one: %s", error)
            self._scheduler.preempt_all()
        else:
            failure = refusal(error, self._alone, self.model.device)
            logger.warning("%s", failure)
            outputs = self._requests.fail(self._alone.sequence.request.request_id, failure)
        self._encoder.clear()
        clear_frames(error.__traceback__)  # they hold the step's tensors
        self._runner.drop_graphs()
        release(self.model.device)
        if self._reclaimer is not None:
            self._reclaimer.claim_workspace()
        self.poll_memory(at_once=True)
        return outputs

    def _keep_encodings(self) -> None:
        who = (*self._scheduler.running, *self._scheduler.waiting[:1])
        self._encoder.keep(who, self.config.max_batched_tokens)

    def _fault(self, error: Exception, what: str) -> EngineError:
        """Log and count an exception of the model; returns the error for the request."""
        # Logged here and not chained: a traceback would keep the step's tensors alive in the outputs.
        logger.exception("%s failed", what)
        self._faults += 1
        return engine_failed(error)


class OutputProcessor(dict[str, list[Sequence]]):
    """The unfinished choices, by request id: gives them their tokens, and ends them.

        add ─► choices ─┬─ a token ends it: stop, length ─┬─► its blocks and slot are free; with the last
                        ├─ abort                          │   choice the request is forgotten
                        └─ fail, expire: all of them ─────┘

    Attributes:
        generated: tokens that were given; `forced`: those of them that a grammar forced.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, left: Callable[[], None]) -> None:
        """`left` is called when a choice has ended, so that memory held for it may go."""
        super().__init__()
        self.generated = self.forced = 0
        self._scheduler = scheduler
        self._runner = runner
        self._left = left

    @property
    def vision_bytes(self) -> int:
        """Bytes of the patches of their pictures, on the host; those of one picture count once."""
        items = (each.patches for choices in self.values() for each in choices[0].prompt.vision)
        return sum({id(patches): patches.nbytes for patches in items}.values())

    def give(self, sequence: Sequence, result: Sampled) -> list[TokenOutput]:
        """Give a sequence a token, or end its request with an error where sampling found none."""
        self._scheduler.publish(sequence)  # before the token, whose own slot may be in the air
        if result.token_id is None:
            self._scheduler.withdraw(sequence)
            return self.fail(sequence.request.request_id, no_token(sequence))
        self.generated += 1
        output = sequence.take(result)
        return [self.end(sequence, output) if output.finish else output]

    def take(self, sequence: Sequence, drafts: tuple[int, ...], results: Rows[Sampled]) -> list[TokenOutput]:
        """Give a sequence its token, and another one for each draft that was right.

        `results`: one more than drafts; behind a draft that was wrong they count for nothing.
        """
        outputs = list[TokenOutput]()
        for draft, result in zip_longest(drafts, results):
            if sequence.state is State.FINISHED:  # a token of its own has ended it
                break
            if drafts and result.token_id is None:  # a draft may have broken it: it goes on without any
                sequence.drafts = None
                self._scheduler.withdraw(sequence)
                self._scheduler.preempt(sequence)
                break
            outputs += self.give(sequence, result)
            if draft is None or draft != result.token_id:
                break
            if sequence.state is State.RUNNING:
                sequence.confirm(state_follows=not self._runner.can_recompute)
        return outputs

    def skip_forced(self, sequence: Sequence) -> list[TokenOutput]:
        """Give a sequence that decodes the tokens that its grammar forces, if they are enough.

        No logits are computed for them, so a request that wants log-probabilities computes them all.
        """
        mask, outputs = sequence.grammar, list[TokenOutput]()
        if mask is None or not mask.forced or sequence.request.sampling.logprobs is not None:
            return outputs
        if mask.ready and sequence.decodes and (mask.ends or len(mask.forced) >= self._runner.least_run):
            while sequence.state is State.RUNNING and mask.forced:
                self.forced += 1
                outputs += self.give(sequence, Sampled(mask.forced[0]))
        return outputs

    def end(self, sequence: Sequence, output: TokenOutput) -> TokenOutput:
        """Free a choice and, with the last one, forget its request."""
        self._scheduler.finish(sequence)
        if sequence.grammar is not None:
            sequence.grammar.drop()
        choices = self[output.request_id]
        choices.remove(sequence)
        if (heir := heir_of(sequence, choices)) is not None:
            self._scheduler.add(heir)
        if not choices:
            del self[output.request_id]
        self._left()
        return output

    def abort(self, request_id: str, choice: int | None = None) -> list[TokenOutput]:
        """End a request, or one choice of it; what is unknown or finished stays so."""
        return [
            self.end(sequence, TokenOutput(request_id, sequence.choice, None, finish="abort"))
            for sequence in list(self.get(request_id, []))
            if choice is None or sequence.choice == choice
        ]

    def fail(self, request_id: str, error: SnugvlError) -> list[TokenOutput]:
        """End a request with an error."""
        return [
            self.end(s, TokenOutput(request_id, s.choice, None, finish="error", error=error))
            for s in list(self[request_id])
        ]

    def fail_all(self, error: SnugvlError, *, started: bool = False) -> list[TokenOutput]:
        """End all requests with an error, or those that have `started`."""
        ids = [r for r, choices in self.items() if not started or any(s.started for s in choices)]
        return [output for request_id in ids for output in self.fail(request_id, error)]

    def expire(self) -> list[TokenOutput]:
        """End the requests whose deadline has passed."""
        now = time.monotonic()
        late = [(request_id, past_deadline(choices, now)) for request_id, choices in self.items()]
        return [output for request_id, error in late if error for output in self.fail(request_id, error)]

    def check(self) -> None:
        """Assert that choices, queues and requests agree."""
        queued = {id(s) for queue in (self._scheduler.running, self._scheduler.waiting) for s in queue}
        live = [s for choices in self.values() for s in choices]
        parked = {id(s) for leader in live for s in leader.siblings}
        assert queued | parked == {id(s) for s in live}, (
            "a live choice is neither queued nor parked, or vice versa"
        )
        assert not queued & parked, "a parked choice is queued"
        assert all(self.values()), "a finished request is still known"
