"""llama.cpp on a small card: what the plan says beside what it takes, cell by cell, with the largest picture.

    PYTHONPATH=.:src python benchmarks/llamacpp_cells.py --server OUT/llama-server --tokenizer FOLDER \\
        --folder /tmp/ggufs --out cells.json [--seconds 560] [--cells 0 5 7] [--models 2B-Q4_K_M …] [--speed]

Of each model a GGUF of exact shape and its mmproj are written with random weights (`random_gguf.py`), used,
and removed. A ballast leaves 7,200 MiB of the card (`ballast.py`); `snugvl serve --backend llamacpp` plans,
starts the server and is asked about a photograph of twelve megapixels, which it scales down to the largest
picture of the plan, as many at once as there are slots, and then to read a text of nearly the whole context.
Taken is the peak of the server's process as NVML counts it, its CUDA context included. Cells that the file
of `--out` has are not run again but for those that failed; it is saved after each, and none is begun
that may not end within `--seconds`. `--cells` takes the numbers of cells, which are those of `cells()`.
Exit code 1: a cell failed, is more than 3 % and 96 MiB off, or was left out.

`--speed`: tokens a second instead, on the whole card, of llama.cpp and our engine on the same model, the
same GGUF files and the formats of ours; this needs `random_checkpoint.py`'s disk space, too. `--device cpu`
tries all of it without a GPU, where the ledger's count of host memory stands for NVML's.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from training.gguf_export import export

import machine
from ballast import MIB, Ballast
from driver_bytes import ProcessPeak
from random_gguf import fill
from serving import NAME, Served, question, serve
from snugvl.bench.load import Record
from snugvl.bench.workload import Manner, Workload, body
from snugvl.errors import SnugvlError

FREE_MIB = 7200
PHOTO = (4032, 3024)
ANSWER = 32
NEAR, NEAR_MIB = 0.03, 96
CELL_S = 30.0  # one that is begun has so long at least
FILE_RATE = 400e6  # bytes a second that are surely written
WORD_TOKENS = 1.05  # of a word of the load's, at most
PLACES = ("-ngl", "--n-cpu-moe", "--no-mmproj-offload", "-ub")  # flags that say what is where
SPEED_TOKENS = 128
SPEED_S = 40.0  # of one engine and format
SPEED = ("4B", "2B", "3.5-4B")
OURS = ("bf16", "fp8", "int8", "int4")
SIDE = 32  # pixels of a picture's token

MODELS = {
    "2B": "Qwen/Qwen3-VL-2B-Instruct",
    "4B": "Qwen/Qwen3-VL-4B-Instruct",
    "8B": "Qwen/Qwen3-VL-8B-Instruct",
    "3.5-4B": "Qwen/Qwen3.5-4B",
    "30B": "Qwen/Qwen3-VL-30B-A3B-Instruct",
    "0.8B": "Qwen/Qwen3.5-0.8B",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One start. `tokens`: of the largest picture; `kv`: None for what the plan chooses."""

    model: str
    kind: str
    context: int
    slots: int
    tokens: int
    kv: str = "auto"

    @property
    def file(self) -> str:
        """Its model, as `--models` names it."""
        return f"{self.model}-{self.kind}"

    @property
    def name(self) -> str:
        """What it is saved under."""
        return f"{self.file} {self.context}x{self.slots} {self.tokens} {self.kv}"


def cells() -> list[Cell]:
    """All, the files in an order of worth."""
    common = (
        (8192, 1, 1024, "bf16"),
        (16384, 1, 4096, "fp8"),
        (4096, 2, 2048, "bf16"),
        (32768, 1, 1024, "fp8"),
    )
    found = [
        Cell(model, kind, *each)
        for model, kind in (("4B", "Q4_K_M"), ("8B", "Q4_K_M"), ("3.5-4B", "Q4_K_M"), ("2B", "Q4_K_M"))
        for each in common
    ]
    found += [Cell("4B", "Q4_K_M", 8192, 4, 4096, "fp8"), Cell("2B", "Q4_K_M", 65536, 1, 8192, "fp8")]
    found += [Cell("3.5-4B", "Q4_K_M", 8192, 4, 1024, "bf16"), Cell("4B", "Q4_K_M", 2048, 1, 256)]
    for each in (common[0], (8192, 1, 4096, "fp8"), common[2]):  # 17 GB cross the link for each step
        found.append(Cell("30B", "Q4_K_M", *each))
    found += [
        Cell(model, "Q8_0", *each)
        for model in ("4B", "2B", "3.5-4B", "8B")
        for each in (common[0], common[1], common[2])
    ]
    return found


def make(name: str, folder: Path, tokenizer: Path) -> Path:
    """The file of a model such as 4B-Q8_0, with its mmproj beside it."""
    model, _, kind = name.rpartition("-")
    path = folder / f"{name}.gguf"
    if not path.exists():
        began = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        beside = export(MODELS[model], folder / "part", kind, tokenizer=tokenizer, fill=fill)
        assert beside is not None
        beside.rename(folder / f"mmproj-{name}.gguf")
        (folder / "part").rename(path)
        size, seconds = path.stat().st_size / MIB, time.monotonic() - began
        print(f"{path.name}: {size:,.0f} MiB in {seconds:.0f} s", flush=True)
    return path


def remove(name: str, folder: Path) -> None:
    """The same, away again."""
    for path in (folder / f"{name}.gguf", folder / f"mmproj-{name}.gguf"):
        path.unlink(missing_ok=True)


def options(cell: Cell, given: argparse.Namespace) -> list[str]:
    """Of `snugvl serve`."""
    words = ["--backend", "llamacpp", "--device", given.device, "--kv-cache", cell.kv, "--no-retry"]
    words += ["--llamacpp-command", given.server] if given.server else []
    words += ["--context", str(cell.context), "--concurrency", str(cell.slots)]
    words += ["--max-pixels", str(cell.tokens * SIDE**2)]
    return words + (["--memory", f"{given.free_mib}MiB"] if given.device == "cpu" else [])


def run(cell: Cell, path: Path, given: argparse.Namespace) -> dict[str, Any]:
    """One cell: its row."""
    row: dict[str, Any] = {"name": cell.name, **asdict(cell), "said": None}
    began = time.monotonic()
    photos = [question(PHOTO, ANSWER, seed) for seed in range(cell.slots)]
    text = body(
        Workload(None, int(cell.context * 0.95) - ANSWER, ANSWER, False, 0),
        Manner(NAME, tokens_per_word=WORD_TOKENS),
        0,
    )
    with Ballast(given.free_mib, given.device) as ballast:
        row["free_bytes"] = ballast.free_bytes
        try:
            with serve(str(path), options(cell, given)) as server, ProcessPeak((ballast.pid,)) as peak:
                told = server.memory()
                row |= {"ready_s": server.ready_s, "flags": flags(server), "start": told["ledger"]}
                answers = [server.ask(question(None, ANSWER, 99)), *server.ask_all(photos), server.ask(text)]
                ledger = server.memory()["ledger"]
                if ledger is None:  # it ended meanwhile
                    row["said"] = (
                        f"{next((a.message or a.error for a in answers if a.error), '')}\n{server.tail()}"
                    )
                    return row | {"seconds": time.monotonic() - began}
                row |= {"ledger": ledger, "answers": [answer(each) for each in answers]}
                row["planned_bytes"] = sum(each["planned_bytes"] or 0 for each in ledger["rows"])
                row["taken_bytes"] = max(peak.take() or 0, ledger["process_bytes"])
                row["said"] = next((each.message or each.error for each in answers if each.error), None)
        except SnugvlError as error:
            row["said"] = str(error)
    return row | {"seconds": time.monotonic() - began}


def flags(server: Served) -> dict[str, str]:
    """Those that llama-server was started with."""
    for process in server.process.children(recursive=True):
        words = process.cmdline()
        if "--image-max-tokens" in words and "-m" in words:
            words = words[words.index("-m") :]
            pairs = zip(words, [*words[1:], ""], strict=True)
            return {name: "" if value.startswith("-") else value for name, value in pairs if name[:1] == "-"}
    return {}


def answer(record: Record) -> dict[str, Any]:
    """What is kept of an answer."""
    return {
        "prompt_tokens": record.prompt_tokens, "output_tokens": record.output_tokens, "error": record.error,
        "first_token_s": record.first_token_s, "tokens_per_s": record.decode_tokens_per_s,
    }  # fmt: skip


def near(row: dict[str, Any]) -> bool:
    """Whether a cell ran and its plan is true."""
    if row["said"] is not None:
        return False
    off = row["taken_bytes"] - row["planned_bytes"]
    return bool(abs(off) <= max(NEAR * row["taken_bytes"], NEAR_MIB * MIB))


def show(row: dict[str, Any]) -> None:
    """A line, and the parts that are off."""
    if row["said"] is not None:
        print(f"{row['name']:<36}FAILED: {row['said'][-1500:]}", flush=True)
        return
    planned, taken = row["planned_bytes"], row["taken_bytes"]
    alone, photo, text = row["answers"][0], row["answers"][1], row["answers"][-1]
    words = [f"{name} {row['flags'][name]}" for name in PLACES if name in row["flags"]]
    print(
        f"{row['name']:<36}{planned / MIB:>8,.0f}{taken / MIB:>8,.0f}{planned / taken - 1:>+8.1%}"
        f"{(planned - taken) / MIB:>+6.0f} {'ok ' if near(row) else 'OFF'} ready {row['ready_s']:>5.1f} s, "
        f"{photo['prompt_tokens']} tokens in {photo['first_token_s'] or 0:.2f} s, {text['prompt_tokens']} in "
        f"{text['first_token_s'] or 0:.2f} s, then {alone['tokens_per_s'] or 0:.0f}/s; {' '.join(words)}",
        flush=True,
    )
    off = [
        f"{name} {plan / MIB:,.0f} for {real / MIB:,.0f}"
        for name, plan, real in (
            (part["name"], part["planned_bytes"] or 0, part["measured_bytes"] or 0)
            for part in row["ledger"]["rows"]
        )
        if abs(plan - real) > 4 * MIB
    ]
    if off:
        print(f"{'':<8}planned for taken, MiB: {'; '.join(off)}", flush=True)


class Results:
    """Rows by name, those of earlier calls among them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        found = json.loads(path.read_text())["rows"] if path.exists() else []
        self.rows: dict[str, dict[str, Any]] = {row["name"]: row for row in found}

    def add(self, row: dict[str, Any]) -> None:
        """Saved at once."""
        self.rows[row["name"]] = row
        whole = {"machine": machine.describe(), "rows": list(self.rows.values())}
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(whole, indent=1) + "\n")
        part.replace(self._path)


def bytes_of(name: str) -> float:
    """Of a file and its mmproj, about."""
    billions = float(name.split("B-")[0].rpartition("-")[2])
    return billions * 1e9 * (1.1 if name.endswith("Q8_0") else 0.65) + 1e9


def measure(given: argparse.Namespace, end: float) -> bool:
    """All cells that there is time for; whether all went well."""
    results, good = Results(given.out), True
    done = {name for name, row in results.rows.items() if row["said"] is None}
    every = cells()
    chosen = [every[each] for each in given.cells or range(len(every))]
    wanted = [cell for cell in chosen if not given.models or cell.file in given.models]
    left = [cell for cell in wanted if cell.name not in done]
    longest = CELL_S
    for index, cell in enumerate(left):
        path = given.folder / f"{cell.file}.gguf"
        needed = longest + (0 if path.exists() else bytes_of(cell.file) / FILE_RATE)
        if time.monotonic() + needed > end:
            print(f"no time for {cell.name}: it may take {needed:.0f} s", flush=True)
            continue
        row = run(cell, make(cell.file, given.folder, given.tokenizer), given)
        longest = max(longest, row["seconds"])
        results.add(row)
        show(row)
        good = good and near(row)
        if cell.file not in {each.file for each in left[index + 1 :]}:
            remove(cell.file, given.folder)
    rows = [results.rows[cell.name] for cell in wanted if cell.name in results.rows]
    fine = sum(near(row) for row in rows)
    print(
        f"{fine} of {len(rows)} cells are within 3 % or 96 MiB; {len(wanted) - len(rows)} are left",
        flush=True,
    )
    return good and len(rows) == len(wanted)


def compare(given: argparse.Namespace, end: float) -> bool:
    """Tokens a second of both engines; whether all went well."""
    results, good = Results(given.out), True
    for model in given.models or SPEED:
        ways: list[tuple[str, Path, list[str]]] = []
        for kind in ("Q4_K_M", "Q8_0"):
            words = ["--backend", "llamacpp", *(["--llamacpp-command", given.server] if given.server else [])]
            path = given.folder / f"{model}-{kind}.gguf"
            ways.append((f"{model} llama.cpp {kind}", path, words))
            ways.append((f"{model} snugvl GGUF {kind}", path, ["--backend", "native"]))
        ways += [(f"{model} snugvl {kind}", given.folder / model, ["--weights", kind]) for kind in OURS]
        for index, (name, path, words) in enumerate(ways):
            if results.rows.get(name, {"said": "not yet"})["said"] is None:
                continue
            if (
                time.monotonic() + SPEED_S + bytes_of(f"{model}-Q8_0") * 2 / FILE_RATE * (not path.exists())
                > end
            ):
                print(f"no time for {name}", flush=True)
                continue
            if path.suffix:
                make(path.stem, given.folder, given.tokenizer)
            elif not path.exists():
                script = Path(__file__).with_name("random_checkpoint.py")
                subprocess.run([sys.executable, script, MODELS[model], given.tokenizer, path], check=True)
            row = {"name": name, "said": None, **speed(str(path), [*words, "--device", given.device])}
            results.add(row)
            good = good and row["said"] is None
            print(f"{name:<28}{row['said'] or row['shown']}", flush=True)
            if path.suffix and path not in [later for _, later, _ in ways[index + 1 :]]:
                remove(path.stem, given.folder)
        shutil.rmtree(given.folder / model, ignore_errors=True)
    return good


def speed(model: str, words: list[str]) -> dict[str, Any]:
    """Of one request without and with a picture, each the best of three."""
    words += ["--context", "8192", "--concurrency", "1", "--max-pixels", str(1024**2)]
    found: dict[str, Any] = {"said": None}
    try:
        with serve(model, words) as server:
            for name, size in (("text", None), ("picture", (1024, 1024))):
                records = [server.ask(question(size, SPEED_TOKENS, seed)) for seed in range(4)][1:]
                found["said"] = found["said"] or next((each.message for each in records if each.error), None)
                if found["said"] is None:
                    best = max(records, key=lambda each: each.decode_tokens_per_s or 0.0)
                    found[name] = answer(best)
    except SnugvlError as error:
        found["said"] = str(error)
    if found["said"] is None:
        found["shown"] = "; ".join(
            f"{name}: first token {each['first_token_s'] * 1000:.0f} ms, {each['tokens_per_s']:.0f} tokens/s"
            for name, each in ((name, found[name]) for name in ("text", "picture"))
        )
    return found


def main() -> None:
    """The command line."""
    parser = machine.parser(__doc__)
    parser.set_defaults(out=machine.RESULTS / "llamacpp_cells.json")
    parser.add_argument("--server", default="", help="llama-server; without one, as snugvl finds it")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="of the files: 20 GB at most")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--cells", nargs="*", type=int)
    parser.add_argument("--models", nargs="*", help="such as 4B-Q8_0; with --speed such as 4B")
    parser.add_argument("--free-mib", type=int, default=FREE_MIB)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--speed", action="store_true")
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + given.seconds
    sys.exit(not (compare if given.speed else measure)(given, end))


if __name__ == "__main__":
    main()
