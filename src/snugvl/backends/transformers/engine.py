"""Requests on a model of transformers, one after the other, each through the model's own `generate`.

This backend is for models that no other engine runs, and for layers that wait in host memory. Nothing here
knows how a family computes: whatever `generate` runs is run.

    submit ─ queue ─► generate: forward ─ sampling ─ forward ─ sampling ─ … ─► the next choice or request
                                          (`core/sampling.py`)

Choices of one request run one after the other as well: as rows of a batch they would have their pictures
encoded and held as often. transformers' own batching (`generate_batch`) takes token ids alone: no pictures,
and no processor of one request's logits, so neither seeds nor grammars.

What fails ends its request: a forward with what it raised, memory with the numbers. A CUDA error that poisons
the process ends the thread: only a new process helps.
"""

import gc
import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from threading import Condition, Thread, current_thread
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from snugvl.backends.transformers.sampling import GenerationRequest, SamplingProcessor, StopWhenOver
from snugvl.core.service import Load
from snugvl.core.sizes import format_size
from snugvl.engine.claims import DeviceClaim
from snugvl.engine.request import Sampled
from snugvl.engine.sampling.masks import MaskPace, MaskThreads, mask_threads
from snugvl.engine.sampling.sampler import scores_of
from snugvl.errors import (
    ENDINGS,
    DoesNotFit,
    EngineError,
    QueueFull,
    RequestError,
    RequestTooLarge,
    SnugvlError,
    engine_failed,
)
from snugvl.hardware import host
from snugvl.layers.device import release

MAX_WAITING = 256
SCORED_AT_ONCE = 64  # tokens of a prompt whose log-probabilities are wanted: of these all logits are there
LOOK_S = 0.01  # between two looks at whether the engine gets on
_CACHES = ("past_key_values", "cache_params", "state")  # as the outputs of a forward name theirs

logger = logging.getLogger(__name__)


class TransformersEngine:
    """Runs requests in a thread of its own. Every method may be called from any thread."""

    def __init__(
        self,
        model: Any,
        device: torch.device,
        dtype: torch.dtype,
        *,
        context: int,
        max_waiting: int | None = None,
        claim: DeviceClaim | None = None,
    ) -> None:
        """
        Args:
            device, dtype: of the inputs.
            context: tokens of one choice, prompt and answer together.
            max_waiting: requests that may queue before `QueueFull`; None: 256.
            claim: the claim on the device of a model loaded for this engine alone: its tensors end with the
                engine.
        """
        self.model = model
        self.context = context
        self._max_waiting = MAX_WAITING if max_waiting is None else max_waiting
        self.vocab_size = _logits_width(model)
        self._device = device
        self._dtype = dtype
        self._masks = MaskThreads(mask_threads(), self.vocab_size)
        self._claim = claim or DeviceClaim(device)
        # What accelerate keeps in host memory is in a circle of its hooks and modules, and nowhere else: only
        # the garbage collector finds that.
        more = () if claim is None else (partial(_empty, model), gc.collect)
        self._claim.use(lambda: None, self._masks.close, self._take_off_hooks, *more)
        self._queue: deque[GenerationRequest] = deque()
        self._running: GenerationRequest | None = None
        self._cache: Any = None  # of the answer that runs
        self._computed = self._generated = self._encoded = self._faults = 0
        self._beats = 0  # layers and tokens that were begun: whether it gets on
        self._hooks = [
            layer.register_forward_pre_hook(self._beat)
            for module in model.modules()
            if isinstance(module, torch.nn.ModuleList)
            for layer in module
        ]
        self._closed = False
        self._ending: EngineError | None = None  # the fault that ended the thread
        self._changed = Condition()
        self._thread = Thread(target=self._run, name="snugvl-engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. It has not been touched when this raises.

        Raises:
            RequestError: a bias for a token that the model doesn't have.
            RequestTooLarge: prompt and answer are more than the context.
            QueueFull: `max_waiting` requests are waiting already.
            EngineError: the engine is closed.
        """
        self._check_bias(request)
        self._check_length(request)
        with self._changed:
            self._check_open()
            if sum(not other.dropped for other in self._queue) >= self._max_waiting:
                raise QueueFull(f"{self._max_waiting} requests are waiting already; try again later")
            self._queue.append(request)
            self._changed.notify_all()

    def stats(self) -> Load:
        """Load and counters, once it is seen to get on. There are no blocks: the cache grows with the answer.

        Raises:
            EngineError: the engine is closed.
        """
        self._see_progress()
        return Load(
            running=int(self._running is not None),
            waiting=len(self._queue),
            prompt_tokens=self._computed,
            generated_tokens=self._generated,
            items_encoded=self._encoded,
            faults=self._faults,
        )

    def memory(self) -> dict[str, int]:
        """Bytes held besides weights. `vision_inputs`: inputs of unfinished requests, on the host."""
        self._see_progress()
        return {
            "kv_cache": cache_bytes(self._cache),
            "encoder_outputs": 0,
            "vision_inputs": sum(request.prompt.nbytes for request in self._unfinished()),
        }

    def close(self) -> None:
        """Stop after the present forward, end all requests with an error, and give back the model's memory.

        Safe to call twice.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if current_thread() is not self._thread:  # the garbage collector may run this there
            self._thread.join()
            self._claim.release()  # once more: where a bug ended the thread, the error held tensors until now

    def _run(self) -> None:
        """The engine's thread."""
        ending = EngineError("the model was closed while this request was running")
        try:
            while (request := self._next()) is not None:
                self._generate_choices(request)
                del request  # an idle engine holds no pictures
        except BaseException as error:
            ending = self._ending = engine_failed(error, "the engine's thread ended")
            raise  # to the thread's hook, which says where
        finally:
            with self._changed:
                self._closed = True
            for each in self._unfinished():
                each.fail(ending)
            self._running = self._cache = None
            self._queue.clear()
            del self.model
            self._claim.release()

    def _next(self) -> GenerationRequest | None:
        """The request whose turn it is, waiting for one; None: stop."""
        with self._changed:
            while not self._closed:
                self._tidy()
                if self._queue:
                    self._running = self._queue.popleft()
                    return self._running
                self._changed.wait()
        return None

    def _tidy(self) -> None:
        """Forget who waits no longer: readers that left, deadlines that passed."""
        with self._changed:
            for request in [*self._queue]:
                request.expire()
                if request.over:
                    self._queue.remove(request)
                    request.receiver.mailbox.close()

    def _unfinished(self) -> list[GenerationRequest]:
        with self._changed:
            return [*([] if self._running is None else [self._running]), *self._queue]

    def _generate_choices(self, request: GenerationRequest) -> None:
        """All choices of a request, one after the other."""
        pace, most = MaskPace(), request.sampling.max_tokens or self.context - request.prompt.tokens
        if request.sampling.prompt_logprobs:
            self._score(request)
        for choice in range(request.sampling.n):
            if self._closed or request.over:
                break
            sampler = SamplingProcessor(request, choice, most, self._masks, pace, self._between)
            failure = self._generate(sampler)
            self._cache = None
            if failure is not None and not self._closed:
                # Out of the `except`, whose traceback keeps tensors alive.
                gc.collect()
                release(self._device)
                request.fail(self._no_memory(sampler) if isinstance(failure, DoesNotFit) else failure)
        if self._closed:
            return  # it still runs: `_run` says so to everybody
        request.receiver.mailbox.close()  # of one that nobody reads; any other is closed
        self._running = None

    @torch.inference_mode()
    def _score(self, request: GenerationRequest) -> None:
        """Find the log-probabilities of a bare prompt's tokens, a few at a time."""
        ids, alternatives = request.prompt.prompt_ids, request.sampling.logprobs or 0
        found: list[Sampled] = []
        cache = None
        try:
            for start in range(0, len(ids) - 1, SCORED_AT_ONCE):
                piece = ids[start : min(start + SCORED_AT_ONCE, len(ids) - 1)]
                outputs = self.model(
                    input_ids=torch.tensor([piece], device=self._device),
                    attention_mask=torch.ones(1, start + len(piece), dtype=torch.int64, device=self._device),
                    past_key_values=cache,
                    use_cache=True,
                )
                cache = outputs.past_key_values
                targets = ids[start + 1 : start + 1 + len(piece)]
                found += scores_of(outputs.logits[0].float(), targets, [alternatives] * len(piece))
                request.expire()
                if self._closed or request.over:
                    return
        except ENDINGS:
            raise
        except BaseException as error:  # what Rust panics at is not an Exception
            if isinstance(error, torch.AcceleratorError) and not _out_of_memory(error):
                raise
            logger.exception("a forward of transformers failed")
            self._faults += 1
            failure = engine_failed(error)
            request.fail(DoesNotFit(str(failure)) if _out_of_memory(error) else failure)
        request.scores = tuple(found)

    @torch.inference_mode()
    def _generate(self, sampler: SamplingProcessor) -> SnugvlError | None:
        """One choice to its end; what went wrong, if anything did."""
        inputs = sampler.request.prompt.inputs
        try:
            with self.model.register_forward_hook(self._note_cache):
                self.model.generate(
                    **{name: self._placed(value) for name, value in inputs.items()},
                    max_new_tokens=sampler.most,
                    eos_token_id=None,  # `StopWhenOver` says when it ends
                    do_sample=False,  # of the one token that `SamplingProcessor` leaves
                    num_beams=1,
                    use_cache=True,
                    logits_processor=LogitsProcessorList([sampler]),
                    stopping_criteria=StoppingCriteriaList([StopWhenOver(sampler)]),
                )
        except ENDINGS:
            raise
        except BaseException as error:  # what Rust panics at is not an Exception
            if _out_of_memory(error):
                logger.warning("memory ran out %s", sampler.where)
                return DoesNotFit(str(engine_failed(error)))
            if isinstance(error, torch.AcceleratorError):
                raise
            # Logged here and not chained: a traceback would keep the forward's tensors alive.
            logger.exception("a forward of transformers failed")
            self._faults += 1
            return engine_failed(error)
        return None

    def _between(self, sampler: SamplingProcessor) -> None:
        """After every token: count, and look at who still waits."""
        first, request = len(sampler.tokens) == 1, sampler.request
        self._beats += 1
        self._generated += 1
        self._computed += request.prompt.tokens if first else 1
        self._encoded += request.prompt.pictures if first else 0
        self._tidy()
        if not sampler.over:
            request.expire()
            sampler.over = self._closed or request.over

    def _placed(self, value: torch.Tensor) -> torch.Tensor:
        """An input on the device, in the model's type where it is floating point."""
        return value.to(self._device, self._dtype if value.is_floating_point() else value.dtype)

    def _note_cache(self, _model: Any, _inputs: Any, outputs: Any) -> None:
        found = (getattr(outputs, name, None) for name in _CACHES)
        self._cache = next((cache for cache in found if cache is not None), None)

    def _take_off_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _beat(self, *_: Any) -> None:
        self._beats += 1

    def _see_progress(self) -> None:
        """Wait until a layer or a token is begun, or nothing runs.

        Who watches the engine must not take a forward of minutes for a hang (layers wait in host memory, or
        the GPU is a CPU), and must still notice one: a layer that lasts for minutes is one.
        """
        beats = self._beats
        while self._running is not None and self._beats == beats and not self._closed:
            time.sleep(LOOK_S)
        self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the model is closed" if self._ending is None else str(self._ending))

    def _check_bias(self, request: GenerationRequest) -> None:
        for token in request.sampling.logit_bias:
            if not 0 <= token < self.vocab_size:
                raise RequestError(
                    f"logit_bias has token id {token}; this model's vocabulary is 0 to {self.vocab_size - 1}",
                    field="logit_bias",
                )

    def _check_length(self, request: GenerationRequest) -> None:
        prompt, asked = request.prompt.tokens, request.sampling.max_tokens or 1
        most = self.context - prompt
        if most >= asked:
            return
        fits = f"max_tokens up to {most}" if most > 0 else f"a prompt of up to {self.context - 1}"
        raise RequestTooLarge(
            f"the request needs {prompt + asked:,} tokens: {prompt:,} of the prompt "
            f"({request.prompt.image_tokens:,} of them for pictures) and {asked:,} new; the context "
            f"holds {self.context:,}. What fits: {fits}",
            field="max_tokens" if most > 0 else "messages",
        )

    def _no_memory(self, sampler: SamplingProcessor) -> DoesNotFit:
        """Why a request can't run."""
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
        else:
            memory = host.memory()
            free, total = memory.free_bytes, memory.total_bytes
        pictures = sampler.request.prompt.image_tokens
        return DoesNotFit(
            f"memory ran out {sampler.where} ({pictures:,} of them for pictures), "
            f"though it ran alone; {format_size(free)} of {format_size(total)} are free beside the model. "
            "Send fewer or smaller pictures (max_pixels) or less text, or load the model with coarser weights"
        )


def cache_bytes(cache: object) -> int:
    """Bytes that a cache of any kind holds."""
    return sum(tensor.nbytes for tensor in _tensors(cache))


def _tensors(cache: object) -> Iterator[torch.Tensor]:
    """Every tensor inside, each once."""
    seen: set[int] = set()
    stack = [cache]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, dict):
            stack += item.values()
        elif isinstance(item, list | tuple):
            stack += item
        elif type(item).__module__.startswith("transformers.") and hasattr(item, "__dict__"):
            stack += vars(item).values()


def _logits_width(model: Any) -> int:
    head = model.get_output_embeddings()
    if head is not None and hasattr(head, "out_features"):
        return int(head.out_features)
    return int(model.config.get_text_config(decoder=True).vocab_size)


def _out_of_memory(error: BaseException) -> bool:
    """Whether a GPU's or the host's memory ran out."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _empty(model: Any) -> None:
    """Let go of all tensors of a model, in which modules, hooks and wrapped methods refer to each other."""
    for tensor in (*model.parameters(), *model.buffers()):
        with suppress(RuntimeError):  # of a type that no other data may take the place of
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
