"""The check of kernels by a first start on a new card, driver, torch or Triton: both sides of it.

    engine's process   outline is known ─► kernels are compiled beside ─► a process checks them ─► weights
    the process        imports and makes its context meanwhile; then `engine/kernel_check.py`, on the GPU;
                       a line of JSON for whatever it begins or finds

A kernel may hang, or take its process along; so it isn't the engine's. What had begun then is withdrawn, and
another process goes on without it. It comes before weights are read, as they may be rounded by a kernel, and
as there is memory then. What was found is kept (`core/kernel_checks.py`), and a later start only reads it.
"""

import json
import logging
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

import torch

from snugvl.backends.measure import process_reader
from snugvl.backends.native.ahead import KernelsAhead, name_of
from snugvl.backends.native.kernel_processes import leave_with, room
from snugvl.backends.place import TargetDevice
from snugvl.core import kernel_checks
from snugvl.core.config import EngineConfig
from snugvl.core.folders import json_object
from snugvl.core.kernel_checks import CheckedOn, KernelCheck, KernelVerdict
from snugvl.core.options import LoadOptions, Progress
from snugvl.core.service import mark
from snugvl.engine.precompile import CompileJob, compile_job_of
from snugvl.errors import EngineError
from snugvl.layers.replaced import withdraw, withdrawn
from snugvl.models.networks import LoadableNetwork
from snugvl.version import __version__

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "snugvl.backends.native.checking")
COMPILE_S = 120.0  # that a start waits for kernels to be compiled, before it goes on without a check
CHECK_S = 180.0  # that a check takes at most
RETURN_S = 60.0  # that a kernel takes at most, compiled as it may have to be, with torch's twin
START_S = 60.0  # until the process begins with the first
END_S = 10.0  # that a process takes to end; one whose kernel runs for ever may never
BY_OTHERS = (1, 2, 9, 15)  # SIGHUP, SIGINT, SIGKILL, SIGTERM: no kernel sends these
PROGRESS = 0.04  # of all loading
Order = tuple[CompileJob, str, CheckedOn, int, str]


def settle(
    network: LoadableNetwork, config: EngineConfig, place: TargetDevice, kernels: KernelsAhead | None,
    limit_bytes: int, report: Progress,
) -> tuple[KernelVerdict, ...]:  # fmt: skip
    """Withdraw kernels that are wrong on this card, after a check if there was none yet; their verdicts.

    Args:
        network: in its final formats, without memory.
        kernels: compiles them, beginning now. None: nothing is checked, what is known counts.
        limit_bytes: of the GPU's memory that a check may take, its CUDA context left aside.
    """
    device = place.device
    if device.type != "cuda" or torch.version.hip is not None:
        if kernels is not None:
            kernels.begin(network, config, device)
        return ()
    on, path = checked_on(place), kernel_checks.checks_file()
    job = compile_job_of(network, config, device)
    digest, known = name_of(replace(job, withdrawn=()), on.triton), kernel_checks.load(path)
    here = [each for each in known if each.on == on]
    found = {verdict.kernel: verdict for each in here for verdict in each.withdrawn}
    withdraw(found)
    if kernels is not None:
        kernels.begin(network, config, device)
    if kernels is not None and not any(each.job == digest and each.whole for each in here):
        # Those of another model in this process, too, even where nothing could be kept.
        order = replace(job, withdrawn=withdrawn()), digest, on, limit_bytes, str(device)
        new = _first_start(order, kernels, report)
        if new is not None:
            withdraw(each.kernel for each in new.withdrawn)
            found |= {each.kernel: each for each in new.withdrawn}
            _keep(path, new)
    for sentence in kernel_checks.told(found.values()):
        logger.warning("%s", sentence)
        report(sentence, PROGRESS)
    return tuple(found.values())


def check_model(options: LoadOptions, report: Progress) -> KernelCheck:
    """Check the kernels that a model would use here, whatever is known of them, and keep what is found.

    Raises:
        EngineError: there is no GPU that torch can use here.
        SnugvlError: as `load_engine` raises for the model.
    """
    from snugvl.backends.native.loading import load_engine

    found: list[KernelCheck] = []

    def checked(
        network: LoadableNetwork, config: EngineConfig, place: TargetDevice, kernels: KernelsAhead | None,
        limit_bytes: int, report: Progress,
    ) -> NoReturn:  # fmt: skip
        if place.device.type != "cuda" or torch.version.hip is not None:
            raise EngineError("kernels run on NVIDIA's GPUs, and torch can't use one here")
        assert kernels is not None
        on, job = checked_on(place), compile_job_of(network, config, place.device)
        kernels.begin(network, config, place.device)
        order = job, name_of(job, on.triton), on, limit_bytes, str(place.device)
        check = _first_start(order, kernels, report)
        if check is None:
            raise EngineError(f"kernels take more than {COMPILE_S:.0f} s to compile here; try again")
        _keep(kernel_checks.checks_file(), check)
        found.append(check)
        raise _Enough

    kernels = KernelsAhead()
    try:
        load_engine(options, progress=report, kernels=kernels, settled=checked)
    except _Enough:
        return found[0]
    finally:
        kernels.stop()
    raise AssertionError("it stops when kernels are checked")


class _Enough(Exception):
    """Raised to stop a load once its network is known, before any weights are read."""


def _keep(path: Path, check: KernelCheck) -> None:
    try:
        kernel_checks.add(path, check)
    except OSError as error:
        why = error.strerror or "it can't be written"
        logger.warning("what a check of kernels found isn't kept, the next start checks again: %s", why)


def _first_start(order: Order, kernels: KernelsAhead, report: Progress) -> KernelCheck | None:
    """Check when all is compiled; `order`: see `run`."""
    report("compiling kernels, for the first start of this model on this GPU", PROGRESS)
    # Its imports and its context take seconds, in which kernels are compiled; where the host has room.
    process = _started(COMMAND, order[-1]) if room() > 1 else None
    try:
        if not kernels.finished.wait(COMPILE_S):
            logger.warning("kernels take long to compile, so they are checked at the next start, not now")
            return None
        report("checking kernels beside plain torch, for the first start of this model on this GPU", PROGRESS)
        check = run(*order, started=process)
    finally:
        if process is not None:
            process.end()
    mark("kernels are checked")
    return check


def checked_on(place: TargetDevice) -> CheckedOn:
    """The place for which a check of a GPU holds."""
    import triton  # which only GPUs bring

    facts = torch.cuda.get_device_properties(place.device)
    driver = "" if place.gpu is None or place.gpu.driver is None else place.gpu.driver
    versions = torch.__version__, triton.__version__, __version__
    return CheckedOn(facts.name, f"{facts.major}.{facts.minor}", driver, *versions)


def run(
    job: CompileJob, digest: str, on: CheckedOn, limit_bytes: int, device: str,
    command: Sequence[str] = COMMAND, started: "_CheckProcess | None" = None,
) -> KernelCheck:  # fmt: skip
    """Check a job's kernels, by as many processes as it takes, `started` first; never fails."""
    begun, verdicts, whole = time.monotonic(), dict[tuple[str, str], KernelVerdict](), False
    loaded = context = -1
    left = begun + CHECK_S
    while not whole and time.monotonic() < left:
        process, started = started or _started(command, device), None
        if process is None:
            break
        found = list(process.verdicts((job, limit_bytes), left))
        verdicts |= {(each.kernel, each.shape): each for each in found}
        if process.culprit is None:
            whole, loaded, context = process.finished, process.loaded_bytes, process.context_bytes
            if not whole:
                logger.warning("kernels can't be checked here: %s", process.why)
            break
        verdicts[process.culprit.kernel, ""] = process.culprit
        bad = {each.kernel for each in verdicts.values() if each.withdrawn}
        job = replace(job, withdrawn=tuple(sorted({*job.withdrawn, *bad})))
    seconds = time.monotonic() - begun
    logger.info("%d kernels are checked, in %.0f s", len(verdicts), seconds)
    when = datetime.now(UTC).isoformat(timespec="seconds")
    text = job.outline.config.architecture
    formats = sorted({form for form, *_ in job.outline.formats.values()})
    network = f"{text} ({', '.join(formats)}; KV cache {job.engine.kv_cache})"
    kept = tuple(verdicts.values())
    return KernelCheck(on, digest, network, round(seconds, 1), when, loaded, whole, kept, context)


def _started(command: Sequence[str], device: str) -> "_CheckProcess | None":
    try:
        return _CheckProcess(command, device)
    except OSError as error:
        logger.warning("kernels can't be checked here: %s", error.strerror or "no process can be started")
        return None


class _CheckProcess:
    """One process that checks.

    Attributes:
        culprit: the kernel that it didn't come back from.
        finished: it has looked at all kernels.
        loaded_bytes: what the driver took meanwhile.
        context_bytes: what it took for the context before, or −1.
        why: what it said last, where it ended otherwise.
    """

    def __init__(self, command: Sequence[str], device: str) -> None:
        """Start it; it waits for `verdicts`.

        Raises:
            OSError: the system gives no more processes.
        """
        self.culprit: KernelVerdict | None = None
        self.finished, self.loaded_bytes, self.context_bytes = False, -1, -1
        self.why = "it took too long"
        self._told = False
        self._lines = queue.SimpleQueue[str | None]()
        self._process = subprocess.Popen(  # noqa: S603 (ourselves)
            [*command, str(os.getpid()), device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        threading.Thread(target=self._read, name="snugvl-check", daemon=True).start()

    def _send(self, order: object) -> None:
        """Write `order` to the process; for a thread of its own, as a process that hangs never reads it."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as pipe:  # it may have ended
            pipe.write(pickle.dumps(order))

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line.decode("utf-8", "replace").strip())
        self._lines.put(None)

    def verdicts(self, order: object, left: float) -> Iterator[KernelVerdict]:
        """Verdicts of the process on `order`, until it ends; `left`: its deadline, by `time.monotonic()`."""
        at: str | None = None  # the kernel that it is at
        self._told = True
        sending = threading.Thread(target=self._send, args=(order,), name="snugvl-check", daemon=True)
        sending.start()
        try:
            while not self.finished:
                wait = RETURN_S if at else START_S
                line = self._lines.get(timeout=max(min(wait, left - time.monotonic()), 0.01))
                if line is None:
                    if self._ended_by_others():
                        self.why = "something else ended its process"
                    else:
                        self.culprit = _blamed(at, "ends its process")
                    return
                said = json_object(line) or {}
                if "begins" in said:
                    at = said["begins"]
                elif "kernel" in said:
                    at = None
                    yield KernelVerdict(**said)
                elif "loaded_bytes" in said:
                    self.finished, self.loaded_bytes = True, said["loaded_bytes"]
                    self.context_bytes = said.get("context_bytes", -1)
                else:
                    self.why = line or self.why
        except queue.Empty:
            if time.monotonic() < left:
                self.culprit = _blamed(at, f"doesn't return within {RETURN_S:.0f} s")
        finally:
            self.end()
            sending.join(END_S)

    def _ended_by_others(self) -> bool:
        """Whether the system, for want of host memory, or a person has ended it: no kernel is to blame."""
        with suppress(subprocess.TimeoutExpired):
            return -self._process.wait(END_S) in BY_OTHERS
        return False

    def end(self) -> None:
        """End it. Safe to call twice."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        assert self._process.stdin is not None
        if not self._told:
            self._process.stdin.close()


def _blamed(kernel: str | None, verdict: str) -> KernelVerdict | None:
    return None if kernel is None else KernelVerdict(kernel, "", -1.0, 0.0, verdict)


def main() -> None:
    """Check kernels for the process that started this one, once it says which."""
    threading.Thread(target=leave_with, args=(int(sys.argv[1]),), daemon=True).start()
    from snugvl.engine.kernel_check import check_kernels

    device, total, held = torch.device(sys.argv[2]), 0, process_reader(torch.device("cpu"))
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)  # torch's limit is one card's
        torch.cuda.set_device(device.index or 0)
        total = torch.cuda.mem_get_info(device)[1]  # which makes the context
        held = process_reader(device)
    context = held()
    job, limit_bytes = pickle.load(sys.stdin.buffer)  # noqa: S301 (from the engine's process, through a pipe of its own)
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(max(min(limit_bytes / total, 1.0), 0.01), device)

    def say(document: dict[str, object]) -> None:
        sys.stdout.write(json.dumps(document) + "\n")
        sys.stdout.flush()

    def tell(what: str | KernelVerdict) -> None:
        say({"begins": what} if isinstance(what, str) else asdict(what))

    loaded, whole = check_kernels(job, device, tell), held()
    if context is None or whole is None:  # the driver doesn't tell a process's memory: what the card has lost
        say({"loaded_bytes": loaded})
        return
    loaded = max(whole - torch.cuda.memory_reserved(device) - context, 0)
    say({"context_bytes": context, "loaded_bytes": loaded})


if __name__ == "__main__":
    main()
