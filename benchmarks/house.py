"""Sizes of the source, and what one change of each kind touches: the tables of the redesign, counted.

    python benchmarks/house.py [--revision REV]

Each figure's definition is its function's docstring. With `--revision` the same is counted in another commit
of this repository, so two revisions are compared by one set of definitions. A decode step's files are only
counted in the working tree, as they need the code to run.
"""

import argparse
import ast
import io
import re
import subprocess
import tarfile
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TypeGuard

ROOT = Path(__file__).parents[1]
ENGINES = ("native", "transformers", "vllm", "llamacpp")
FAMILY = "qwen3_5"  # one that sees and has recurrent layers
FORMATS = re.compile(r"\bint[456]\b", re.IGNORECASE)
FORMAT_NAMES = re.compile(r"int[2-7]|nf4")  # of weights in few bits
WIDE_FORMATS = ("int8", "fp8", "bf16", "fp32")  # of weights, of heads and towers, of the KV cache
FORMAT_TABLE = "core/formats.py"  # the one place that may name them
DIALECT = re.compile(r"(Of|The same|Those)\b")
VAGUE = re.compile(r"(What|Whoever|Nobody)\b")
OPTIONS = ("kv_cache", "prefix_cache", "speculation", "max_pixels", "concurrency")
SMALL = 100  # lines of a module that is one of many small ones


class House:
    """The Python files of a revision, parsed where a figure needs it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.src = {path: path.read_text(encoding="utf-8") for path in sorted((root / "src").rglob("*.py"))}

    def trees(self, names: str = "") -> Iterator[tuple[Path, ast.Module]]:
        """The modules of src, parsed; of `names`, a pattern, those that have one as a literal."""
        having = re.compile(names and f'"({names})"')
        return ((path, ast.parse(text)) for path, text in self.src.items() if having.search(text))

    def lines(self, folder: str) -> int:
        """Lines of all Python files below a folder, empty ones and comments included."""
        files = (self.root / folder).rglob("*.py")
        return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)

    def name(self, path: Path) -> str:
        """A file's path below `src/snugvl`."""
        return path.relative_to(self.root / "src" / "snugvl").as_posix()

    def small(self) -> int:
        """Modules of src under 100 lines, packages' `__init__.py` included."""
        return sum(len(text.splitlines()) < SMALL for text in self.src.values())

    def classes_twice(self) -> list[str]:
        """Names of top-level classes that two or more modules of src define."""
        names = Counter(re.findall(r"^class (\w+)", "\n".join(self.src.values()), re.MULTILINE))
        return sorted(name for name, count in names.items() if count > 1)

    def docstrings(self) -> Iterator[tuple[str, str]]:
        """Every docstring of src: where it stands (file and line), and its first line."""
        for path, tree in self.trees():
            for node in ast.walk(tree):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    text = ast.get_docstring(node)
                    if text:
                        yield f"{self.name(path)}:{getattr(node, 'lineno', 1)}", text.splitlines()[0]

    def docstrings_like(self, pattern: re.Pattern[str]) -> list[str]:
        """Docstrings that begin with the pattern."""
        return [f"{where} {line}" for where, line in self.docstrings() if pattern.match(line)]

    def engine_comparisons(self) -> list[str]:
        """Comparisons (`==`, `!=`, `in`, `is`, a `match` case) with an engine's name, outside the folders of
        the engines (in `backends/` and in `planner/engines/`), in any module of src."""
        found: list[str] = []
        for path, tree in self.trees("|".join(ENGINES)):
            name = self.name(path)
            if re.match(rf"(backends|planner/engines)/({'|'.join(ENGINES)}|child|process)/", name):
                continue
            found.extend(f"{name}:{node.lineno}" for node in ast.walk(tree) if _asks_for(node, ENGINES))
        return found

    def format_names(self) -> list[str]:
        """Values in the code of src that are the name of a weight format of few bits, whatever is done with
        them, outside of the table of formats. Texts and constants of other names don't count."""
        return [
            f"{self.name(path)}:{node.lineno}"
            for path, tree in self.trees(FORMAT_NAMES.pattern)
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and FORMAT_NAMES.fullmatch(str(node.value))
            and self.name(path) != FORMAT_TABLE
        ]

    def wide_comparisons(self) -> list[str]:
        """Comparisons with the name of a wider format, of weights or of something else, in any module."""
        return [
            f"{self.name(path)}:{node.lineno}"
            for path, tree in self.trees("|".join(WIDE_FORMATS))
            for node in ast.walk(tree)
            if _asks_for(node, WIDE_FORMATS)
        ]

    def files_with(self, pattern: re.Pattern[str]) -> list[str]:
        """Modules of src whose code or text has the pattern."""
        return [self.name(path) for path, text in self.src.items() if pattern.search(text)]


def _asks_for(node: ast.AST, names: tuple[str, ...]) -> TypeGuard[ast.expr]:
    """Whether a node compares something with one of the names."""
    if isinstance(node, ast.Compare):
        return any(_has(each, names) for each in (node.left, *node.comparators))
    return isinstance(node, ast.MatchValue) and _has(node.value, names)


def _has(node: ast.expr, names: tuple[str, ...]) -> bool:
    """Whether an operand is one of the names, or a literal collection of constants with one in it."""
    if isinstance(node, ast.Tuple | ast.Set | ast.List):
        return any(_has(each, names) for each in node.elts)
    return isinstance(node, ast.Constant) and node.value in names


def decode_step() -> list[tuple[str, int]]:
    """Modules of which a function runs between two tokens of a greedy answer, with their lines: pocket on the
    CPU, all threads that snugvl starts; the network itself (`models/`, `layers/`) is left out."""
    import snugvl

    source = f"{Path(snugvl.__file__).parent}/"
    seen: set[str] = set()
    looking = False

    def profile(frame: FrameType, event: str, _: object) -> None:
        if looking and event == "call" and frame.f_code.co_filename.startswith(source):
            seen.add(frame.f_code.co_filename.removeprefix(source))

    threading.setprofile(profile)  # of threads that start from now on
    try:
        with snugvl.load("pocket", device="cpu") as model:
            stream = model.stream_ask(ROOT / "examples/images/shapes.png", "Describe the picture in detail.")
            for number, _ in enumerate(stream):
                looking = 4 <= number < 30  # the prompt is through, and the answer goes on
    finally:
        threading.setprofile(None)
    names = [name for name in sorted(seen) if not name.startswith(("models/", "layers/"))]
    return [(name, len(Path(source, name).read_text(encoding="utf-8").splitlines())) for name in names]


def table(house: House) -> list[tuple[str, str]]:
    """Rows: what is counted, and the figure."""
    name = re.compile(rf"\b{FAMILY}|Qwen35|Qwen3_5")
    compared = house.engine_comparisons()
    planner = [where for where in compared if where.startswith("planner/")]
    return [
        ("lines of src", f"{house.lines('src'):,}"),
        ("modules of src", f"{len(house.src)}"),
        (f"modules of src under {SMALL} lines", f"{house.small()}"),
        ("lines of tests", f"{house.lines('tests'):,}"),
        ("lines of benchmarks", f"{house.lines('benchmarks'):,}"),
        ("class names that occur twice", f"{len(house.classes_twice())}"),
        ("docstrings that begin with Of, The same, Those", f"{len(house.docstrings_like(DIALECT))}"),
        ("docstrings that begin with What, Whoever, Nobody", f"{len(house.docstrings_like(VAGUE))}"),
        ("comparisons with an engine's name, outside engines' folders", f"{len(compared)}"),
        ("of these in planner/", f"{len(planner)}"),
        (f"modules that name the family {FAMILY}", f"{len(house.files_with(name))}"),
        ("modules that name int4, int5 or int6", f"{len(house.files_with(FORMATS))}"),
        ("values that are such a name, outside of their table", f"{len(house.format_names())}"),
        ("comparisons with int8, fp8, bf16, fp32", f"{len(house.wide_comparisons())}"),
        *(
            (f"modules that name the option {option}", f"{len(house.files_with(_option(option)))}")
            for option in OPTIONS
        ),
    ]


def _option(name: str) -> re.Pattern[str]:
    """An option as Python or the shell spells it."""
    return re.compile(rf"\b{name}\b|--{name.replace('_', '-')}\b")


def checked_out(revision: str, folder: Path) -> Path:
    """A revision's files, below a folder."""
    packed = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--revision", help="count this commit instead of the working tree")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        house = House(checked_out(given.revision, Path(folder)) if given.revision else ROOT)
        for what, figure in table(house):
            print(f"{what:<62}{figure:>10}")
    if not given.revision:
        step = decode_step()
        own = [each for each in step if each[0].startswith("engine/")]
        for what, found in (("a decode step, without the network", step), ("these in engine/", own)):
            print(f"{f'modules of {what}':<62}{len(found):>10}")
            print(f"{'their lines':<62}{sum(lines for _, lines in found):>10,}")
        print(*(f"    {name} {lines}" for name, lines in step), sep="\n")


if __name__ == "__main__":
    main()
