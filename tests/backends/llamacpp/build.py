"""llama.cpp's server with CUDA for one card, out of the sources in llama-cpp-python's source distribution.

    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python
    tar xf llama_cpp_python-*.tar.gz
    python -m tests.backends.llamacpp.build tree …/vendor/llama.cpp TREE        # what the build needs
    python -m tests.backends.llamacpp.build pack TREE FILE.tar.xz                          # to carry it
    python -m tests.backends.llamacpp.build build TREE OUT [--cpu] [--cublas FOLDER]       # OUT/llama-server

`tree` leaves out tests, examples, the web page, other processors, other graphics interfaces, other networks
than ours, and of CUDA's kernels those whose shapes none of our models has: heads of another width, products
of quantisations that `training/gguf_export.py` doesn't write. A call of one of those ends the server with
"undefined symbol". `build` needs no GPU, and a quarter of an hour of one core's time; where cuBLAS isn't
installed with nvcc, `--cublas` names the unpacked wheel nvidia-cublas, or the folder nvidia/cu13 that torch
has. On the GPU machine LD_LIBRARY_PATH names the folder of libcublas.
"""

import argparse
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

WHOLE = ("CMakeLists.txt", "LICENSE", "cmake", "common", "include", "licenses", "src", "vendor")
TOOLS = ("mtmd", "server")
PAGE = ("CMakeLists.txt", "sources.cmake", "ui.cpp.in", "ui.h.in")
GGML = ("CMakeLists.txt", "cmake", "include", "ggml.pc.in")
BACKENDS = ("ggml-cpu", "ggml-cuda")
NOT_PROGRAMS = (
    "tests",
    "test",
    "bench",
    "themes",
    "README*",
    "legacy-models",
    "spacemit",
    "kleidiai",
    "*.md",
)
PROCESSORS = ("arm", "loongarch", "powerpc", "riscv", "s390", "wasm")  # of ggml-cpu/arch, beside x86
KEPT_PRODUCTS = ("q4_k", "q5_0", "q5_k", "q6_k", "q8_0")  # quantisations in our files
# Widths of heads, the tower's and the decoders' → how many queries share a key.
KEPT_HEADS = {64: (1,), 72: (1,), 128: (1, 2, 4, 8), 256: (4,)}
CACHES = "q8_0-q8_0"  # types of keys and values beside f16
ATTENTION = re.compile(r"^DECL_FATTN_(?:MMA_F16|TILE)_CASE\((\d+), *(\d+)(?:, *\d+, *(\d+))?\);\n", re.M)
VECTOR = re.compile(
    r"^ *case GGML_TYPE_(\w+):\n *mul_mat_vec_q_switch_ncols_dst<GGML_TYPE_\1>\n.*?break;\n", re.M | re.S
)
# Operations that no graph of ours has.
LEFT_KERNELS = (
    "acc", "add-id", "allreduce", "col2im-1d", "conv-transpose-1d", "conv2d", "conv2d-dw", "conv2d-transpose",
    "conv3d", "count-equal", "cross-entropy-loss", "dsv4-hc", "gla", "lightning-indexer", "mean",
    "opt-step-adamw", "opt-step-sgd", "out-prod", "pad_reflect_1d", "pool1d", "pool2d", "roll", "snake",
    "softcap", "ssm-scan", "sum", "tsembd", "wkv",
)  # fmt: skip
KEPT_MODELS = (
    "delta-net-base", "llama", "qwen2", "qwen2vl", "qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3vl",
    "qwen3vlmoe",
)  # fmt: skip
KEPT_TOWERS = ("qwen2vl", "qwen3vl")
MODEL = re.compile(r"return new llama_model_(\w+)\(params\);")
TOWER = re.compile(r"builder = std::make_unique<clip_graph_(\w+)>\(ctx, img[^)]*\);")
LEFT = 'throw std::runtime_error("left out of this build");'
DRIVER = """
#define STUB(name) int name(void) { return 999; }
STUB(cuDeviceGet) STUB(cuDeviceGetAttribute) STUB(cuGetErrorString) STUB(cuMemAddressFree)
STUB(cuMemAddressReserve) STUB(cuMemCreate) STUB(cuMemGetAllocationGranularity) STUB(cuMemMap)
STUB(cuMemRelease) STUB(cuMemSetAccess) STUB(cuMemUnmap)
"""
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release", "BUILD_SHARED_LIBS": "ON", "GGML_BACKEND_DL": "ON",
    "LLAMA_BUILD_TESTS": "OFF", "LLAMA_BUILD_EXAMPLES": "OFF", "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF", "LLAMA_USE_PREBUILT_UI": "OFF", "LLAMA_OPENSSL": "OFF",
    "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON", "CMAKE_INSTALL_RPATH": "$ORIGIN",
    "CMAKE_EXE_LINKER_FLAGS": "-Wl,--allow-shlib-undefined -static-libstdc++ -static-libgcc",
    "CMAKE_SHARED_LINKER_FLAGS": "-Wl,-z,lazy",
}  # fmt: skip
# For a processor that isn't this one: what servers with such a card have had since 2020.
X86 = ("AVX", "AVX2", "BMI2", "FMA", "F16C", "AVX512", "AVX512_VBMI", "AVX512_VNNI")


def tree(source: Path, out: Path) -> None:
    """Copy what the build needs."""
    leave = shutil.ignore_patterns(*NOT_PROGRAMS)

    def take(name: str) -> None:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        if (source / name).is_dir():
            shutil.copytree(source / name, out / name, ignore=leave, dirs_exist_ok=True)
        elif (source / name).exists():
            shutil.copy(source / name, out / name)

    for name in (*WHOLE, "scripts/ui-assets.cmake", *(f"tools/{tool}" for tool in TOOLS)):
        take(name)
    for name in (*(f"tools/ui/{page}" for page in PAGE), *(f"ggml/{part}" for part in GGML)):
        take(name)
    for path in (source / "ggml/src").iterdir():
        if path.is_file() or path.name in BACKENDS:
            take(f"ggml/src/{path.name}")
    for processor in PROCESSORS:
        shutil.rmtree(out / "ggml/src/ggml-cpu/arch" / processor, ignore_errors=True)
    (out / "tools/CMakeLists.txt").write_text(
        "find_package(Threads REQUIRED)\nllama_add_compile_flags()\n"
        + "".join(f"add_subdirectory({name})\n" for name in ("ui", *TOOLS))
    )
    _leave_kernels(out / "ggml/src/ggml-cuda")
    _leave_models(out)
    # What is left out is missed when it is called, not when the library is loaded.
    _edit(out / "ggml/src/ggml-backend-dl.cpp", lambda text: text.replace("RTLD_NOW", "RTLD_LAZY"))


def _edit(path: Path, change: Callable[[str], str]) -> None:
    text = change(before := path.read_text())
    if text == before:
        sys.exit(f"{path} isn't as this script knows it: another llama.cpp")
    path.write_text(text)


def _leave_kernels(folder: Path) -> None:
    """Attention of other widths, products of other quantisations and operations of others go."""
    instances = folder / "template-instances"
    for path in instances.glob("mmq-instance-*.cu"):
        if path.stem.removeprefix("mmq-instance-") not in KEPT_PRODUCTS:
            path.unlink()

    def attention(found: re.Match[str]) -> str:
        keys, values, shared = (int(each or 1) for each in found.groups())
        return found[0] if keys == values and shared in KEPT_HEADS.get(keys, ()) else ""

    for path in (*instances.glob("fattn-mma-*.cu"), *instances.glob("fattn-tile-*.cu")):
        text = ATTENTION.sub(attention, path.read_text())
        if ATTENTION.search(text):
            path.write_text(text)
        else:
            path.unlink()
    for name in LEFT_KERNELS:
        (folder / f"{name}.cu").unlink()
    _edit(
        folder / "mmvq.cu",
        lambda text: VECTOR.sub(lambda found: found[0] if found[1].lower() in KEPT_PRODUCTS else "", text),
    )


def _leave_models(out: Path) -> None:
    """Networks of other families go."""
    for path in (out / "src/models").glob("*.cpp"):
        if path.stem not in KEPT_MODELS:
            path.unlink()
    for path in (out / "tools/mtmd/models").glob("*.cpp"):
        if path.stem not in KEPT_TOWERS:
            path.unlink()
    listed = re.compile(r" *models/([\w-]+)\.cpp\n")
    _edit(
        out / "tools/mtmd/CMakeLists.txt",
        lambda text: listed.sub(lambda found: found[0] if found[1] in KEPT_TOWERS else "", text),
    )
    _edit(out / "src/llama-model.cpp", partial(_without, MODEL, KEPT_MODELS))
    _edit(out / "tools/mtmd/clip.cpp", partial(_without, TOWER, KEPT_TOWERS))


def _without(pattern: re.Pattern[str], kept: tuple[str, ...], text: str) -> str:
    """A text whose statements about others than `kept` throw an error."""
    return pattern.sub(lambda found: found[0] if found[1] in kept else LEFT, text)


def build(
    source: Path, out: Path, targets: list[str], *, cuda: bool, cublas: Path | None, jobs: int, native: bool
) -> None:
    """Configure, compile `llama-server` or other targets, and gather it with its libraries."""
    began = time.monotonic()
    folder = out / "build"
    folder.mkdir(parents=True, exist_ok=True)
    options = {**OPTIONS, "GGML_NATIVE": "ON" if native else "OFF"}
    if native:
        options["GGML_BACKEND_DL"] = "OFF"  # a backend that is loaded must not be of one processor alone
    else:
        options |= {f"GGML_{name}": "ON" for name in X86}
    if cuda:
        options |= {"GGML_CUDA": "ON", "CMAKE_CUDA_ARCHITECTURES": "90-real", "GGML_CUDA_FA_QUANTS": CACHES}
        options |= {"GGML_CUDA_COMPRESSION_MODE": "none", "GGML_CUDA_NCCL": "OFF"}  # xz is better at it
    if cuda and cublas is not None:
        options |= _cublas(cublas, folder)
    words = ["cmake", "-G", "Ninja", "-S", str(source.resolve()), "-B", str(folder)]
    environment = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/local/cuda/bin"}
    run = subprocess.run([*words, *(f"-D{name}={value}" for name, value in options.items())], env=environment)
    if run.returncode:
        sys.exit("cmake's configuration failed")
    run = subprocess.run(["ninja", "-C", str(folder), "-j", str(jobs), *targets], env=environment)
    if run.returncode:
        sys.exit("the build failed")
    for path in (folder / "bin").glob("*"):
        if path.name == "llama-server" or ".so" in path.name:
            (out / path.name).unlink(missing_ok=True)
            shutil.copy(path, out / path.name, follow_symlinks=False)
    for path in out.glob("*"):
        if path.is_file() and not path.is_symlink():
            subprocess.run(["strip", str(path)], check=True)
    print(f"{out}: {', '.join(targets)} built in {time.monotonic() - began:.0f} s by {jobs} jobs")


def _cublas(unpacked: Path, folder: Path) -> dict[str, str]:
    """Where the compiler finds headers and libraries of cuBLAS, and a driver library to link with."""
    (stub := folder / "driver.c").write_text(DRIVER)
    driver = folder / "libcuda.so"
    words = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(driver), str(stub)]
    subprocess.run(words, check=True)
    (header,) = unpacked.rglob("cublas_v2.h")
    (library,) = unpacked.rglob("libcublas.so.*")
    (light,) = unpacked.rglob("libcublasLt.so.*")
    return {
        "CUDA_cublas_LIBRARY": str(library.resolve()),
        "CUDA_cublasLt_LIBRARY": str(light.resolve()),
        "CUDA_cuda_driver_LIBRARY": str(driver.resolve()),
        "CMAKE_CUDA_FLAGS": f"-I{header.parent.resolve()}",
        "CMAKE_CXX_FLAGS": f"-I{header.parent.resolve()}",
    }


def pack(folder: Path, out: Path) -> None:
    """A tar.xz of a folder, as small as it gets; what was only needed for the build isn't in it."""
    with (
        lzma.open(out, "wb", preset=9 | lzma.PRESET_EXTREME) as squeezed,
        tarfile.open(fileobj=squeezed, mode="w") as archive,
    ):
        for path in sorted(folder.iterdir()):
            if path.name != "build":
                archive.add(path, path.name)
    print(f"{out}: {out.stat().st_size / 2**20:.1f} MiB")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("tree", "build", "pack"))
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cpu", action="store_true", help="without CUDA")
    parser.add_argument("--native", action="store_true", help="for this machine's processor alone")
    parser.add_argument("--cublas", type=Path, help="the unpacked wheel nvidia-cublas")
    parser.add_argument(
        "--targets", nargs="+", metavar="TARGET", help="instead of the server and its backends"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    if given.what == "tree":
        tree(given.source, given.out)
    elif given.what == "pack":
        pack(given.source, given.out)
    else:
        targets = given.targets or ["llama-server", "ggml-cpu", *([] if given.cpu else ["ggml-cuda"])]
        build(
            given.source, given.out.resolve(), targets, cuda=not given.cpu, cublas=given.cublas,
            jobs=given.jobs, native=given.native,
        )  # fmt: skip


if __name__ == "__main__":
    main()
