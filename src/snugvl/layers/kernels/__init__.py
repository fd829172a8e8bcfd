"""Triton kernels, each beside the plain torch that says what it computes. Imported on a GPU only."""

import os

# A product and a sum in one instruction, as every Triton up to 3.9 does unasked; 3.9 warns of it on standard
# error, and 3.10 would no longer do it.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
