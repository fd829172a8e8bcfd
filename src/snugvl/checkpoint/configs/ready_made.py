"""The `quantization_config` of ready-made 4-bit checkpoints, as far as our engine reads them.

Sources: AutoAWQ, `awq/models/_config.py` (MIT).
"""

from typing import Any, NoReturn

from snugvl.checkpoint.architecture import PackedInt4
from snugvl.checkpoint.section import Section
from snugvl.errors import UnsupportedModel

GROUPS = (64, 128)  # columns that may share a scale: the kernels' own
INSTEAD = "use the 16-bit checkpoint with --weights int4, or --backend transformers or vllm"


def read_awq(section: Section) -> PackedInt4:
    """AWQ as AutoAWQ's "gemm" layout stores it, which is what the Hub has.

    Raises:
        UnsupportedModel: another layout, number of bits or group.
    """
    values = section.values
    found = {
        "bits": values.get("bits"),
        "group_size": values.get("group_size"),
        "version": str(values.get("version") or values.get("checkpoint_format") or "gemm").lower(),
    }
    if found["bits"] != 4 or found["group_size"] not in GROUPS or found["version"] != "gemm":
        _refuse(section, "awq", found, f"4 bits in groups of {_groups()} in version 'gemm'")
    return PackedInt4("awq", values["group_size"])


def _refuse(section: Section, method: str, found: dict[str, Any], known: str) -> NoReturn:
    has = ", ".join(f"{key} {value!r}" for key, value in found.items())
    raise UnsupportedModel(f"{section.where} is {method!r} with {has}; our engine reads {known}: {INSTEAD}")


def _groups() -> str:
    return " or ".join(map(str, GROUPS))
