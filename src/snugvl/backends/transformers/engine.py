"""Requests on a model of transformers: `add` them, `step` while it `has_work`, deliver what comes out.

One step is one forward: the prompt of the row that waits longest, if there is room for it, else the next
token of everybody who runs. Sampling is our engine's own (`engine/sampling/sampler.py`), row by row, so a
seed, a penalty or a grammar means the same here as there.

    add ─ waiting ──prompt──► running ──a token a step──► "stop" | "length" | "error"
             ▲                   │
             └── the batch failed: tokens kept, cache lost; computed again, alone or with fewer neighbours

Room is counted in tokens: rows in a batch are as wide as the longest (`batch.py`), so they need the number of
rows times the tokens that the longest may grow to. A request that fits alone can always finish.

What fails: a prompt, and its request ends with the error. A batch, and each of its rows runs again alone, so
that only the guilty one fails. Memory, and there are fewer rows at once; a row that doesn't fit alone ends
with the numbers. A CUDA error that poisons the process is raised: only a new process helps.

Not thread-safe: one thread drives it (`backends/worker.py`).
"""

import gc
import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from snugvl.backends.service import Load
from snugvl.backends.transformers.batch import Batch, prepared
from snugvl.backends.transformers.row import ModelRequest, Row, rows_of
from snugvl.engine.request import TokenOutput
from snugvl.engine.sampling.grammar import Mask, MaskPace, MaskThreads, gave_up, mask_threads
from snugvl.engine.sampling.sampler import Sampled, sample
from snugvl.errors import (
    DeadlineExceeded,
    DoesNotFit,
    EngineError,
    QueueFull,
    RequestTooLarge,
    SnugvlError,
    engine_failed,
)
from snugvl.hardware import host
from snugvl.hardware.sizes import format_size

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """What runs at once.

    Attributes:
        context: tokens of one choice, prompt and answer together.
        rows: choices that are decoded together.
        cache_tokens: rows times tokens of the longest row, at most; at least `context`.
        max_waiting: requests that may queue before `QueueFull`.
    """

    context: int
    rows: int = 8
    cache_tokens: int = 32768
    max_waiting: int = 256


class TransformersEngine:
    """Runs requests on a model that transformers loaded."""

    def __init__(self, model: Any, limits: Limits, device: torch.device, dtype: torch.dtype) -> None:
        """`device` and `dtype`: of the inputs."""
        self.limits = limits
        self.model = model
        self._device = device
        self._dtype = dtype
        self._waiting: deque[Row] = deque()
        self._batch: Batch | None = None
        self._rows: dict[str, list[Row]] = {}  # the choices of each request that are not finished
        self._most_rows = limits.rows  # fewer after memory ran out, until the engine idles
        vocab = int(model.config.get_text_config(decoder=True).vocab_size)
        self._masks = MaskThreads(mask_threads(), vocab)
        self._shares = True  # whether rows of this model can share a batch
        self._computed = self._generated = self._encoded = self._faults = self._lost = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._rows)

    @property
    def stats(self) -> Load:
        """What it is doing. There are no blocks: the cache grows and shrinks with the rows."""
        return Load(
            running=len(self._running),
            waiting=len(self._waiting),
            preemptions=self._lost,
            prompt_tokens=self._computed,
            generated_tokens=self._generated,
            items_encoded=self._encoded,
            faults=self._faults,
        )

    def add(self, request: ModelRequest) -> None:
        """Queue a request. It has not been touched when this raises.

        Raises:
            RequestTooLarge: prompt and answer are more than the context.
            QueueFull: `max_waiting` requests are waiting already.
        """
        most = self.limits.context - request.prompt_tokens
        asked = request.sampling.max_tokens
        if most < (asked or 1):
            most_prompt = self.limits.context - 1
            fits = f"max_tokens up to {most}" if most > 0 else f"a prompt of up to {most_prompt}"
            need, pictures = request.prompt_tokens + (asked or 1), request.prompt.prompt.image_tokens
            raise RequestTooLarge(
                f"the request needs {need:,} tokens: {request.prompt_tokens:,} of the prompt ({pictures:,} "
                f"of them for pictures) and {asked or 1:,} new; the context holds {self.limits.context:,}. "
                f"What fits: {fits}",
                field="max_tokens" if most > 0 else "messages",
            )
        new = {id(row.request) for row in self._waiting if not row.started}
        if len(new) >= self.limits.max_waiting:
            raise QueueFull(f"{self.limits.max_waiting} requests are waiting already; try again later")
        pace = MaskPace()
        rows = rows_of(request, asked or most, lambda state: Mask(state, self._masks, pace))
        self._rows[request.request_id] = rows
        self._waiting += rows

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one choice of it, and free what it holds. Unknown or finished: nothing."""
        for row in self._rows.get(request_id, []).copy():
            if choice in (None, row.choice):
                self._gone(row)
        if not any(self._alive(row) for row in self._running):
            self._batch = None

    @torch.inference_mode()
    def step(self) -> list[TokenOutput]:
        """One forward. Raises only what no request is to blame for and only a new process can mend."""
        outputs: list[TokenOutput] = []
        self._expire(outputs)
        rows: list[Row] = []
        failure = None
        try:
            self._prune()
            rows = self._next()
            if rows:
                self._start(rows, outputs)
            elif self._batch is not None:
                self._advance(self._batch, outputs)
        except Exception as error:
            if isinstance(error, torch.AcceleratorError) and not _out_of_memory(error):
                raise
            failure = self._noted(error)
        if failure is not None:  # out of the `except`, whose traceback keeps tensors alive
            self._recover(failure, rows, outputs)
        if not self._rows:
            self._most_rows = self.limits.rows
        return outputs

    def memory(self) -> dict[str, int]:
        """Bytes held besides weights. `vision_inputs`: inputs of unfinished requests, on the host."""
        prompts = {id(rows[0].request): rows[0].request.prompt for rows in self._rows.values()}
        return {
            "kv_cache": 0 if self._batch is None else self._batch.nbytes,
            "encoder_outputs": 0,
            "vision_inputs": sum(prompt.nbytes for prompt in prompts.values()),
        }

    @property
    def _running(self) -> list[Row]:
        return [] if self._batch is None else self._batch.rows

    def _alive(self, row: Row) -> bool:
        return row in self._rows.get(row.request.request_id, ())

    def _gone(self, row: Row) -> None:
        """Forget a row that ended; with the last one, its request. `_prune` frees its place."""
        if row.grammar is not None:
            row.grammar.drop()
        live = self._rows[row.request.request_id]
        live.remove(row)
        if not live:
            del self._rows[row.request.request_id]

    def _prune(self) -> None:
        """Free what rows that ended still hold."""
        self._waiting = deque(row for row in self._waiting if self._alive(row))
        if self._batch is not None:
            staying = [index for index, row in enumerate(self._batch.rows) if self._alive(row)]
            if staying:
                self._batch.keep(staying)
            else:
                self._batch = None

    def _next(self) -> list[Row]:
        """Whose prompt is computed now: a row, and those behind it that begin with the very same tokens."""
        if not self._waiting or not self._has_room(self._waiting[0], len(self._running)):
            return []
        first, *others = self._waiting
        rows = [first]
        for row in others:
            same = row.request is first.request and not (row.generated or first.generated or first.alone)
            if not same or not self._shares or not self._has_room(row, len(self._running) + len(rows)):
                break
            rows.append(row)
        return rows

    def _has_room(self, row: Row, beside: int) -> bool:
        """Whether it fits beside that many rows."""
        if not beside:
            return True
        alone = row.alone or any(other.alone for other in self._running) or not self._shares
        widest = max(row.longest, *(other.longest for other in self._running), 0)
        fits = (beside + 1) * widest <= self.limits.cache_tokens
        return not alone and fits and beside < self._most_rows

    def _start(self, rows: list[Row], outputs: list[TokenOutput]) -> None:
        """Compute a prompt, sample its first token, and let its rows join those that run."""
        first, prompt = rows[0], rows[0].request.prompt
        inputs = {name: self._placed(value) for name, value in prompt.inputs.items()}
        batch = prepared(self.model, inputs, first)
        logits = batch.prefill()
        if not batch.shared:
            self._shares, rows = False, rows[:1]
        for row in rows:
            self._waiting.remove(row)
            row.started = True
        self._computed += first.length
        self._encoded += prompt.pictures
        batch.copied(rows)
        self._sample(batch, logits.expand(len(rows), -1), outputs)
        if not batch.rows:
            return
        if self._batch is None:
            self._batch = batch
        else:
            self._join(self._batch, batch)

    def _join(self, batch: Batch, new: Batch) -> None:
        both = [*batch.rows, *new.rows]
        try:
            batch.join(new)
        except Exception:
            batch.rows = both  # half of the layers may hold both: all of them begin again
            raise

    def _advance(self, batch: Batch, outputs: list[TokenOutput]) -> None:
        logits = batch.decode()
        self._computed += len(batch.rows)
        self._sample(batch, logits, outputs)
        if not batch.rows:
            self._batch = None

    def _sample(self, batch: Batch, logits: torch.Tensor, outputs: list[TokenOutput]) -> None:
        """The next token of every row; those that end leave the batch."""
        self._masks.begin()
        results = sample(logits, [row.ask(index) for index, row in enumerate(batch.rows)])
        for row, result in zip(batch.rows, results, strict=True):
            if self._alive(row):  # a broken sibling may have ended its request
                self._take(row, result, outputs)
        staying = [index for index, row in enumerate(batch.rows) if self._alive(row)]
        if staying:
            batch.append([result.token_id or 0 for result in results])
            batch.keep(staying)
        else:
            batch.rows = []

    def _take(self, row: Row, result: Sampled, outputs: list[TokenOutput]) -> None:
        if result.token_id is None:
            self._fail(row.request.request_id, _no_token(row), outputs)
            return
        self._generated += 1
        finish = row.append(result.token_id)
        if finish is not None:
            self._gone(row)
        outputs.append(
            TokenOutput(
                row.request.request_id,
                row.choice,
                result.token_id,
                result.logprob,
                result.top_logprobs,
                finish,
            )
        )

    def _placed(self, value: torch.Tensor) -> torch.Tensor:
        """An input on the device, in the model's type where it is floating point."""
        dtype = self._dtype if value.is_floating_point() else value.dtype
        return value.to(self._device, dtype)

    def _expire(self, outputs: list[TokenOutput]) -> None:
        """End the requests whose deadline has passed."""
        now = time.monotonic()
        for request_id, rows in list(self._rows.items()):
            deadline = rows[0].request.deadline
            if deadline is not None and now >= deadline:
                done = sum(len(row.generated) for row in rows)
                text = f"the deadline passed {now - deadline:.3f} s ago, with {done} tokens generated"
                self._fail(request_id, DeadlineExceeded(text), outputs)

    def _fail(self, request_id: str, error: SnugvlError, outputs: list[TokenOutput]) -> None:
        outputs += [
            TokenOutput(request_id, row.choice, None, finish="error", error=error)
            for row in self._rows.pop(request_id)
        ]

    def _noted(self, error: Exception) -> SnugvlError:
        """What a forward raised, to be reported: `DoesNotFit` where memory ran out."""
        if _out_of_memory(error):
            logger.warning("memory ran out with %d rows running", len(self._running))
            return DoesNotFit(str(engine_failed(error)))
        # Logged here and not chained: a traceback would keep the step's tensors alive in the outputs.
        logger.exception("a forward of transformers failed")
        self._faults += 1
        return engine_failed(error)

    def _recover(self, failure: SnugvlError, rows: list[Row], outputs: list[TokenOutput]) -> None:
        """Go on after a failed forward, of the prompt of `rows` or else of the batch; see the top."""
        prompt = bool(rows) and rows[0] not in self._running
        lost = [row for row in (rows if prompt else self._running) if self._alive(row)]
        if not prompt:
            self._batch = None
        _give_back(self._device)
        if not lost:
            return
        memory = isinstance(failure, DoesNotFit)
        if memory and (self._running or len(lost) > 1):
            self._most_rows = max(len(self._running) or len(lost) // 2, 1)
        elif not memory and not prompt and len(lost) > 1:
            for row in lost:
                row.alone = True
        else:
            error = _no_memory(lost[0], self._device) if memory else failure
            self._fail(lost[0].request.request_id, error, outputs)
        self._lost += sum(row.started for row in lost)
        again = [row for row in lost if self._alive(row) and row not in self._waiting]
        self._waiting.extendleft(reversed(again))


def _out_of_memory(error: Exception) -> bool:
    """Whether a GPU's or the host's memory ran out."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _give_back(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _no_memory(row: Row, device: torch.device) -> DoesNotFit:
    """Why a row that ran alone can't run."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
    else:
        memory = host.memory()
        free, total = memory.free_bytes, memory.total_bytes
    pictures = row.request.prompt.prompt.image_tokens
    return DoesNotFit(
        f"memory ran out at {row.length:,} tokens of this request ({pictures:,} of them for pictures), "
        f"though it ran alone; {format_size(free)} of {format_size(total)} are free beside the model. Send "
        "fewer or smaller pictures (max_pixels) or less text, or load the model with coarser weights"
    )


def _no_token(row: Row) -> SnugvlError:
    """Why nothing could be sampled."""
    where = f"after {row.length} tokens of this request"
    if row.grammar is not None and row.grammar.error is not None:
        return gave_up(row.grammar, where)
    return EngineError(f"the model's logits are not finite {where}")
