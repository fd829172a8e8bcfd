"""The counting script and the snapshot of plans: what a change to the house is measured with."""

import gzip
import json
from pathlib import Path

import pytest

from benchmarks import house
from tests.planner import plan_snapshot

SOURCE = '''
"""Of everything."""


class Plan:
    """What is planned."""


def chosen(engine, choice):
    """Whether it is ours."""
    match engine:
        case "vllm":
            return "int4"
    return engine == "native" or engine in ("vllm", "x") or choice == "nativity"
'''


def test_a_class_name_has_one_meaning() -> None:
    """Who adds one that another module has finds a more specific name; with fewer lower the number."""
    assert len(twice := house.House(house.ROOT).classes_twice()) <= 8, twice


def test_small_modules_stay_few() -> None:
    """Who makes one looks for a neighbour that it belongs to; with fewer lower the number."""
    assert house.House(house.ROOT).small() <= 70


@pytest.mark.slow
def test_a_decode_step_goes_through_few_files() -> None:
    """Whoever reads what happens between two tokens reads no more than this."""
    step = house.decode_step()
    assert len(step) <= 7, step
    assert sum(lines for _, lines in step) <= 2_300, step


def test_each_figure_is_counted_by_its_definition(tmp_path: Path) -> None:
    for name in ("planner/one.py", "server/two.py", "backends/vllm/own.py"):
        path = tmp_path / "src" / "snugvl" / name
        path.parent.mkdir(parents=True)
        path.write_text(SOURCE.lstrip())
    counted = house.House(tmp_path)
    assert counted.lines("src") == 3 * len(SOURCE.splitlines()) - 3
    assert counted.small() == 3
    assert counted.classes_twice() == ["Plan"]
    assert [where.partition(":")[0] for where in counted.docstrings_like(house.DIALECT)] == [
        "backends/vllm/own.py", "planner/one.py", "server/two.py",
    ]  # fmt: skip
    assert len(counted.docstrings_like(house.VAGUE)) == 3
    compared = counted.engine_comparisons()
    assert {where.partition(":")[0] for where in compared} == {"planner/one.py", "server/two.py"}
    assert len(compared) == 6  # three of each: a case and two comparisons
    assert len(counted.files_with(house.FORMATS)) == 3
    assert len(counted.format_names()) == 3
    assert counted.wide_comparisons() == []


@pytest.mark.slow
def test_a_snapshot_tells_what_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_snapshot, "ggufs", lambda _: ())  # writing files of exact shapes takes seconds
    before, after = tmp_path / "before.gz", tmp_path / "after.gz"
    with plan_snapshot.built():
        for path in (before, after):
            plan_snapshot.write(path, 4, seed=3, folder=tmp_path)
    assert plan_snapshot.compare(before, after, show=1) == 0
    with gzip.open(after, "rt", encoding="utf-8") as file:
        cases = [json.loads(line) for line in file]
    assert [case["words"][0] for case in cases] == ["plan"] * 4
    cases[2]["plan"]["headline"] = "something else"
    with gzip.open(after, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(case) + "\n" for case in cases)
    assert plan_snapshot.compare(before, after, show=1) == 1
    assert "3 of 4 documents are equal" in (said := capsys.readouterr().out)
    assert "plan.headline" in said
