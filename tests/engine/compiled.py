"""Run by `test_precompile.py` in a process of its own, where kernels are not interpreted.

A dry run looks for torch's compiler, then `serving_mix.py` and `family_steps.py` do their work: a process for
each would take twice as long. Prints one line of JSON: what each of them found.
"""

import json
import sys

import torch

from snugvl.layers.kernels.compiler.ahead_of_time import dry_run
from snugvl.layers.kernels.device import Hardware
from tests.engine import family_steps, serving_mix


def compiler() -> list[bool]:
    """Whether a stand-in for `torch._dynamo` is there in a dry run, and whether anything of it is left."""
    with dry_run(Hardware((9, 0), 132)):
        torch.empty(2, 3, device="meta").logsumexp(-1)  # which torch finds out in Python
        stands_in = len(sys.modules["torch._dynamo"].__dict__) < 20
    return [stands_in, "torch._dynamo" in sys.modules, "_dynamo" in vars(torch)]


def main() -> None:
    found = {"compiler": compiler(), "mixes": serving_mix.found(), "families": family_steps.found()}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
