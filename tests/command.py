"""The command line in this process, and what it leaves behind."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from snugvl.cli.app import run


@dataclass
class Ran:
    """What a command line left behind."""

    code: int
    out: str
    err: str


Run = Callable[..., Ran]


def ran(capsys: pytest.CaptureFixture[str], *args: object) -> Ran:
    """Run `snugvl ARGS`; what was printed before is forgotten."""
    capsys.readouterr()
    code = run([str(arg) for arg in args])
    captured = capsys.readouterr()
    return Ran(code, captured.out, captured.err)
