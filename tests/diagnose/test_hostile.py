"""Logs that were written to hurt: any bytes, any size, any interleaving."""

import json
import os
import random
import re
import tracemalloc
from io import BytesIO
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from snugvl.diagnose.explain import explain, explain_stream
from snugvl.diagnose.result import to_json, to_text
from snugvl.diagnose.scan import PATTERNS
from tests.draws import draws

LOGS = {path.stem: path.read_bytes() for path in (Path(__file__).parent / "logs").glob("*.log")}
HEALTHY = sorted(name for name in LOGS if name.startswith("healthy_"))


class Endless:
    """Bytes that are made as they are read."""

    def __init__(self, piece: bytes, size: int) -> None:
        self.piece, self.left = piece, size

    def read(self, size: int = -1, /) -> bytes:
        size = min(size, self.left)
        self.left -= size
        return (self.piece * (size // len(self.piece) + 1))[:size]


@draws(60)
@given(st.data())
def test_cut_and_mixed_logs_never_crash(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(LOGS)), min_size=1, max_size=3))
    lines = [line for name in names for line in LOGS[name].splitlines(keepends=True)]
    random.Random(data.draw(st.integers(0, 1 << 30))).shuffle(lines)
    whole = b"".join(lines)
    found = explain_stream(BytesIO(whole[data.draw(st.integers(0, len(whole))) :]))
    json.loads(to_json(found))
    to_text(found)


@draws(40)
@given(st.sampled_from(sorted(LOGS)), st.randoms(use_true_random=False))
def test_changed_numbers_never_crash(name: str, order: random.Random) -> None:
    """What the log says goes to the planner: no memory, a petabyte, a context of one token."""
    absurd = ("0", "1", "-1", "0.001", "7.96", "262144", "9999999", "99999999999999")
    text = LOGS[name].decode()
    changed = re.sub(r"\d+(\.\d+)?", lambda m: order.choice(absurd) if order.random() < 0.3 else m[0], text)
    found = explain(changed)
    json.loads(to_json(found))
    to_text(found)


@draws(60)
@given(st.sampled_from(HEALTHY), st.integers(0, 1 << 16), st.randoms(use_true_random=False))
def test_no_cause_is_invented_in_healthy_lines(name: str, cut: int, order: random.Random) -> None:
    lines = LOGS[name].splitlines(keepends=True)
    order.shuffle(lines)
    assert not explain_stream(BytesIO(b"".join(lines)[:cut])).causes


@draws(80)
@given(st.text(max_size=400), st.sampled_from(PATTERNS))
def test_any_text_around_a_literal_is_survived(text: str, pattern: object) -> None:
    needle = pattern.needle.decode()  # type: ignore[attr-defined]
    to_text(explain(f"{text}{needle}{text}\n"))


def test_garbage_and_endless_lines_stay_in_bounded_memory() -> None:
    pieces = (os.urandom(1 << 16), b"a", b"\n", b"\\\n", b"Tried to allocate ", b"vllm serve x \\\n")
    for piece in pieces:  # what is made once is there
        explain_stream(Endless(piece, 1 << 16))
    tracemalloc.start()
    for piece in pieces:
        explain_stream(Endless(piece, 1 << 19))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def test_no_pattern_is_slow_on_a_line_made_for_it() -> None:
    fills = ("1", " ", "A=1 ", "a.b/", "'", "{", "(", "x" * 50 + " ")
    for pattern in PATTERNS:
        needle = pattern.needle.decode()
        for fill in fills:
            # Quadratic or worse would take minutes and trip the suite's timeout.
            pattern.regex.search((fill * 20_000)[:16_000] + needle + (fill * 20_000)[:16_000])


def test_a_hostile_command_comes_back_quoted_or_not_at_all() -> None:
    log = (
        "$ vllm serve 'm; rm -rf ~' --port '$(reboot)' --chat-template '`id`'\n"
        "OSError: [Errno 98] Address already in use\n"
    )
    command = explain(log).command
    assert command == "vllm serve 'm; rm -rf ~' --port 8001 --chat-template '`id`'"
    assert (
        explain("$ vllm serve m --port 1 && rm -rf ~\nAddress already in use\n").command
        == "vllm serve m --port 2"
    )


def test_control_characters_do_not_reach_the_terminal() -> None:
    found = explain("\x1b]0;owned\x07\x1b[2J\u202eRuntimeError: UVA is not available\x9b31m\n")
    for text in (to_text(found), to_json(found)):
        assert not set(text) & {"\x1b", "\x07", "\x9b", "\u202e"}
    assert [cause.kind for cause in found.causes] == ["uva"]


def test_what_powershell_writes_is_read() -> None:
    text = LOGS["vllm033_q4bfp8_5060_wsl2"].decode()
    assert explain_stream(BytesIO(text.encode("utf-16"))) == explain(text)
    assert explain(text.replace("\n", "\r\n")).causes == explain(text).causes


def test_absurd_numbers_are_no_numbers() -> None:
    found = explain("INFO Available KV cache memory: 999999999999 GiB\nModel loading took 1.2.3 GiB\n")
    assert not found.budget.uses
