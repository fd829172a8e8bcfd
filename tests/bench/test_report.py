"""What is printed, drawn and compared, from results made up by hand."""

import io
from dataclasses import replace

import pytest

from snugvl.bench.load import Generator, Record
from snugvl.bench.report import BenchmarkReport, as_text, compare, print_to_terminal, ratio, report
from snugvl.bench.result import METRICS, MemoryPeak, StartTimes, number
from snugvl.errors import InputError
from tests.bench.results import GIB, memory, result, run


def row(found: BenchmarkReport, name: str, table: int = 0) -> list[str]:
    return next(list(row[1:]) for row in found.tables[table].rows if row[0].startswith(name))


def test_the_table() -> None:
    found = report(result(run(1), run(8, pace=2.0)))
    assert found.tables[0].head == ("clients", "1", "8")
    assert row(found, "requests answered") == ["1", "8"]
    assert row(found, "time to first token, median, ms") == ["100", "200"]
    assert row(found, "time to first token, p99, ms") == ["100", "200"]
    assert row(found, "inter-token latency, p95, ms") == ["10.0", "20.0"]
    assert row(found, "whole answer, median, s") == ["0.19", "0.38"]
    assert row(found, "decode of one request") == ["100", "50.0"]
    assert row(found, "output of all together") == ["52.6", "211"]
    assert row(found, "requests, 1/s") == ["5.26", "21.1"]


def test_every_figure_has_a_row_and_is_never_invented() -> None:
    failed = replace(run(1), records=(Record(0.0, 1.0, error="500"),))
    found = report(result(failed))
    for metric in METRICS:
        assert row(found, f"{metric.name}, {metric.unit}") == ["–"]
    assert row(found, "requests failed") == ["1"]


def test_memory_planned_and_peak() -> None:
    found = report(result(run(1, memory=memory(5 * GIB)), run(8, memory=memory(6 * GIB))))
    assert found.tables[1].head == ("", "planned", "peak")
    assert row(found, "text weights", 1) == ["4.00 GiB", "4.00 GiB"]
    assert row(found, "Python", 1) == ["", "512 MiB"]
    assert row(found, "the engine's process", 1) == ["5.00 GiB", "6.00 GiB"]
    assert row(found, "its cap", 1) == ["7.00 GiB", ""]
    assert row(found, "NVIDIA H200", 2) == ["2.00 GiB", "8.00 GiB", "6.00 GiB"]
    assert len(report(result(run(1, memory=MemoryPeak(None)))).tables) == 1


def test_what_is_said_above_and_below() -> None:
    found = report(result(run(1), start=StartTimes(2.5, 3.125)))
    above = "\n".join(found.above)
    assert "a/model at http://127.0.0.1:1" in above
    assert "a new picture of 1024×1024, 10 tokens of answer, greedy" in above
    assert "ready 2.50 s after the start, first token after 3.12 s" in above
    assert found.notes == (
        "prompts had 100 tokens",
        "the client used at most 5% of a core, and its times are up to 0.1 ms late (p99)",
    )


def test_short_answers_and_interrupts_are_said() -> None:
    short = replace(
        run(1), records=(Record(0.0, 1.0, (0.5, 1.0), 1.0, 5, 2, "usage", "stop"), *run(1).records)
    )
    found = "\n".join(report(replace(result(short), interrupted=True)).notes)
    assert "interrupted" in found
    assert "1 of 2 answers ended before 10 tokens" in found
    assert "prompts had 5 to 100 tokens" in found
    assert "nothing was measured" in "\n".join(report(result()).notes)


@pytest.mark.parametrize("cost", [Generator(0.95, 0, 0, 0), Generator(0.1, 0, 0.02, 0.1)])
def test_a_client_that_is_too_busy_says_so(cost: Generator) -> None:
    found = report(result(replace(run(1), generator=cost)))
    assert "too busy for the client" in found.notes[-1]


def test_plain_text_and_a_terminal_say_the_same() -> None:
    found = report(result(run(1, memory=memory()), start=StartTimes(1.0, None)))
    plain = as_text(found)
    assert "\x1b" not in plain
    file = io.StringIO()
    print_to_terminal(found, file)
    for line in plain.splitlines():
        for word in line.split():
            assert word in file.getvalue()
    widths = {len(line) for line in plain.splitlines() if line.startswith(("time to", "whole"))}
    assert len(widths) == 1  # right-aligned


def test_numbers_have_three_digits() -> None:
    assert [number(value) for value in (1234.5, 99.94, 9.876, 0.004)] == ["1,234", "99.9", "9.88", "0.00"]


def test_two_results_side_by_side() -> None:
    one = result(run(1, memory=memory(6 * GIB)), run(8), start=StartTimes(100.0, None))
    other = result(run(1, pace=0.5, memory=memory(3 * GIB)), run(16), start=StartTimes(4.0, 5.0))
    found = compare(one, other, ("a.json", "b.json"))
    assert [table.title for table in found.tables] == ["1 client", "Start and memory"]
    assert row(found, "time to first token, median, ms") == ["100", "50.0", "0.50", "B better"]
    assert row(found, "output of all together") == ["52.6", "105", "2.00", "B better"]
    assert row(found, "start to ready, s", 1) == ["100", "4.00", "0.04"]
    assert row(found, "engine's process, peak", 1) == ["6.00 GiB", "3.00 GiB", "0.50"]
    with pytest.raises(StopIteration):  # what they took of the GPU is known only of servers started for it
        row(found, "GPU, peak", 1)
    assert found.above[0] == "A: a.json, a/model, 2026-11-21T08:00:00+00:00"
    assert not found.notes


def test_memory_of_the_gpu_of_servers_that_were_started_for_it() -> None:
    one = result(run(1, memory=memory()), start=StartTimes(2.0, None))
    one = replace(one, server=replace(one.server, command=("snugvl", "serve")))
    found = compare(one, one, ("a", "b"))
    assert row(found, "GPU, peak", 1) == ["6.00 GiB", "6.00 GiB", "1.00"]


def test_which_is_better() -> None:
    assert ratio(2.0, 1.0, higher_is_better=False) == ("0.50", "B better")
    assert ratio(2.0, 1.0, higher_is_better=True) == ("0.50", "A better")
    assert ratio(1000.0, 1001.0, higher_is_better=True) == ("1.00", "")


def test_what_makes_a_comparison_unfair_is_said() -> None:
    one, other = result(run(1)), result(run(1))
    failed = replace(run(1), records=(*run(1).records, Record(0.0, 1.0, error="500")))
    manner = replace(other.server.manner, ignore_eos=False)
    other = replace(
        other,
        workload=replace(other.workload, max_tokens=99),
        machine=replace(other.machine, cpu_cores=2),
        server=replace(other.server, manner=manner),
        runs=(failed,),
        interrupted=True,
    )
    said = "\n".join(compare(one, other, ("a", "b")).notes)
    for part in ("different things", "ignore_eos", "different machines", "B was interrupted", "B has failed"):
        assert part in said


def test_nothing_to_compare() -> None:
    with pytest.raises(InputError, match="in common: 1 and 2, 4"):
        compare(result(run(1)), result(run(2), run(4)), ("a", "b"))
    with pytest.raises(InputError, match="1 and none"):
        compare(result(run(1)), result(), ("a", "b"))
