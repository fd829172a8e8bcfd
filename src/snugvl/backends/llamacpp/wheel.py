"""llama.cpp's server out of the wheel xllamacpp, as a program that takes llama-server's own flags.

    python -m snugvl.backends.llamacpp.wheel -m FILE.gguf --host SOCKET -c 8192 …

The wheel has no parser of flags: those that snugvl's plans have are set here, others are refused by name.
"""

import argparse
import os
import signal
import sys
import threading
from typing import Any, Final

KV_TYPES: Final = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
# Flags that are a number in a field of the parameters.
NUMBERS: Final = {
    "-c": "n_ctx", "-np": "n_parallel", "-b": "n_batch", "-ub": "n_ubatch", "-ngl": "n_gpu_layers",
    "-lv": "verbosity", "--cache-ram": "cache_ram_mib", "--ctx-checkpoints": "n_ctx_checkpoints",
    "--image-min-tokens": "image_min_tokens", "--image-max-tokens": "image_max_tokens",
}  # fmt: skip
FLASH: Final = {"on": "ENABLED", "off": "DISABLED", "auto": "AUTO"}


def parser() -> argparse.ArgumentParser:
    """The flags."""
    found = argparse.ArgumentParser(prog="llama-server", allow_abbrev=False)
    found.add_argument("-m", dest="model", required=True)
    found.add_argument("--mmproj")
    found.add_argument("--host", required=True)
    found.add_argument("--alias", required=True)
    for flag, name in NUMBERS.items():
        found.add_argument(flag, dest=name, type=int)
    found.add_argument("-ctk", choices=KV_TYPES)
    found.add_argument("-ctv", choices=KV_TYPES)
    found.add_argument("-fa", choices=FLASH)
    found.add_argument("-t", dest="threads", type=int)
    found.add_argument("-fit", choices=("on", "off"))
    found.add_argument("-dev")  # a Mac's one GPU is taken unnamed
    for flag in ("--no-mmproj", "--no-mmproj-offload", "--no-warmup", "--metrics"):
        found.add_argument(flag, action="store_true")
    return found


def parameters(words: list[str]) -> Any:
    """The wheel's parameters of a command line; ends the program where a flag isn't known."""
    import xllamacpp  # type: ignore[import-not-found,import-untyped,unused-ignore]

    given = parser().parse_args(words)
    made = xllamacpp.CommonParams()
    made.model.path, made.hostnames, made.model_alias = given.model, [given.host], {given.alias}
    if given.mmproj and not given.no_mmproj:
        made.mmproj.path = given.mmproj
    made.no_mmproj, made.mmproj_use_gpu = given.no_mmproj, not given.no_mmproj_offload
    for name in NUMBERS.values():
        if getattr(given, name) is not None:
            setattr(made, name, getattr(given, name))
    for name, kind in (("cache_type_k", given.ctk), ("cache_type_v", given.ctv)):
        if kind is not None:
            setattr(made, name, getattr(xllamacpp.ggml_type, f"GGML_TYPE_{kind.upper()}"))
    if given.fa is not None:
        kinds = xllamacpp.llama_flash_attn_type
        made.flash_attn_type = getattr(kinds, f"LLAMA_FLASH_ATTN_TYPE_{FLASH[given.fa]}")
    if given.threads is not None:
        made.cpuparams.n_threads = made.cpuparams_batch.n_threads = given.threads
    made.fit_params, made.warmup = given.fit == "on", not given.no_warmup
    if given.dev == "none":
        made.n_gpu_layers, made.mmproj_use_gpu, made.no_kv_offload = 0, False, True
    made.endpoint_metrics = given.metrics
    if key := os.environ.get("LLAMA_API_KEY"):
        made.api_keys = [key]
    return made


def main() -> None:
    """Serve until SIGTERM."""
    # Set before the library's threads are there, so that all of them leave the signals to us.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    import xllamacpp

    made = parameters(sys.argv[1:])
    ended: list[str] = []

    def serve() -> None:
        try:
            server = xllamacpp.Server(made)  # returns when it serves; unbound, it would stop
            threading.Event().wait()
            del server
        except Exception as error:  # what its C++ threw
            ended.append(f"error: {type(error).__name__}: {error}")
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=serve, daemon=True).start()
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    for line in ended:
        sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
    os._exit(1 if ended else 0)  # an ordinary end waits for the library's threads


if __name__ == "__main__":
    main()
