"""GPUs that people own: memory as NVML reports it, bandwidth, compute capability, matrix speed.

The figures lie in `gpus.csv`, each with where it comes from. Dense tensor speed is the datasheet's where it
gives one with fp32 accumulation (as torch multiplies); GeForce datasheets don't, so it follows from theirs:

    flops = CUDA cores / cores per SM × boost clock × operations per SM and clock

which gives the figures of NVIDIA's architecture papers: 71.2 (RTX 3090), 165.2 (4090), 209.5 (5090) TFLOP/s.
"""

import csv
import difflib
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final, Literal

from snugvl.core.sizes import GIB, MIB
from snugvl.errors import InputError
from snugvl.hardware.machine import Api

MemorySource = Literal["nvml", "nominal", "published", "host memory"]

# By compute capability, of the newest that it is not above.
_CORES_PER_SM: Final = (((8, 6), 128), ((7, 0), 64), ((6, 1), 128), ((0, 0), 64))
_TENSOR_OPS: Final = 512  # per SM and clock, fp16 in, fp32 accumulated: GeForce Turing to Blackwell
_PLAIN_OPS: Final = 256  # GTX 16xx has no tensor cores: 128 fp16 multiply-adds
_IGNORED = re.compile(
    r"nvidia|amd|intel|apple|radeon|instinct|geforce|tesla|quadro|graphics|generation|workstationedition|gpu|\((?:r|tm)\)"
)
_GEFORCE = re.compile(r"^[rg]tx(?=\d)")
_OTHERS = re.compile(r"^(rtx(?=a\d)|rx(?=\d))")
_SEVERAL = re.compile(r"(?P<count>\d{1,3})\s*[x×*]\s*(?P<one>\D.*)", re.IGNORECASE)
_LISTED = re.compile(r"[,;+&]|\band\b")
_WITHOUT = ("cpu", "no", "null", "false", "0")
_SIZED = re.compile(r"(?P<name>.*\w)\W+(?P<gigabytes>\d{1,3})\s*gi?b", re.IGNORECASE)
_NOT_WORD = re.compile(r"[^a-z0-9]+")


# What the driver keeps of a card on Linux, NVML's "reserved": CUDA's total is that much less than NVML's, to
# the byte on an H200 (driver 580: 143,771 and 143,156 MiB). Published totals in GiB, with drivers of 2025 and
# 2026, and MiB that they leave of NVML's:
#
#     8 GB     7.60 to 7.66   345 to 406   torch's out-of-memory messages of many; 7.62 in vLLM's message of
#                                          free memory (kvcached, 2025-11)
#     12 GB    11.57, 11.63   373 to 440   the same
#     16 GB    15.46 to 15.51 430 to 494   the same; vLLM 0.29 "(15.28/15.51 GiB)"
#     24 GB    23.52, 23.56   451 to 480   RTX 4090 with driver 595, RTX 3090
#     L4       22.05          455          pytorch/pytorch#175666, vllm-project/vllm#33297
#     32 GB    31.36          494          RTX 5090; nvidia-smi says 32,607 MiB of which 32,110 are free
#     L40S     44.39          613          DINGYANB/MTVCrafter#21 says 44.43
#     48 GB                   569          RTX 6000 Ada: "Reserved: 569 MiB" of nvidia-smi -q
#     H200     139.80         615          ours
#
# The line below is at most 50 MiB off them. Drivers before 560 or so reserved 100 to 200 MiB less (RTX 3090
# with 550: 23.68, vllm-project/vllm#16343). Under WSL2 CUDA's total is NVML's ("total_gpu_memory (8.00GiB)",
# vllm-project/vllm#13882).
_RESERVED_BYTES: Final = 360 * MIB
_RESERVED_PER_GIB: Final = 4.5 * MIB
_MOST_RESERVED_BYTES: Final = 640 * MIB
_MOST_RESERVED_SHARE: Final = 10  # no more than a tenth of tiny cards


def reserved_bytes(total_bytes: int) -> int:
    """Bytes that the driver keeps of a card with `total_bytes`, on Linux; a rule, not a measurement."""
    by_size = _RESERVED_BYTES + int(_RESERVED_PER_GIB * total_bytes / GIB)
    return min(by_size, _MOST_RESERVED_BYTES, total_bytes // _MOST_RESERVED_SHARE)


@dataclass(frozen=True, slots=True)
class GpuModel:
    """One model of GPU.

    Attributes:
        name: NVML's name, without the vendor.
        total_bytes: memory as NVML reports it.
        memory_source: "nominal": the vendor's gigabytes; NVML may report up to 0.6 % less. "published": those
            of another maker. "host memory": it has none of its own; `total_bytes` is what its machine has, or
            0 where they differ.
        bandwidth: bytes per second, vendor's datasheet.
        bf16_flops: dense bf16 (fp16 before Ampere) operations per second, or None where no source is sure.
        cycles_per_s: clock cycles of all multiprocessors together, at the datasheet's boost clock, or None.
    """

    name: str
    aliases: tuple[str, ...]
    total_bytes: int
    memory_source: MemorySource
    bandwidth: float
    compute_capability: tuple[int, int] | None
    bf16_flops: float | None
    cycles_per_s: float | None

    @property
    def api(self) -> Api:
        """The API by which programs reach it; only llama.cpp uses other makers' than NVIDIA's."""
        if self.compute_capability is not None:
            return "cuda"
        return "metal" if self.name.startswith("Apple") else "vulkan"

    @property
    def unified(self) -> bool:
        """Whether its memory is host memory."""
        return self.memory_source == "host memory"

    @property
    def product(self) -> str:
        """The name with the maker's, as the driver reports it."""
        if self.api != "cuda" or self.name.startswith(("Tesla", "Quadro", "TITAN")):
            return self.name
        return f"NVIDIA {self.name}"


@cache
def known() -> tuple[GpuModel, ...]:
    """Every GPU of the table, in its order."""
    text = files("snugvl.hardware").joinpath("gpus.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    return tuple(_model(row) for row in rows)


def find(name: str, total_bytes: int | None = None) -> GpuModel | None:
    """The GPU of that name, however it is spelled, or None.

    Among several of that name, the one whose memory is nearest to `total_bytes`; without it the table's
    first. The name may end in the gigabytes that it has.
    """
    matches = _index().get(_key(name), ())
    if not matches and (sized := _SIZED.fullmatch(name.strip())):
        near = (model for model in _index().get(_key(sized["name"]), ()) if not model.unified)
        matches = tuple(model for model in near if round(model.total_bytes / GIB) == int(sized["gigabytes"]))
    if not matches:
        return None
    if total_bytes is None:
        return matches[0]
    return min(matches, key=lambda model: abs(model.total_bytes - total_bytes))


def lookup(name: str, total_bytes: int | None = None) -> GpuModel:
    """The GPU of that name, as `find` finds it.

    Raises:
        InputError: an unknown name; says the nearest ones.
    """
    model = find(name, total_bytes)
    if model is not None:
        return model
    if found := _SEVERAL.fullmatch(name.strip()):
        raise InputError(f"{name!r} is several GPUs; say --gpu {found['one']!r} --gpus {found['count']}")
    if _LISTED.search(name):
        raise InputError(
            f"{name!r} is GPUs of several kinds, which can't be described; plan on that machine, or with "
            "--machine and a recording of it (snugvl doctor --record FILE)"
        )
    if name.strip().lower() in _WITHOUT:
        raise InputError(f"{name!r} is not a GPU; a machine without one is described by --gpu none")
    near = nearest(name)
    hint = f"nearest: {', '.join(near)}" if near else "no name comes near"
    raise InputError(
        f"no GPU {name!r} in the table ({hint}); an NVIDIA GPU may be said by its memory alone, with --vram"
    )


def is_mac(name: str) -> bool:
    """Whether a GPU of that name is one of Apple's."""
    model = find(name)
    return model is not None and model.api == "metal"


def nearest(name: str) -> list[str]:
    """The three names in the table that are spelled most like `name`, as `--gpu` takes them."""
    keys = difflib.get_close_matches(_key(name), _index(), n=9, cutoff=0.5)
    names = dict.fromkeys(_short(_index()[key][0].name) for key in keys)
    return list(names)[:3]


@cache
def _index() -> dict[str, tuple[GpuModel, ...]]:
    found: dict[str, list[GpuModel]] = {}
    for model in known():
        for key in dict.fromkeys(_key(name) for name in (model.name, *model.aliases)):
            found.setdefault(key, []).append(model)
    # "5060" and "4060 laptop" mean the GeForce, whose digits workstation cards have as well.
    for key in list(found):
        geforce = any("GeForce" in model.name for model in found[key])
        bare = (_GEFORCE if geforce else _OTHERS).sub("", key)
        if len(bare) >= 4:
            found.setdefault(bare, found[key])
    return {key: tuple(models) for key, models in found.items()}


def _key(name: str) -> str:
    """The key of a spelling: "NVIDIA GeForce RTX 5060 Laptop GPU", "rtx-5060 mobile" → "rtx5060laptop"."""
    joined = _NOT_WORD.sub("", name.lower().replace("(r)", "").replace("(tm)", ""))
    return _IGNORED.sub("", joined.replace("mobile", "laptop").replace("gib", "gb"))


def _short(name: str) -> str:
    words = (
        re.sub(r"geforce |amd |intel |apple |radeon |instinct ", "", name.lower())
        .replace(" gpu", "")
        .replace(" generation", "")
    )
    return words.replace("tesla ", "").replace(" ", "-")


def _model(row: dict[str, str]) -> GpuModel:
    capability: Any = tuple(map(int, row["cc"].split("."))) if row["cc"] else None
    source: Any = row["mib_source"]
    units = _multiprocessors(row, capability)
    cycles = units * int(row["boost_mhz"]) * 1e6 if units is not None and row["boost_mhz"] else None
    return GpuModel(
        name=row["name"],
        aliases=tuple(filter(None, row["aliases"].split(";"))),
        total_bytes=int(row["mib"] or 0) * MIB,
        memory_source=source,
        bandwidth=float(row["gb_per_s"]) * 1e9,
        compute_capability=capability,
        bf16_flops=float(row["tflops"]) * 1e12 if row["tflops"] else _flops(row["name"], cycles, capability),
        cycles_per_s=cycles,
    )


def _multiprocessors(row: dict[str, str], capability: tuple[int, int] | None) -> int | None:
    if not row["cores"] or capability is None:
        return None
    return int(row["cores"]) // next(cores for least, cores in _CORES_PER_SM if capability >= least)


def _flops(name: str, cycles: float | None, capability: tuple[int, int] | None) -> float | None:
    """Operations per second of a GeForce of Turing or later."""
    if cycles is None or capability is None or capability < (7, 0):
        return None
    return cycles * (_PLAIN_OPS if "GTX" in name else _TENSOR_OPS)
