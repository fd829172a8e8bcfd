"""A start of vLLM that does nothing any more: what may hold it up."""

import shlex
from pathlib import Path
from textwrap import shorten
from typing import Final

from snugvl.backends.child import flags
from snugvl.backends.child.log import Log
from snugvl.backends.vllm.settings import VllmChoice
from snugvl.checkpoint.locate import POCKET
from snugvl.errors import EngineError

MAX_QUOTED: Final = 200  # characters of a line of the log
LOADING: Final = 0.2  # of a start: its weights are there (see `log`)


def stall_error(how: str, log: Log, choice: VllmChoice) -> EngineError:
    """A start that does nothing any more. `how`: since when, in a clause."""
    last = f'its last line: "{shorten(log.last, MAX_QUOTED)}"' if log.last else "it has written no line"
    remote = choice.model != POCKET and not Path(choice.model).is_dir()
    sizes = ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size")
    if any(flags.value(choice.arguments, size) not in (None, "1") for size in sizes):
        hint = (
            "GPUs that can't reach each other directly stop like this: try the environment variable "
            "NCCL_P2P_DISABLE=1, or one GPU"
        )
    elif remote and (log.stage is None or log.stage.progress < LOADING):
        hint = (
            "it may wait for the network, or for another program that downloads the same model: run "
            f"`snugvl pull {choice.model}` first, then start with the environment variable HF_HUB_OFFLINE=1"
        )
    else:
        hint = "look whether other programs hold the GPU (snugvl doctor), and start again"
    debug = shlex.join(["VLLM_LOGGING_LEVEL=DEBUG", "vllm", "serve", choice.model, *choice.arguments])
    return EngineError(f"vLLM hung at its start: {how}; {last}; {hint}; its own command says more: {debug}")
