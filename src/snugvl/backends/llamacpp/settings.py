"""Settings of a llama.cpp server, started or attached to."""

from dataclasses import dataclass

from snugvl.backends.child.settings import ChildChoice


@dataclass(frozen=True, slots=True)
class LlamacppChoice(ChildChoice):
    """A llama-server to launch, or with `attach` one that runs already: see `ChildChoice`.

    `arguments` are those of `llamacpp_flags` (`planner/engines/llamacpp/rules.py`), with the files (`-m`,
    `--mmproj`) first.

    Raises:
        RequestError: settings that contradict each other.
    """

    prefix_cache: bool = True

    def __post_init__(self) -> None:
        self.check("llama.cpp", chosen=False)
