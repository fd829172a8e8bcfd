"""The engine: `add` requests, call `step` while it `has_work`, deliver what comes out.

Every request that `add` accepts ends with exactly one finished output per choice, or is aborted by the
caller.

    add ─ refused (RequestError, RequestTooLarge, QueueFull): nothing happened
     └─ step … step ─ "stop" | "length" | "error" for each choice
     └─ abort ─ its outputs say "abort"

Not thread-safe by design: one thread drives it (`backends/engine_thread.py`), and nothing here needs a lock.
"""

from snugvl.core.service import Load
from snugvl.engine.admission import check_prompt, max_tokens_now
from snugvl.engine.loop import StepLoop
from snugvl.engine.request import EngineRequest, TokenOutput
from snugvl.engine.requests import choices_of
from snugvl.engine.sampling.masks import Mask, MaskPace
from snugvl.errors import EngineError, QueueFull, RequestError, SnugvlError


class Engine(StepLoop):
    """Runs requests on a model with a KV cache of fixed size, made smaller only for other programs."""

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
            generated_tokens=self._generated,
            forced_tokens=self._forced,
            draft_method=self._speculation.method,
            drafted_tokens=self._speculation.drafted,
            accepted_tokens=self._speculation.accepted,
            items_encoded=self._encoder.items_encoded,
            encoder_queries=self._encoder.queries,
            encoder_hits=self._encoder.hits,
            faults=self._recovery.faults,
            shortages=self._recovery.shortages,
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
        self._requests.add(choices)

    def abort(self, request_id: str, choice: int | None = None) -> list[TokenOutput]:
        """End a request, or one choice of it; returns the outputs that say so, none for an unknown one."""
        return self._requests.abort(request_id, choice)

    def capture_next(self) -> bool:
        """Capture a decode step's graph before a step needs it; whether others are left."""
        return self._runner.capture_next()

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

    def reset(self, error: SnugvlError | None = None) -> list[TokenOutput]:
        """End every request that has started, with `error`, and go on with an empty cache.

        Those that still wait for their first step stay in the queue.
        """
        self._in_flight = None
        return self._recovery.reset(
            error or EngineError("the engine was reset while this request was running")
        )

    def close(self) -> None:
        """Give back network, cache and graphs; running requests end without outputs. Safe to call twice."""
        claim = self._claim
        vars(self).clear()
        self._claim = claim
        claim.release()
