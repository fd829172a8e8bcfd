"""Names the machine a figure comes from, and saves raw results beside the others."""

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from snugvl.version import __version__

RESULTS = Path(__file__).parent / "results"


def describe() -> dict[str, Any]:
    """Processor, memory, GPU and versions."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": gpu,
        "cpus": os.cpu_count(),
        "ram_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "snugvl": __version__,
    }


def save(name: str, values: Any, path: Path | None = None) -> Path:
    """Write `values` with the machine they were measured on; prints and returns where."""
    path = path or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": describe(), **values}, indent=1) + "\n")
    print(f"\nraw results: {path}")
    return path
