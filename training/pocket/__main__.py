"""The whole recipe in one command: assets, training, evaluation, the card's figures.

    python -m training.pocket --out .pocket/run --minutes 8

Steps whose results lie in the folder are left out, and a training that was cut off goes on where it was, so
the same command may be given again. With more than one GPU all of them train. `--scenes` says how many
scenes each set of pictograms is measured on.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from training.pocket import assets, pictograms

MEASURED = ("noto", "openmoji", "twemoji", "fluent")  # sets of pictograms that the card names
ROWS = ("questions", "caption facts", "scene facts", "F1@0.5", "mean IoU", "words")


def call(module: str, *options: object, processes: int = 1) -> None:
    """Run a module of the recipe. Ends the program with its status where it fails."""
    start = [sys.executable, "-m"]
    if processes > 1:
        start += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    done = subprocess.run([*start, f"training.pocket.{module}", *map(str, options)], check=False)
    if done.returncode:
        raise SystemExit(f"error: the step {module} failed; give the same command again to go on from it")


def train(out: Path, minutes: float, init: str) -> None:
    """Train, or go on with what was cut off, until the minutes are up."""
    options: list[object] = ["--out", out, "--minutes", minutes, "--word-share", 0.55]
    if (out / "state.pt").exists():
        options.append("--resume")
    elif init:
        options += ["--init", init, "--rate", 0.0016, "--warmup", 100, "--steady", 0.2]
    call("train", *options, processes=max(1, torch.cuda.device_count()))
    (out / "trained").touch()


def evaluate(out: Path, scenes: int) -> None:
    """Measure what has no figures yet: every set of pictograms, strips, then the edges of the world."""
    runs: dict[str, tuple[object, ...]] = {n: ("--pictograms", n, "--scenes", scenes) for n in MEASURED}
    runs["strips"] = ("--strips", "--scenes", max(1, scenes // 5))
    for name, options in runs.items():
        path = out / f"{name}.json"
        if not path.exists():
            call("evaluate", "--model", out / "model", *options, "--json", path)
    if not (out / "edges.json").exists():
        call("edges", "--model", out / "model", "--json", out / "edges.json")


def card(out: Path) -> str:
    """The figures as Markdown tables, for the model card."""
    sets: dict[str, Any] = {n: json.loads((out / f"{n}.json").read_text())["tiers"] for n in MEASURED}
    names = ("all", "shapes", "pictograms", "words", "unseen pairs", "beyond 6:1")
    tiers = [t for t in names if t in sets["noto"]]
    lines = ["| Noto | " + " | ".join(tiers) + " |", "|---" * (len(tiers) + 1) + "|"]
    lines += [
        f"| {row} | " + " | ".join(str(sets["noto"][t].get(row, "–")) for t in tiers) + " |"
        for row in ("scenes", *ROWS)
    ]
    lines += ["", "| pictograms of | licence | questions | caption facts | F1@0.5 |", "|---|---|---|---|---|"]
    for name, found in sets.items():
        source, tier = pictograms.SETS[name], found["pictograms"]
        label = f"{name} (never trained on)" if source.held_out else name
        figures = " | ".join(str(tier[row]) for row in ("questions", "caption facts", "F1@0.5"))
        lines.append(f"| {label} | {source.licence} | {figures} |")
    tiers = json.loads((out / "strips.json").read_text())["tiers"]
    slim = [t for t in tiers if t.endswith(":1")]
    lines += ["", "| strips | " + " | ".join(slim) + " |", "|---" * (len(slim) + 1) + "|"]
    lines += [
        f"| {row} | " + " | ".join(str(tiers[t].get(row, "–")) for t in slim) + " |"
        for row in ("scenes", *ROWS)
    ]
    edges = json.loads((out / "edges.json").read_text())
    shades, honest = edges["palettes"], edges["honesty"]
    lines += ["", f"Shades of palettes: {shades['all']} of {shades['questions']} questions."]
    lines.append(f"Honesty: {honest['right']} of {honest['questions']['all']} questions.")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m training.pocket",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=assets.PACK / "run")
    parser.add_argument("--minutes", type=float, default=8.0, help="of training")
    parser.add_argument("--init", default=str(assets.SHIPPED.parent), help="model folder; '': from scratch")
    parser.add_argument("--scenes", type=int, default=2000)
    args = parser.parse_args()
    if not (assets.PACK / "palettes.json").exists():
        call("assets")
    args.out.mkdir(parents=True, exist_ok=True)
    if not (args.out / "trained").exists():
        train(args.out, args.minutes, args.init)
    evaluate(args.out, args.scenes)
    (args.out / "card.md").write_text(text := card(args.out))
    print(text)


if __name__ == "__main__":
    main()
