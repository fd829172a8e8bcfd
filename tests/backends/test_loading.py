"""What loading tells while it goes, what it was planned to take, and what it must not import."""

import subprocess
import sys
from pathlib import Path

import pytest

import snugvl
from snugvl.backends.native.loading import load_engine
from snugvl.core.options import LoadOptions


def test_progress_runs_from_nearly_zero_to_nearly_one(folder: Path) -> None:
    told: list[tuple[str, float]] = []
    with snugvl.load(folder, device="cpu", progress=lambda detail, done: told.append((detail, done))):
        pass
    details, shares = zip(*told, strict=True)
    assert details[0] == "reading headers"
    assert details[-1] == "allocating the KV cache"
    assert any(detail.startswith("loading weights (") for detail in details)
    assert len([detail for detail in details if detail.startswith("loading weights")]) <= 101
    assert list(shares) == sorted(shares)
    assert 0 < shares[0] < 0.05  # the server takes it for: torch is imported
    assert shares[-1] == 0.9


def test_the_plan_of_what_was_loaded(folder: Path) -> None:
    loaded = load_engine(LoadOptions(str(folder), device="cpu", dtype="auto", context=512, max_waiting=3))
    try:
        assert loaded.backend._engine.config.max_waiting == 3
        memory = loaded.backend.memory()
        assert loaded.planned["KV cache"] >= memory["kv_cache"] > 0
        assert sum(loaded.weights.values()) == memory["weights"]
        for name in ("text weights", "vision weights"):
            assert loaded.planned[name] == loaded.weights[name]
        assert loaded.planned["workspace"] > 0
        assert loaded.backend.capabilities.device == "CPU"
        assert loaded.backend.capabilities.dtype == "float32"
    finally:
        loaded.backend.close()


@pytest.mark.slow
def test_loading_imports_no_compiler() -> None:
    """`torch._dynamo` takes longer to import than pocket takes to load."""
    code = (
        "import sys, snugvl\n"
        "with snugvl.load('pocket', device='cpu'): pass\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
