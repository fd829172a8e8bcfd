"""Kernels are withdrawn by name: every one is asked for where it is chosen, and no name is one of none."""

import re
from pathlib import Path

import snugvl

PACKAGE = Path(snugvl.__file__).parent
ENTRY = re.compile(r"^@launched\n@triton\.jit.*\ndef (\w+)", re.MULTILINE)
ASKED = re.compile(r"\b(?:usable|by_kernels)\(([^)]*)\)")
# Of one kind of layer, in a constant.
DELTA = {"convolve", "slide", "correct", "solve", "scan", "gate"}
APART = {"place_experts", "bring_experts"}


def test_every_kernel_can_be_withdrawn_and_nothing_else() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    kernels = {
        name for path, text in sources.items() if "kernels" in path.parts for name in ENTRY.findall(text)
    }
    given = " ".join(given for text in sources.values() for given in ASKED.findall(text))
    asked = set(re.findall(r'"(\w+)"', given)) | DELTA | APART
    by_form = set(
        re.findall(r'form = "(\w+)" if .* else "(\w+)"', sources[PACKAGE / "layers" / "experts.py"])[0]
    )
    assert len(kernels) >= 30
    assert asked | by_form == kernels


def test_those_of_constants_are_these() -> None:
    from snugvl.models import expert_cache, linear_attention

    assert set(linear_attention.KERNELS) == DELTA
    assert set(expert_cache.KERNELS) == APART
