"""docs/install.md: its sentences are the program's, its extras and versions the project's."""

import re

from snugvl.hardware.advice import CUDA_12, no_launcher, unusable
from snugvl.hardware.software import MIN_DRIVER, BuildTools
from tests.docs.test_readme import README, ROOT
from tests.hardware.test_advice import CPU, CU130, recorded
from tests.test_dependencies import PROJECT, pins

PAGE = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")


def test_its_sentences_are_what_is_said() -> None:
    missing = PAGE.partition("## What may be missing")[2]
    shown = set(re.findall(r"\| `([^`]+)` \|$", missing, re.MULTILINE))
    machine = recorded("l4-container")
    (gpu,) = machine.gpus
    bare = BuildTools(None, headers=False, venv=True, apt=True, python="3.13")
    of_ours = {unusable(gpu, machine, CU130), unusable(gpu, machine, CPU), no_launcher(bare)}
    assert shown - of_ours == {
        "No NVIDIA driver is installed (libnvidia-ml.so.1 was not found).",
        "On Debian/Ubuntu systems, you need to install the python3-venv package",  # Debian's Python says it
    }
    assert of_ours <= shown
    assert any("libnvidia-ml.so.1 was not found" in note for note in recorded("laptop-no-gpu").notes)


def test_its_versions_are_those_that_count() -> None:
    torch = pins(ROOT / "constraints.txt")["torch"]
    assert f"torch {torch.rpartition('.')[0]} is built with CUDA 13" in PAGE
    assert f"`pip install '{CUDA_12}'`" in PAGE
    for cuda in (12, 13):
        assert "{}.{}".format(*MIN_DRIVER[cuda]) in PAGE
    (extras,) = re.findall(r"\| extra \|.*?\n\n", PAGE, re.DOTALL)
    named = set(re.findall(r"^\| `(\w+)` \|", extras, re.MULTILINE))
    assert named == PROJECT["optional-dependencies"].keys() - {"dev"}


def test_readme_and_page_name_the_same_room() -> None:
    sizes = [float(each) for each in re.findall(r"\| ([\d.]+) GB \|", PAGE)]
    assert len(sizes) == 4
    whole, _, while_installing, cached = sizes
    assert f"{whole:g} GB ([{whole + while_installing + cached:.0f} while installing]" in README
