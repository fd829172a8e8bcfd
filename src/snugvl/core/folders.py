"""Where downloads are kept, as huggingface_hub's documented variables say, without importing it: that import
takes longer than a plan. And where we keep what we have found out, by which of our sources, and how.
"""

import os
from collections.abc import Callable, Mapping
from functools import cache
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


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """`$XDG_CACHE_HOME/snugvl`, `%LOCALAPPDATA%\\snugvl` on Windows, else `~/.cache/snugvl`."""
    chosen = environ.get("XDG_CACHE_HOME") or (environ.get("LOCALAPPDATA") if os.name == "nt" else None)
    return (Path(chosen) if chosen else Path("~/.cache").expanduser()) / "snugvl"


@cache  # a start asks twice, and waits for it
def sources_digest(*rooms: str) -> str:
    """Digest of the package's sources in these folders: a cached finding holds for the same sources alone."""
    from hashlib import sha256  # with OpenSSL, which --help needs not

    package, digest = Path(__file__).parent.parent, sha256()
    for room in rooms:
        for path in sorted((package / room).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file whole or not at all; a link at `path` is replaced, not followed."""
    copy = path.with_name(f".{path.name}.{os.urandom(4).hex()}.new")
    try:
        write(copy)
        copy.replace(path)
    except BaseException:
        copy.unlink(missing_ok=True)
        raise
