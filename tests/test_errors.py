"""What users are told of a library's error."""

import pytest

from snugvl.backends.spawned import describe
from snugvl.errors import engine_failed

# As torch 2.11 says it on a card that others use, too.
TORCH = (
    "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which "
    "1.20 GiB is free. Process 4711 has 3.00 GiB memory in use. Including non-PyTorch memory, this process "
    "has 5.90 GiB memory in use. 6.00 GiB allowed; Of the allocated memory 5.20 GiB is allocated by PyTorch, "
    "and 100.00 MiB is reserved by PyTorch but unallocated."
)


def test_out_of_memory_is_told_in_numbers_without_other_processes() -> None:
    assert str(engine_failed(RuntimeError(TORCH))) == (
        "the engine failed: out of memory (512.00 MiB asked for, 6.00 GiB allowed in all); free some, or "
        "send less at once; the log says more"
    )


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("a bug", "a bug"),
        ("", ""),
        ("CUDA error: unspecified launch failure\nFor debugging …", "CUDA error: unspecified launch failure"),
        ("x" * 1000, "x" * 200 + " …"),
    ],
)
def test_other_errors_are_told_in_a_line(said: str, told: str) -> None:
    assert str(engine_failed(RuntimeError(said))) == f"the engine failed: RuntimeError: {told}"


def test_a_dead_process_last_words_name_no_other_process() -> None:
    told = describe(1, (f"torch.OutOfMemoryError: {TORCH}",))
    assert told.endswith(
        '(it said: "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB.")'
    )
