"""Threads at which owners of jobs take turns, so that nobody's many jobs hold up another's one."""

from collections import deque
from collections.abc import Callable, Hashable
from threading import Condition, Lock, Thread

Job = Callable[[], object]
HANDED_S = 0.0005  # that `hand` waits for a thread


class Turns:
    """Runs jobs, which must not raise, in so many threads, which start with their first job.

    Attributes:
        changed: notified whenever a job has begun that was handed over, or is done.
    """

    def __init__(self, threads: int) -> None:
        lock = Lock()
        self.changed = Condition(lock)
        self._submitted = Condition(lock)
        self._threads = threads
        self._started = self._idle = 0
        self._jobs: dict[Hashable, deque[Job]] = {}  # by owner; whose turn is next, first
        self._handed: Job | None = None  # comes before all others

    def submit(self, owner: Hashable, job: Job) -> None:
        """Run a job when it is its owner's turn."""
        with self._submitted:
            self._jobs.setdefault(owner, deque()).append(job)
            self._start()
            self._submitted.notify()

    def hand(self, job: Job) -> bool:
        """Let a thread that has nothing to do begin with a job; whether one has. If not it is the caller's.

        It waits for that: a thread needs Python's lock to begin, and would be given it much later.
        """
        with self._submitted:
            if not self._idle and self._started == self._threads:
                return False
            self._handed = job
            self._start()
            self._submitted.notify()
            begun = self.changed.wait_for(lambda: self._handed is None, HANDED_S)
            self._handed = None
        return begun

    def wait(self, most_s: float) -> None:
        """Let a job be done, or time pass."""
        with self.changed:
            self.changed.wait(most_s)

    def _start(self) -> None:
        if self._started < self._threads:
            self._started += 1
            Thread(target=self._run, name="snugvl-masks", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._submitted:
                self.changed.notify_all()
                while not self._jobs and self._handed is None:
                    self._idle += 1
                    self._submitted.wait()
                    self._idle -= 1
                job = self._next()
            job()

    def _next(self) -> Job:
        if self._handed is not None:
            job, self._handed = self._handed, None
            self.changed.notify_all()
            return job
        owner = next(iter(self._jobs))
        jobs = self._jobs.pop(owner)
        job = jobs.popleft()
        if jobs:
            self._jobs[owner] = jobs  # behind all others
        return job
