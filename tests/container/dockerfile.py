"""Reads our Dockerfile, and builds it in a folder with `chroot`, for machines without Docker.

    mmdebstrap --variant=apt bookworm ROOT        # what `FROM debian:bookworm-slim` gives
    python -m tests.container.dockerfile ROOT [--arg NAME=VALUE …]

Needs root. RUN and COPY steps are done in order, with ENV, USER and WORKDIR as they are then; at the end the
command is printed that starts what was built.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
STEP = re.compile(r"^([A-Z]+)\s+((?:.*\\\n)*.*)$", re.MULTILINE)


def steps(text: str) -> Iterator[tuple[str, str]]:
    """Each instruction with its arguments, continued lines joined."""
    plain = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for found in STEP.finditer(plain):
        yield found[1], re.sub(r"\\\n\s*", "", found[2]).strip()


@dataclass
class Build:
    """An image that is being built in the folder `root`."""

    root: Path
    arguments: dict[str, str]
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
    user: str = "root"
    folder: str = "/"
    entry: list[str] = field(default_factory=list)

    def step(self, kind: str, rest: str) -> None:
        """One instruction of the Dockerfile."""
        match kind:
            case "RUN":
                self.run(rest)
            case "COPY":
                *sources, target = rest.split()
                self.copy(sources, target)
            case "ENV":
                for pair in shlex.split(rest):
                    name, _, value = pair.partition("=")
                    self.environment[name] = value.replace("$PATH", self.environment["PATH"])
            case "ARG":
                name, _, value = rest.partition("=")
                self.environment[name] = self.arguments.get(name, value.strip('"'))
            case "USER":
                self.user = rest
                users = (self.root / "etc/passwd").read_text("utf-8").splitlines()
                self.environment["HOME"] = next(
                    line.split(":")[5] for line in users if line.split(":")[0] == rest
                )
            case "WORKDIR":
                self.folder = rest
            case "ENTRYPOINT" | "CMD":
                self.entry += json.loads(rest)

    def run(self, command: str) -> None:
        """A command in the image, of its user, with the machine's own way to packages."""
        print(f"--- {command}", flush=True)
        proxies = {
            k: v for k, v in os.environ.items() if k.startswith(("PIP_", "http", "HTTP", "SSL_", "REQ"))
        }
        line = f"cd {self.folder} && {command}"
        subprocess.run(
            ["chroot", f"--userspec={self.user}", str(self.root), "/bin/sh", "-c", line],
            env={**proxies, **self.environment}, check=True,
        )  # fmt: skip

    def copy(self, sources: list[str], target: str) -> None:
        """Files of the repository into the image: those that git knows."""
        for source in sources:
            known = subprocess.run(
                ["git", "ls-files", source], cwd=REPOSITORY, capture_output=True, text=True, check=True
            ).stdout.split()
            for name in known:
                inside = Path(name).relative_to(source) if (REPOSITORY / source).is_dir() else Path(name)
                place = self.root / target.lstrip("/") / inside
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(REPOSITORY / name, place)


def main() -> None:
    """Build what the Dockerfile says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=Path)
    parser.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE")
    chosen = parser.parse_args()
    build = Build(chosen.root, dict(pair.split("=", 1) for pair in chosen.arg))
    for kind, rest in steps((REPOSITORY / "Dockerfile").read_text("utf-8")):
        build.step(kind, rest)
    names = [f"{name}={value}" for name, value in build.environment.items() if name not in chosen.arg]
    start = ["chroot", f"--userspec={build.user}", str(build.root), "env", *names, *build.entry]
    print(shlex.join(start))


if __name__ == "__main__":
    sys.exit(main())
