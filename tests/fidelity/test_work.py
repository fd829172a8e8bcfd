"""The folder of an unfinished comparison, from which another run goes on."""

import os
from pathlib import Path

import pytest
import torch

from snugvl.fidelity.work import Work


@pytest.mark.parametrize("left", [0, 0.5, 0.99])
def test_what_a_crash_left_damaged_is_done_again(left: float, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    work = Work(folder, {"model": "m"})
    work.put("whole", {"states": torch.arange(100.0)})
    work.put("torn", {"states": torch.arange(100.0)})
    file = folder / "torn.safetensors"
    file.write_bytes(file.read_bytes()[: int(left * file.stat().st_size)])
    work.add("answers", {"number": 1})
    with (folder / "answers.jsonl").open("ab") as records:
        records.write(b"\xff\xfe" + os.urandom(50).replace(b"\n", b"") + b"\n")
    again = Work(folder, {"model": "m"}, resume=True)
    assert (again.has("whole"), again.has("torn"), again.has("none")) == (True, False, False)
    assert again.records("answers") == [{"number": 1}]
