"""Where downloads are kept, as huggingface_hub's documented variables say, without importing it.

That import takes longer than a plan.
"""

import os
from collections.abc import Mapping
from pathlib import Path


def hub_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of the Hub's downloads, in huggingface_hub's own order of variables."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(name):
            return Path(os.path.expandvars(environ[name])).expanduser()
    home = environ.get("HF_HOME")
    if not home:
        home = str(Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    return Path(os.path.expandvars(home)).expanduser() / "hub"
