"""What an installation takes on the disk: the largest packages of this environment, and all of them.

python benchmarks/installed_size.py [--out FILE]
"""

import argparse
from importlib.metadata import distributions
from pathlib import Path

import machine

SHOWN = 8


def main() -> None:
    """Add up the files of each installed package."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    sizes: dict[str, int] = {}
    for package in distributions():
        paths = (Path(str(file.locate())) for file in package.files or ())
        sizes[package.name] = sum(path.stat().st_size for path in paths if path.is_file())
    for name in sorted(sizes, key=lambda each: -sizes[each])[:SHOWN]:
        print(f"{name:<28}{sizes[name] / 1e9:>7.2f} GB")
    print(f"{'all of ' + str(len(sizes)):<28}{sum(sizes.values()) / 1e9:>7.2f} GB")
    machine.save("installed_size", {"bytes": sizes}, arguments.out)


if __name__ == "__main__":
    main()
