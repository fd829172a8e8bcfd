"""The one thread that touches the engine."""

from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Lock, Thread, current_thread
from typing import Any, TypeVar

from snugvl.engine.engine import Engine
from snugvl.engine.request import TokenOutput
from snugvl.errors import EngineError, engine_failed

T = TypeVar("T")
_Job = tuple[Callable[[], None], Future[Any] | None]  # the work, and the future that a caller waits for
CLOSED = "the model is closed"


class EngineWorker:
    """Steps the engine while it has work, and runs what others ask of it between two steps."""

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[TokenOutput], None],
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
            except BaseException as error:  # what Rust panics at is no Exception, and no end of the engine
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
