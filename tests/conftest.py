"""Checkpoints that many tests share, written once a session."""
# ruff: noqa: E402 - what is set here must be set before the imports

import atexit
import contextlib
import gc
import logging
import os
import ssl
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

# What is imported and collected stays: to look through it again and again takes an eighth of the time.
gc.disable()

# Bytecode is kept, whatever the image says: each of some hundred processes would compile torch again, in 3 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Kernels run in Triton's interpreter where there is no GPU. Triton reads this when it is imported, and torch
# imports it.
if not Path("/dev/nvidia0").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# Three test processes on two cores, and the servers and engines that they start: more threads would wait
# for one another, and those of OpenMP wait by spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import httpx
import httpx2
import pytest
import typer.main

from tests.draws import draw_fewer
from tests.patience import PATIENCE_S, until
from tests.watchdog import pytest_runtest_protocol as pytest_runtest_protocol

# No test finds the servers, the measurements and the configuration of whoever runs it.
_folder = tempfile.TemporaryDirectory(prefix="snugvl-tests-")
os.environ |= {"XDG_CACHE_HOME": f"{_folder.name}/cache", "XDG_CONFIG_HOME": f"{_folder.name}/config"}
draw_fewer()
# Where a test doesn't say how long it waits for a server: httpx's five seconds pass on a busy machine.
httpx._config.DEFAULT_TIMEOUT_CONFIG.__init__(PATIENCE_S)  # type: ignore[misc]


def _made_once(make: Callable[..., ssl.SSLContext]) -> Callable[..., ssl.SSLContext]:
    """The same, but for the certificates that are trusted anyway: to read all of them takes 25 ms, for every
    client that a test makes."""
    made: dict[tuple[object, ...], ssl.SSLContext] = {}

    def create_ssl_context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        if verify is not True or cert is not None:
            return make(verify=verify, cert=cert, trust_env=trust_env)
        key = (trust_env, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
        if key not in made:
            made[key] = make(trust_env=trust_env)
        return made[key]

    return create_ssl_context


# The parser of a command line is made of all commands' annotations, in 15 ms, and keeps nothing of a run.
typer.main.get_command = cache(typer.main.get_command)

for _module in (httpx._transports.default, httpx2._transports.default):
    _module.create_ssl_context = _made_once(_module.create_ssl_context)  # type: ignore[attr-defined]


COMPILING_S = 120.0  # that the others wait for the first process, if it ends before


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """In a fresh clone the first process compiles all that is imported, while mypy has the other processor.

    The others wait until the last file has its bytecode: each of them would compile the same meanwhile.
    """
    first = os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0"
    if not first and session.config.args == ["tests"] and os.access(__file__, os.W_OK):
        last = max(Path(__file__).parent.rglob("test_*.py"), key=lambda path: path.parts)
        with contextlib.suppress(AssertionError):
            until(lambda: list(last.parent.glob(f"__pycache__/{last.stem}.*.pyc")), COMPILING_S)
    return (yield)


# Cases that the mark `sample` names and that were not collected yet, by test.
_left: dict[str, set[str]] = {}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Cases of a test that its mark `sample("a", "b")` doesn't name are extended."""
    mark = item.get_closest_marker("sample")
    if mark is not None and isinstance(item, pytest.Function):
        name = item.nodeid.partition("[")[0]
        _left[name] = _left.get(name, set(mark.args)) - {item.callspec.id}
        if item.callspec.id not in mark.args:
            item.add_marker(pytest.mark.extended)


@pytest.hookimpl(trylast=True)  # after those that are not asked for are gone
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests begin first: at the end, one process would run them while the others idle.

    xdist gives each process a stretch of the list, so they begin the stretches. The process that hands the
    tests out does not come here, and needs no torch: the others wait for it.
    """
    import torch

    from tests.interpreter import quicken

    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET"):
        quicken()
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    longest = (
        "test_clients_of_every_kind_at_once",
        "test_the_python_clients",
        "test_it_prints_this_in_either_order",
        "test_kernels_compile_for_it",
        "test_pocket_from_its_start_to_its_end",
    )
    first = [item for name in longest for item in items if getattr(item, "originalname", item.name) == name]
    items[:] = [item for item in items if getattr(item, "originalname", item.name) not in longest]
    whole = len(items) + len(first)
    # In the order of their places, so that none moves another.
    places = [(k % processes * whole // processes + k // processes, k) for k in range(len(first))]
    for place, k in sorted(places):
        items.insert(place, first[k])


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported and collected stays: a test that looks for garbage looks for its own."""
    # Six times a test pytest adds its handlers to every logger that tells none above it, and torch has fifty.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True
    if session.config.args == ["tests"]:
        wrong = {name: sorted(left) for name, left in _left.items() if left}
        assert not wrong, f"no such cases: {wrong}"
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)  # cycles that the tests leave are small, and seven hundred soon made
    gc.enable()
    # At the exit it is all let go of, but not before pytest's last look for garbage, which looks five times.
    atexit.register(gc.unfreeze)


LEAST = 50  # tests between two looks for garbage of ours
_done = 0  # tests since the last one


@pytest.hookimpl(trylast=True)  # after the fixtures of its file are gone
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What many tests leave in place stays, too, such as modules and caches.

    Engines look for garbage at their end, and would look through all of it.
    """
    global _done
    _done += 1
    if _done >= LEAST and nextitem is not None and nextitem.path != item.path:
        _done = 0
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied checkpoint in one file."""
    from tests import checkpoints  # half of this file's time goes into transformers, which it imports

    return checkpoints.write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The official FP8 layout in small: block scales, a stored head although the model ties it."""
    from tests import checkpoints

    return checkpoints.write(tmp_path_factory.mktemp("fp8"), checkpoints.Options(fp8=True))


@pytest.fixture(scope="session")
def tiny_untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied checkpoint in three shards."""
    from tests import checkpoints

    return checkpoints.write(tmp_path_factory.mktemp("untied"), checkpoints.Options(tied=False, shards=3))
