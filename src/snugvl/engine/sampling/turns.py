"""Threads for jobs whose owners take turns: of however many jobs one has, another waits for a single one.

    submit ─► jobs by owner ─► whose turn is next ─► thread ─► `changed` is notified

The threads hold what is to be done, and never who submits it: when that is dropped, they end.
"""

import weakref
from collections import deque
from collections.abc import Callable, Hashable
from queue import SimpleQueue
from threading import Condition, Thread

Job = Callable[[], object]


class Turns:
    """As many threads as are needed, up to a number. Safe to use from several threads.

    Attributes:
        changed: notified whenever a job is done.
    """

    def __init__(self, threads: int, name: str) -> None:
        self.changed = Condition()
        self._threads, self._name = threads, name
        self._started = 0
        self._jobs: dict[Hashable, deque[Job]] = {}  # by owner; whose turn is next, first
        # One for each job, or None for each thread that is to end. A `SimpleQueue`, and no condition: what
        # the garbage collector calls, in any thread and anywhere, may put something there.
        self._told: SimpleQueue[bool | None] = SimpleQueue()
        self._finish = weakref.finalize(self, _end, self._told, threads)

    def submit(self, owner: Hashable, job: Job) -> None:
        """Run `job`, which must not raise, when it is its owner's turn."""
        with self.changed:
            if self._started < self._threads:
                try:
                    shared = self._told, self._jobs, self.changed
                    Thread(target=_run, args=shared, name=self._name, daemon=True).start()
                    self._started += 1
                except RuntimeError:  # the system gives no more threads: those that there are will do
                    if not self._started:
                        raise
            self._jobs.setdefault(owner, deque()).append(job)
        self._told.put(True)

    def close(self) -> None:
        """End the threads, each after the job that it does. What has not begun is not done."""
        with self.changed:
            self._threads = 0
            self._jobs.clear()
        self._finish()


def _end(queue: "SimpleQueue[bool | None]", threads: int) -> None:
    for _ in range(threads):
        queue.put(None)


def _run(queue: "SimpleQueue[bool | None]", jobs: dict[Hashable, deque[Job]], changed: Condition) -> None:
    while queue.get():
        with changed:
            if not jobs:  # it was closed meanwhile
                continue
            owner = next(iter(jobs))
            own = jobs.pop(owner)
            job = own.popleft()
            if own:
                jobs[owner] = own  # behind all others
        job()
        del owner, own, job  # which may hold the object that submitted it
        with changed:
            changed.notify_all()
