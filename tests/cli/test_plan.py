"""`snugvl plan` as a user types it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from snugvl.cli.app import run

CARD = ["--gpu", "rtx-5060", "--os", "wsl2", "--held", "951MiB", "--offline"]
MODEL = "Qwen/Qwen3-VL-4B-Instruct-FP8"
BEST = "Qwen/Qwen3.5-4B"


def test_the_first_thing_a_user_types(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", MODEL, *CARD]) == 0
    out = capsys.readouterr().out
    assert f"{MODEL} fits NVIDIA GeForce RTX 5060 (7.96 GiB, WSL2), with snugvl's own engine" in out
    assert f"snugvl serve {MODEL}" in out
    assert "16,384-token images" in out


def test_the_best_of_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *CARD, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["choice"]["model"] == BEST
    assert len({entry["what"].split(" ")[0] for entry in plan["rejections"]}) > 3
    assert run(["plan", "--gpu", "rtx-5060", "--offline", "--images", "0", "--json"]) == 0


def test_who_names_the_8b_gets_it_with_a_leaner_tower(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "Qwen/Qwen3-VL-8B-Instruct", *CARD, "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["choice"]["settings"]
    assert (settings["weights"], settings["vision_weights"]) == ("int4", "int8")


def test_what_does_not_fit_is_exit_code_5(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "Qwen/Qwen3-VL-8B-Instruct-FP8", *CARD, "--quality", "fp8"]) == 5
    out = capsys.readouterr().out
    assert "does not fit" in out
    assert "weights would take 9.86 GiB alone" in out
    assert "in fp8 (embedding, lm_head and vision tower in int8), vision tower streamed, with snugvl" in out


def test_what_is_saved_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "deep" / "plan.json"
    assert run(["plan", MODEL, *CARD, "--save", str(saved)]) == 0
    assert capsys.readouterr().err.splitlines() == [
        f"snugvl: the plan is in {saved}; run it with: snugvl serve --plan {saved}",
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["no/such-model"], 4, "no/such-model"),
        (["--images", "-1"], 2, "--images must be at least 0, not -1"),
        (["--context", "0"], 2, "--context must be at least 1, not 0"),
        (["--held", "-3GiB"], 2, "-3GiB"),
        (["--gpu", "rtx-9999"], 2, "rtx-9999"),
        (["--quality", "best"], 2, "best"),
        (["--quality", "bf16", "--weights", "int4"], 2, "--quality bf16 refuses --weights int4"),
        (["--speculation", "ngram", "--backend", "vllm"], 2, "--speculation ngram is not for vLLM"),
        (
            ["--kv-cache", "fp8", "--backend", "transformers"],
            2,
            "--kv-cache fp8 is not for transformers (--backend transformers); say --backend native or vllm",
        ),
        (["--os", "macos"], 2, "no Mac has rtx-5060, but --os is macos"),
        (["--gpu", "m4", "--os", "linux"], 2, "m4 is a Mac's, but --os is linux"),
        (["--gpu", "none", "--gpus", "2", "--held", "0"], 2, "a machine with --gpu none"),
        (["--gpu", "m4", "--os", "macos", "--held", "1GiB"], 2, "m4 has host memory as its own"),
        ([MODEL, "--context", "300000"], 5, "262,144"),
    ],
)
def test_nonsense_gets_one_clear_line(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {word for word in arguments if word.startswith("--")}
    card = [
        word for pair in zip(CARD[:6:2], CARD[1:6:2], strict=True) if pair[0] not in names for word in pair
    ]
    assert run(["plan", *arguments, *card, "--offline"]) == code
    captured = capsys.readouterr()
    assert words in captured.out + captured.err
    assert "Traceback" not in captured.err
    assert captured.err.count("\n") <= 1


def test_no_torch_and_nothing_slow_is_imported() -> None:
    code = (
        "import sys\nfrom snugvl.cli.app import run\n"
        f"assert run({['plan', MODEL, *CARD]!r}) == 0\n"
        "bad = {'torch', 'transformers', 'numpy', 'PIL', 'rich.progress', 'huggingface_hub',"
        " 'importlib.metadata'}\n"
        "print('LOADED', sorted(bad & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED []"


def test_language_only_says_what_it_frees(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", MODEL, *CARD, "--language-only"]) == 0
    out = capsys.readouterr().out
    assert "Language only: without the vision tower 792 MiB of weights" in out
    assert "vision tower  " not in out
    assert f"snugvl serve {MODEL}" in out
    assert "--language-only" in out
    assert run(["plan", MODEL, *CARD, "--language-only", "--images", "2"]) == 2
    assert "takes no images; you asked for 2 a request" in capsys.readouterr().err
    assert run(["plan", *CARD, "--language-only", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["wishes"]["language_only"]


def test_a_streamed_tower_has_a_price(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", MODEL, *CARD, "--tower", "streamed"]) == 0
    out = capsys.readouterr().out
    assert "of it stay in host memory; every picture waits at least" in out
    assert "--tower streamed" in out
    assert run(["plan", MODEL, *CARD, "--tower", "streamed", "--language-only"]) == 2
    assert "none to stream" in capsys.readouterr().err
    assert run(["plan", MODEL, *CARD, "--tower", "streamed", "--backend", "vllm"]) == 2
    assert "--tower streamed is not for vLLM" in capsys.readouterr().err


def test_layers_in_host_memory_have_a_price_and_an_alternative(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "Qwen/Qwen3-VL-8B-Instruct", *CARD, "--ram", "32GiB", "--backend", "transformers"]
    assert run(words) == 0
    out = capsys.readouterr().out
    assert re.search(r"about [\d.]+ tokens/s \([\d.]+ to [\d.]+\), because", out)
    assert f"{BEST} in int8 (embedding, lm_head and vision tower too) fits whole and runs at about" in out
    assert run([*words[:-4], "--ram", "6GiB", *words[-2:]]) == 5
    assert "may be used" in capsys.readouterr().out


@pytest.mark.parametrize("backend", ["native", "transformers", "vllm"])
def test_an_engine_that_is_asked_for(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    small = "Qwen/Qwen3-VL-2B-Instruct-FP8"
    assert run(["plan", small, *CARD, "--backend", backend, "--verbose"]) == 0
    out = capsys.readouterr().out
    assert f"  {backend}: as asked for" in out
    assert ("Without snugvl\n  vllm serve" in out) == (backend == "vllm")
    assert run(["plan", small, *CARD, "--backend", "sglang"]) == 2


def test_a_long_wait_on_a_processor_is_told_with_what_shortens_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "Qwen/Qwen3-VL-2B-Instruct", "--gpu", "none", "--offline"]
    assert run(words) == 0
    (note,) = re.findall(
        r"begins after (\d+) s at the .* --max-pixels (\d+) it begins after (\d+) s", _flat(capsys)
    )
    assert run([*words, "--max-pixels", note[1]]) == 0
    quick = _flat(capsys)
    assert "at the earliest" not in quick
    first = re.search(r"first token after at least ([\d.]+) s", quick)
    assert first is not None
    assert round(float(first[1])) == int(note[2]) < int(note[0])
    assert run(["plan", "Qwen/Qwen3-VL-2B-Instruct", "--gpu", "rtx-5060", "--offline"]) == 0
    assert "at the earliest" not in _flat(capsys)


def _flat(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())
