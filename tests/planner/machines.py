"""Machines for the planner's tests."""

from snugvl.hardware.machine import Gpu, Machine, OperatingSystem

MIB = 1 << 20
GIB = 1 << 30


def machine(
    total_bytes: int, held_bytes: int = 0, *, os: OperatingSystem = "linux", gpus: int = 1,
    capability: tuple[int, int] | None = (12, 0), context_bytes: int | None = None,
) -> Machine:  # fmt: skip
    """GPUs of one kind: an RTX 5060's bandwidth, whatever its memory."""
    cards = tuple(
        Gpu(number, "Test GPU", total_bytes, total_bytes - held_bytes, capability, 448e9, 61e12,
            context_bytes=context_bytes)
        for number in range(gpus)
    )  # fmt: skip
    spills = os == "wsl2"
    pinned = 16 * GIB if spills else None
    return Machine(
        os, cards, 8, 32 * GIB, 24 * GIB, 500 * GIB, "described", pinned_bytes=pinned, spills=spills
    )


def rtx_5060(held_bytes: int = 951 * MIB) -> Machine:
    """The first card a user asks about."""
    return machine(8151 * MIB, held_bytes, os="wsl2")
