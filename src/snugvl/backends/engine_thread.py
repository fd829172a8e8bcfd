"""The one thread that touches an engine, and the way of its tokens: to text, to the reader.

    engine.step ─► outputs ─► deliver ─► Receiver: text, stop strings, counts ─► Mailbox ─► its reader, in a
                                         a request's                                        thread or loop

`EngineWorker` is the thread of our own engine; transformers' engine has one of its own, and shares the rest.
Answers of engines in other processes come by `inbox.py`.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Condition, Lock, Thread, current_thread
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from snugvl.backends.inbox import own
from snugvl.core.messages import Delta, Logprob, ToolForm, Usage
from snugvl.core.sampling import SamplingParams
from snugvl.errors import ENDINGS, EngineError, engine_failed
from snugvl.inputs.detokenizer import Detokenizer
from snugvl.inputs.reasoning import ReasoningSplitter
from snugvl.inputs.tools.forms import markers, opening

if TYPE_CHECKING:  # an engine brings torch, which mailboxes can do without
    from snugvl.engine.engine import Engine
    from snugvl.engine.request import FinishReason, Sampled, TokenOutput
    from snugvl.inputs.prompt import PreparedPrompt
    from snugvl.inputs.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")
_Job = tuple[Callable[[], None], Future[Any] | None]  # the work, and the future that a caller waits for
CLOSED = "the model is closed"


class EngineWorker:
    """Steps the engine while it has work, and runs what others ask of it between two steps."""

    def __init__(
        self,
        engine: "Engine",
        deliver: Callable[["TokenOutput"], None],
        died: Callable[[EngineError], None] | None = None,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """`died` is called, in the engine's thread, with the error when a bug ends it; nothing is delivered
        after.

        `ended` is called there last of all, however it ended.
        """
        self.engine = engine
        self._deliver = deliver
        self._died = died
        self._ended = ended
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._undelivered: list[TokenOutput] = []  # of the last step, while the next one starts
        self._failure: BaseException | None = None  # of delivering them
        self._ending = CLOSED  # why nothing is taken any more, once nothing is
        self._closed = False
        self._lock = Lock()
        self._thread = Thread(target=self._run, name="snugvl-engine", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` between two steps and return its result, or raise what it raises.

        Raises:
            EngineError: the worker is closed, or a bug has ended it.
        """
        future: Future[T] = Future()

        def job() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:  # a panic of Rust is not an Exception, and not the engine's end
                future.set_exception(engine_failed(error))

        if not self._put((job, future)):
            raise EngineError(self._ending)
        return future.result()

    def post(self, function: Callable[[], None]) -> None:
        """Run `function` between two steps, without waiting for it; not at all once the worker has ended."""
        self._put((function, None))

    def close(self) -> None:
        """Stop after the current step, and wait for the thread's end. Safe to call twice."""
        if self._shut():
            self._jobs.put(None)
        if current_thread() is not self._thread:  # the garbage collector may run us there
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._run_jobs():
                outputs = self.engine.step(self._meanwhile)
                if self._failure is not None:
                    raise self._failure
                self._deliver_all()
                self._undelivered = outputs
                if not self.engine.hurries:
                    self._deliver_all()
        except BaseException as error:
            # `step` says that it never raises: a bug of ours, after which nothing of the engine is sure.
            failure = engine_failed(error, "the engine's thread ended")
            self._shut(str(failure))
            if self._died is not None:
                self._died(failure)
            raise  # to the thread's hook, which says where
        finally:
            self._refuse_jobs()
            self._ended()

    def _meanwhile(self) -> None:
        """Deliver within a step, keeping an error, which the step would take for a fault of the model."""
        try:
            self._deliver_all()
        except BaseException as error:
            self._failure = error

    def _deliver_all(self) -> None:
        outputs, self._undelivered = self._undelivered, []
        for output in outputs:
            self._deliver(output)

    def _put(self, job: _Job) -> bool:
        """Queue a job; False where the worker is closed and won't run it."""
        with self._lock:  # or it could come behind the last look into the queue, and its caller wait for ever
            if not self._closed:
                self._jobs.put(job)
            return not self._closed

    def _shut(self, ending: str = CLOSED) -> bool:
        """Take no more jobs, for the reason `ending`; returns whether it was open until now."""
        with self._lock:
            was_open, self._closed, self._ending = not self._closed, True, ending
            return was_open

    def _run_jobs(self) -> bool:
        """Run everything asked for, waiting for the next job while the engine idles. False: stop."""
        while True:
            if not self.engine.has_work:
                self._deliver_all()
            try:
                job = self._jobs.get(block=not self.engine.has_work)
            except Empty:
                return True
            self._deliver_all()  # what a job does comes behind what was said before it
            if job is None:
                return False
            job[0]()
            del job  # an idle worker holds nothing of its callers

    def _refuse_jobs(self) -> None:
        """Fail the jobs that came too late, so that no caller waits for ever."""
        while not self._jobs.empty():
            _, future = self._jobs.get() or (None, None)
            if future is not None:
                future.set_exception(EngineError(self._ending))


class Receiver:
    """Detokenises each choice, watches for stop strings, counts, and fills the mailbox.

    `calls`: the form of the tool calls that it may hold; None where no tools are offered. `grammar`: the
    whole text follows one, so none of it is reasoning.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        prompt: "PreparedPrompt",
        sampling: SamplingParams,
        stop_ids: frozenset[int],
        *,
        calls: ToolForm | None = None,
        grammar: bool = False,
    ) -> None:
        self.mailbox: Mailbox[Delta] = Mailbox()
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._prompt = prompt
        self._stop_ids = frozenset() if sampling.ignore_eos else stop_ids
        self._own_stop_ids = frozenset(sampling.stop_token_ids)
        # The markers of tool calls are text for the parser, even where they are special tokens.
        ids = [] if calls is None else [tokenizer.token_id(text) for text in markers(calls)]
        shown = frozenset(token for token in ids if token is not None)
        if sampling.special:
            shown |= tokenizer.special_ids - stop_ids - tokenizer.eos_ids - self._own_stop_ids
        self._detokenizers = {
            choice: Detokenizer(tokenizer, stop=sampling.stop, shown=shown, continues=prompt.bare)
            for choice in range(sampling.n)
        }
        # Log-probabilities by choice, and how many of them went out with their text.
        self._logprobs: dict[int, list[Logprob]] = {choice: [] for choice in range(sampling.n)}
        self._sent = dict.fromkeys(range(sampling.n), 0)
        self._completion_tokens = self._cached_tokens = self._accepted = self._rejected = 0
        self._prompt_logprobs: tuple[Logprob, ...] = ()
        reasoning = None if grammar else prompt.reasoning
        self._splitters = {
            choice: ReasoningSplitter(reasoning, call=None if calls is None else opening(calls))
            for choice in range(sampling.n)
            if reasoning is not None
        }
        self._thought = dict.fromkeys(self._splitters, 0)  # tokens of each choice's reasoning

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, image tokens included."""
        return len(self._prompt.prompt_ids)

    @property
    def done(self) -> bool:
        """Whether every choice has ended."""
        return not self._detokenizers

    def receive(self, output: "TokenOutput") -> bool:
        """Take one token. True: a stop string ended this choice, so the engine should end it too."""
        if output.error is not None:
            self._detokenizers.clear()
            self.mailbox.close(output.error)
            return False
        detokenizer = self._detokenizers.get(output.choice)
        if detokenizer is None:  # a token that was under way when the choice ended
            return False
        text = self._take_token(output, detokenizer)
        finish = output.finish
        if detokenizer.stopped:
            finish = "stop"
        elif finish is not None:
            text += detokenizer.flush()
        stop = None if finish is None else self._stop_of(output, detokenizer)
        covered = detokenizer.covered
        if finish is not None and self._sampling.prompt_logprobs and not detokenizer.stopped:
            covered = len(self._logprobs[output.choice])
        self._emit(output.choice, text, finish, covered=covered, stop=stop)
        return detokenizer.stopped and output.finish is None

    def fail(self, error: Exception) -> None:
        """End the request with an error."""
        self._detokenizers.clear()
        self.mailbox.close(error)

    def _take_token(self, output: "TokenOutput", detokenizer: Detokenizer) -> str:
        if output.token_id is None:
            return ""
        self._completion_tokens += 1
        self._accepted += output.accepted
        self._rejected += output.rejected
        self._cached_tokens = max(self._cached_tokens, output.cached_tokens)
        if self._completion_tokens == 1 and self._sampling.prompt_logprobs:
            first = self._tokenizer.logprob(self._prompt.prompt_ids[0], math.nan)  # nothing predicts it
            self._prompt_logprobs = (first, *map(self._logprob, output.prompt))
        ended = output.finish == "stop" and output.token_id in self._stop_ids
        # Who judges a prompt counts on a log-probability for each generated token, whichever it is.
        if output.logprob is not None and (not ended or self._sampling.prompt_logprobs):
            self._logprobs[output.choice].append(self._logprob(output))
        # The end-of-sequence token is counted but is not text.
        return "" if ended else detokenizer.push(output.token_id)

    def _stop_of(self, output: "TokenOutput", detokenizer: Detokenizer) -> str | None:
        """The stop string, or the text of the stop token, that ended a choice; None for other ends."""
        if output.finish == "stop" and output.token_id in self._own_stop_ids:
            return self._tokenizer.token_bytes(output.token_id).decode("utf-8", errors="replace")
        return detokenizer.stop

    def _emit(
        self, choice: int, text: str, finish: "FinishReason | None", *, covered: int, stop: str | None
    ) -> None:
        """Hand out text with the log-probabilities of the tokens it completes."""
        reasoning, splitter = "", self._splitters.get(choice)
        if splitter is not None:
            begun = splitter.thinking
            reasoning, text = splitter.push(text)
            if begun or splitter.thinking or reasoning:
                self._thought[choice] = covered
            if finish is not None:
                thought, rest = splitter.flush()
                reasoning, text = reasoning + thought, text + rest
        if finish is None:
            if text or reasoning:
                self._put(text, reasoning, choice, covered)
            return
        assert finish != "error", "an error output carries its error"
        del self._detokenizers[choice]
        if not self.done:
            self._put(text, reasoning, choice, covered, finish_reason=finish, stop=stop)
            return
        usage = Usage(self.prompt_tokens, self._completion_tokens, self._prompt.image_tokens)
        self._put(
            text,
            reasoning,
            choice,
            covered,
            finish_reason=finish,
            stop=stop,
            usage=usage,
            cached_tokens=self._cached_tokens,
            drafts=(self._accepted, self._rejected),
            reasoning_tokens=sum(self._thought.values()),
        )
        self.mailbox.close()

    def _put(self, text: str, reasoning: str, choice: int, covered: int, **last: Any) -> None:
        """Fill the mailbox. `last`: what stands in a choice's last delta alone."""
        kept = self._logprobs[choice]
        if kept:
            last["logprobs"] = tuple(kept[self._sent[choice] : covered])
            self._sent[choice] += len(last["logprobs"])
        if self._prompt_logprobs:
            last["prompt_logprobs"], self._prompt_logprobs = self._prompt_logprobs, ()
        self.mailbox.put(
            Delta(text, choice, reasoning=reasoning, completion_tokens=self._completion_tokens, **last)
        )

    def _logprob(self, token: "TokenOutput | Sampled") -> Logprob:
        assert token.token_id is not None
        assert token.logprob is not None
        return self._tokenizer.logprob(token.token_id, token.logprob, token.top_logprobs)


def fail_all(receivers: dict[str, Receiver], error: EngineError) -> None:
    """End every request with an error."""
    for receiver in receivers.values():
        receiver.fail(error)
    receivers.clear()


def deliver(
    abort: Callable[[str, int | None], object], receivers: dict[str, Receiver], output: "TokenOutput"
) -> None:
    """Hand a token to its request, in the engine's thread. What fails there ends that request alone.

    `abort` is told id and choice at a stop string; the id and None where all choices are to end.
    """
    receiver = receivers.get(output.request_id)
    if receiver is None:
        return
    try:
        if receiver.receive(output):
            abort(output.request_id, output.choice)
    except ENDINGS:
        raise
    except BaseException as error:  # what Rust panics at is not an Exception
        logger.exception("an answer's text can't be made")
        receiver.fail(engine_failed(error))
        abort(output.request_id, None)
    if receiver.done:
        del receivers[output.request_id]


class Mailbox(Generic[T]):
    """Items in order, then an end that may be an error. Unbounded: a request's own limits bound it."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._changed = Condition()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._closed = False
        self._error: Exception | None = None
        self._put: Callable[[T], None] | None = None  # where items go that nobody reads here
        self._end: Callable[[Exception | None], None] | None = None

    def put(self, item: T) -> None:
        """Add an item; ignored once closed."""
        with self._changed:
            if not self._closed:
                self._items.append(item)
                self._wake()

    def close(self, error: Exception | None = None) -> None:
        """No more items. The reader gets what is left, then `error` or the end. The first call counts."""
        with self._changed:
            if not self._closed:
                self._closed, self._error = True, error
                self._wake()

    def get(self) -> T | None:
        """The next item, or None at the end. Waits. Raises the error that ended it."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._closed)
            return self._next()

    async def get_async(self) -> T | None:
        """`get` without blocking the event loop."""
        while True:
            with self._changed:
                if self._items or self._closed:
                    return self._next()
                loop = asyncio.get_running_loop()
                waiter: asyncio.Future[None] = loop.create_future()
                self._waiters.append((loop, waiter))
            await waiter

    def forward(self, put: Callable[[T], None], end: Callable[[Exception | None], None]) -> None:
        """Hand what is here and what comes to `put`, and the end or its error to `end`, in order.

        Both are called where `put` and `close` are (or here, for what is there already), under a lock; they
        must not wait. Nobody else may read.
        """
        with self._changed:
            assert self._put is None, "a mailbox is forwarded once"
            self._put, self._end = put, end
            self._wake()

    def _next(self) -> T | None:
        if self._items:
            return self._items.popleft()
        if self._error is not None:
            raise own(self._error)
        return None

    def _wake(self) -> None:
        if self._put is not None:
            while self._items:
                self._put(self._items.popleft())
            if self._closed and self._end is not None:
                end, self._end = self._end, None
                end(self._error)
            return
        self._changed.notify_all()
        waiters, self._waiters = self._waiters, []
        for loop, waiter in waiters:
            with suppress(RuntimeError):  # a loop that has closed, and with it whoever waited
                loop.call_soon_threadsafe(_finish, waiter)


def _finish(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():  # the reader may have been cancelled meanwhile
        waiter.set_result(None)
