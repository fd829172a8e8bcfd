"""CUDA_VISIBLE_DEVICES, by CUDA's rules."""

import pytest

from snugvl.hardware.nvml import visible

GPUS = ("GPU-aa1", "GPU-aa2", "GPU-b")


@pytest.mark.parametrize(
    ("variable", "chosen"),
    [
        (None, GPUS),
        ("0", GPUS[:1]),
        (" 2 , 1 ", ("GPU-b", "GPU-aa2")),
        ("GPU-b", ("GPU-b",)),
        ("GPU-aa2,0", ("GPU-aa2", "GPU-aa1")),
        ("GPU-aa", ()),  # not unique
        ("", ()),
        ("-1", ()),
        ("1,-1,0", ("GPU-aa2",)),  # ends at the first that is none
        ("1,9,0", ("GPU-aa2",)),
        ("NoDevFiles", ()),
        ("1,1", ()),  # CUDA refuses a list that names one twice
    ],
)
def test_rules(variable: str | None, chosen: tuple[str, ...]) -> None:
    found = visible(variable, GPUS, {})
    assert found.uuids == chosen
    assert (found.note is None) == (chosen == GPUS)


def test_of_slices_one_at_a_time() -> None:
    slices = {"MIG-a": 0, "MIG-b": 0}
    assert visible(None, ["GPU-0"], slices).uuids == ("MIG-a",)
    assert visible("0", ["GPU-0"], slices).uuids == ("MIG-a",)
    assert visible("MIG-b,MIG-a", ["GPU-0"], slices).uuids == ("MIG-b",)
