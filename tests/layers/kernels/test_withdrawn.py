"""Kernels are withdrawn by name: every one is asked for where it is chosen, and no name is one of none."""

import re
from pathlib import Path

import snugvl

PACKAGE = Path(snugvl.__file__).parent
ENTRY = re.compile(r"^@launched\n@triton\.jit.*\ndef (\w+)", re.MULTILINE)
ASKED = re.compile(r"\b(?:usable|by_kernels)\(([^)]*)\)")
APART = {"convolve", "slide", "correct", "solve", "scan", "gate"}  # of one layer, in a constant


def test_every_kernel_can_be_withdrawn_and_nothing_else() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    kernels = {
        name for path, text in sources.items() if "kernels" in path.parts for name in ENTRY.findall(text)
    }
    given = " ".join(given for text in sources.values() for given in ASKED.findall(text))
    asked = set(re.findall(r'"(\w+)"', given)) | APART
    by_form = set(
        re.findall(r'form = "(\w+)" if .* else "(\w+)"', sources[PACKAGE / "layers" / "experts.py"])[0]
    )
    assert len(kernels) >= 30
    assert asked | by_form == kernels


def test_the_delta_rules_kernels_are_those() -> None:
    from snugvl.models.linear_attention import KERNELS

    assert set(KERNELS) == APART
