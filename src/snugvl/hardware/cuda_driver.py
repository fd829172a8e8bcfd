"""The CUDA driver by itself, for what can be done before torch is imported."""

import ctypes

LIBRARY = "libcuda.so.1"


def open_context(index: int, library: str = LIBRARY) -> bool:
    """Make the primary context of a GPU, which torch finds and uses later; whether that worked.

    It takes a large part of a second, without Python's lock: run in a thread it costs nothing while torch is
    imported. What fails here is left to torch, which tries again and says why.

    Args:
        index: of the GPU, as CUDA and torch count those that are visible.
        library: the driver's.
    """
    try:
        driver = ctypes.CDLL(library)
    except OSError:  # no driver, or not Linux
        return False
    device, context = ctypes.c_int(), ctypes.c_void_p()
    return bool(
        driver.cuInit(0) == 0
        and driver.cuDeviceGet(ctypes.byref(device), index) == 0
        and driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    )
