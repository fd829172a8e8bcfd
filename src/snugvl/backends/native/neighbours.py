"""Names the programs that have taken GPU memory since the model was loaded, for the log."""

import logging
from collections.abc import Callable, Sequence
from threading import Lock, Thread

from snugvl.core.sizes import MIB, format_size
from snugvl.hardware.machine import Gpu, Machine, Tenant
from snugvl.hardware.probe import probe

GROWN_BYTES = 32 * MIB  # less is nobody's fault
logger = logging.getLogger(__name__)


class Neighbours:
    """Looks at who is on a GPU, in a thread of its own: NVML takes its time.

    Calling it is cheap and returns at once; while one look is under way further calls are nothing.
    """

    def __init__(self, before: Gpu, own_pid: int, look: Callable[[], Machine] = probe) -> None:
        """`before`: the GPU as it was when nothing of the model was there."""
        self._before = before
        self._own_pid = own_pid
        self._probe = look
        self._busy = Lock()

    def __call__(self) -> None:
        """Look, and log who has grown."""
        if self._busy.acquire(blocking=False):
            try:
                Thread(target=self._look, name="snugvl-neighbours", daemon=True).start()
            except RuntimeError:  # the system gives no more threads; the next call may have one
                self._busy.release()

    def _look(self) -> None:
        try:
            gpus = self._probe().gpus
            now = next((gpu for gpu in gpus if gpu.index == self._before.index), None)
            who = [] if now is None else grown(self._before.tenants, now.tenants, self._own_pid)
            if who:
                logger.warning("GPU memory taken by other programs since the start: %s", "; ".join(who))
        except Exception:  # a name in the log is not worth an engine
            logger.exception("it can't be told which programs have taken GPU memory")
        finally:
            self._busy.release()


def grown(before: Sequence[Tenant], now: Sequence[Tenant], own_pid: int) -> list[str]:
    """The programs that hold more than before, most first: "game (pid 12) 1.20 GiB more"."""
    held = {(tenant.name, tenant.pid): tenant.held_bytes for tenant in before}
    more = [
        (tenant.held_bytes - held.get((tenant.name, tenant.pid), 0), tenant)
        for tenant in now
        if tenant.pid != own_pid
    ]
    found = sorted((each for each in more if each[0] >= GROWN_BYTES), key=lambda each: -each[0])
    return [
        f"{tenant.name}{'' if tenant.pid is None else f' (pid {tenant.pid})'} {format_size(nbytes)} more"
        for nbytes, tenant in found
    ]
