"""Kernels that start while the one before them ends.

Between two kernels the GPU idles for about a microsecond: the last programs end, memory is flushed, the next
kernel is launched. From Hopper on a kernel can be launched before, and wait where it needs what others wrote.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from snugvl.layers.kernels.device import capability


@triton.jit
def take_turn(EARLY: tl.constexpr):
    """Wait for all that was launched before, then let the next kernel be launched."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


def early(device: torch.device) -> dict[str, bool]:
    """Arguments of a launch: start early where the hardware can.

    The kernel must wait before it reads what another kernel writes, and before it writes anything.
    """
    return {"EARLY": True, "launch_pdl": True} if capability(device) >= (9, 0) else {"EARLY": False}
