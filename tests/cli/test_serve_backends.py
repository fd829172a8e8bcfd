"""`snugvl serve --backend`: which engine it starts with what, what it says, what it refuses by name."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from training.gguf_export import export

from snugvl.backends.llamacpp.service import LlamacppEngine
from snugvl.backends.process.supervised import SupervisedEngine
from snugvl.backends.vllm.service import VllmEngine
from snugvl.backends.vllm.settings import VllmChoice
from snugvl.checkpoint.facts import ModelFacts
from snugvl.checkpoint.locate import POCKET, locate
from snugvl.cli import serve_plan
from snugvl.cli.app import run
from snugvl.diagnose.result import Cause, Change, Diagnosis
from snugvl.errors import EngineError, UnsupportedModel
from snugvl.hardware.machine import Machine
from snugvl.planner.solve import Candidate
from tests.cli.conftest import Served
from tests.planner.machines import GIB, machine
from tests.planner.models import qwen3_vl

pytestmark = pytest.mark.usefixtures("served")


def serve(*words: str) -> int:
    return run(["serve", "--port", "0", *words])


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a machine and a model in the place of this one's, with every engine installed."""

    def put(facts: ModelFacts, place: Machine) -> None:
        monkeypatch.setattr("snugvl.cli.options.machine_from", lambda choice: place)
        monkeypatch.setattr(serve_plan, "_named", lambda model: Candidate(facts))
        monkeypatch.setattr(serve_plan, "find_spec", lambda name: object())

    return put


def test_ours_is_named_with_the_reason(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--backend", "native"]):
        assert serve("pocket", *words) == 0
        assert served.services[-1]._start.choice.engine == "native"
    out = capsys.readouterr().out
    assert "Engine   native: our own engine runs the qwen3_vl family" in out
    assert "Engine   native: as asked for" in out


@pytest.mark.parametrize("words", [(), ("--backend", "transformers")])
def test_our_engine_is_told_of_the_machine_that_the_plan_is_for(
    served: Served, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    place, looked = replace(machine(8 * GIB), source="probed"), 0

    def look(_: object) -> Machine:
        nonlocal looked
        looked += 1
        return place

    monkeypatch.setattr("snugvl.cli.options.machine_from", look)
    assert serve("pocket", *words) == 0
    assert served.services[0]._start.choice.machine == (None if words else place)
    assert looked == 1


def test_transformers_gets_the_plan(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve("pocket", "--backend", "transformers", "--trust-remote-code", "--max-queue", "7") == 0
    choice = served.services[0]._start.choice
    assert (choice.engine, choice.trust_remote_code, choice.max_waiting) == ("transformers", True, 7)
    assert (choice.context, choice.placement) == (4096, ())
    assert "Engine   transformers: as asked for" in capsys.readouterr().out


def test_language_only_reaches_the_engine_and_frees_memory(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve("pocket", "--language-only") == 0
    assert served.services[0]._start.choice.language_only
    out = capsys.readouterr().out
    assert "weights: vision tower" not in out
    assert "Language only: without the vision tower" in out
    assert "tokens of prompt and answer" in out


@pytest.mark.parametrize("words", [(), ("--no-prefix-cache",)])
def test_the_prefix_cache_can_be_turned_off(served: Served, words: tuple[str, ...]) -> None:
    assert serve("pocket", *words) == 0
    assert served.services[0]._start.choice.prefix_cache is not bool(words)


@pytest.mark.parametrize(
    ("words", "graphs"), [((), None), (("--step-graphs",), True), (("--no-step-graphs",), False)]
)
def test_graphs_of_prompts_can_be_turned_off(
    served: Served, words: tuple[str, ...], graphs: bool | None
) -> None:
    assert serve("pocket", *words) == 0
    assert served.services[0]._start.choice.step_graphs is graphs


@pytest.mark.parametrize("mode", ["off", "ngram", "auto"])
def test_speculation_reaches_the_engine(served: Served, mode: str) -> None:
    assert serve("pocket", "--speculation", mode) == 0
    assert served.services[0]._start.choice.speculation == mode


def test_a_predictor_that_is_not_there_is_named(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve("pocket", "--speculation", "mtp") != 0
    assert "no multi-token predictor for --speculation mtp; use ngram" in capsys.readouterr().err
    assert not served.services


def test_a_streamed_tower_reaches_the_engine(
    served: Served, on: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    on(qwen3_vl("8B"), machine(12 * GIB))
    assert serve("Qwen/Qwen3-VL-8B-Instruct", "--tower", "streamed") == 0
    choice = served.services[0]._start.choice
    assert (choice.engine, choice.tower) == ("native", "streamed")
    assert choice.planned is not None
    assert choice.planned.settings.vision == "streamed"
    assert "of it stay in host memory; every picture waits" in capsys.readouterr().out


def test_an_embedding_in_host_memory_reaches_the_engine(
    served: Served, on: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    on(qwen3_vl("8B"), machine(12 * GIB))
    assert serve("Qwen/Qwen3-VL-8B-Instruct", "--embedding", "cpu") == 0
    choice = served.services[0]._start.choice
    assert (choice.engine, choice.embedding) == ("native", "cpu")
    assert choice.planned is not None
    assert choice.planned.settings.embedding == "cpu"
    assert "the embedding stays in host memory (" in capsys.readouterr().out


def test_layers_in_host_memory_are_placed_by_the_plan(
    served: Served, on: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    on(qwen3_vl("8B"), machine(8 * GIB))
    assert serve("Qwen/Qwen3-VL-8B-Instruct", "--weights", "bf16") == 0
    choice = served.services[0]._start.choice
    places = dict(choice.placement)
    assert choice.engine == "transformers"
    assert places["model.visual"] == places["model.language_model.layers.35"] == "cpu"
    assert places["model.language_model.layers.0"] == places["lm_head"] == "cuda:0"
    out = capsys.readouterr().out
    assert "cross PCI Express for every token" in out
    assert "nothing here holds the model whole" in out


def vllm_of(served: Served) -> VllmChoice:
    engine = served.services[-1]
    assert isinstance(engine, VllmEngine)
    return engine.choice


def test_a_vllm_that_is_not_installed_is_refused_before_anything_is_printed(
    served: Served, on: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on(qwen3_vl("2B", fp8=True), machine(8 * GIB))
    monkeypatch.setattr(serve_plan, "find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    for words, said in (
        ([], "pip install 'snugvl[vllm]'"),
        (["--vllm-command", "/no/such/vllm"], "no program '/no/such/vllm'"),
    ):
        assert serve("Qwen/Qwen3-VL-2B-Instruct-FP8", "--backend", "vllm", *words) == 1
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert said in err
    assert not served.settings


def test_vllm_gets_flags_rows_and_options(
    served: Served, on: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on(qwen3_vl("2B", fp8=True), machine(8 * GIB))
    monkeypatch.setattr("shutil.which", lambda name: name)
    words = [
        "--vllm-command",
        "/opt/my\\ env/bin/vllm --x",
        "--no-retry",
        "--sleep-after",
        "90",
        "--images",
        "2",
    ]
    words += ["--concurrency", "3", "--context", "4096", "--trust-remote-code", "--no-prefix-cache"]
    assert serve("Qwen/Qwen3-VL-2B-Instruct-FP8", "--backend", "vllm", *words) == 0
    choice = vllm_of(served)
    assert choice.model == "Qwen/Qwen3-VL-2B-Instruct-FP8"
    assert choice.command == ("/opt/my env/bin/vllm", "--x")
    assert (choice.retry, choice.sleep_after_s, choice.environment) == (False, 90, ())
    flags = dict(zip(choice.arguments, choice.arguments[1:], strict=False))
    assert flags["--max-model-len"] == "4096"
    assert json.loads(flags["--limit-mm-per-prompt"]) == {"image": 2, "video": 0}
    assert {"--trust-remote-code", "--no-enable-prefix-caching"} <= set(choice.arguments)
    rows = {row.name: row.planned_bytes or 0 for row in choice.planned}
    assert rows["weights: decoder"] > GIB
    asked = float(flags["--gpu-memory-utilization"]) * 8 * GIB
    planned = sum(rows.values()) - rows["CUDA context and libraries"]
    assert planned == pytest.approx(asked, rel=0.01)  # what is spare becomes KV cache
    assert choice.facts is not None
    assert (choice.facts.device, choice.facts.weights) == ("Test GPU", "fp8")
    assert "Engine   vllm: as asked for; fp8" in capsys.readouterr().out


def test_vllm_serves_with_the_room_that_a_server_needs(served: Served, on: Any) -> None:
    """Beyond comfort nothing is worth graphs and large steps."""
    on(qwen3_vl("2B", fp8=True), machine(8 * GIB))
    assert serve("m", "--backend", "vllm") == 0
    words = vllm_of(served).arguments
    flags = dict(pairwise(words))
    assert int(flags["--max-model-len"]) >= 8192
    assert (flags["--max-num-seqs"], flags["--max-num-batched-tokens"]) == ("16", "2048")
    assert json.loads(flags["--mm-processor-kwargs"])["max_pixels"] >= 2048 * 32 * 32
    assert "--enforce-eager" not in words
    assert serve("m", "--backend", "vllm", "--context", "20480") == 0
    words = vllm_of(served).arguments
    assert words[words.index("--max-model-len") + 1] == "20480"


def test_two_gpus_go_to_vllm_by_themselves(
    served: Served, on: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = machine(12 * GIB, gpus=3)
    cards = tuple(replace(gpu, uuid=f"GPU-{gpu.index}", position=gpu.index + 3) for gpu in pair.gpus[1:])
    on(qwen3_vl("8B"), replace(pair, gpus=cards))
    assert serve("Qwen/Qwen3-VL-8B-Instruct", "--weights", "bf16") == 0
    choice = vllm_of(served)
    assert choice.arguments[choice.arguments.index("--tensor-parallel-size") + 1] == "2"
    assert choice.environment == (("CUDA_DEVICE_ORDER", "PCI_BUS_ID"), ("CUDA_VISIBLE_DEVICES", "4,5"))
    assert choice.facts is not None
    assert choice.facts.gpu_uuids == ("GPU-1", "GPU-2")
    assert "vllm: 2 GPUs share what one can't hold" in capsys.readouterr().out


def test_what_is_not_installed_is_passed_over(
    served: Served, on: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on(replace(qwen3_vl("2B"), native=False, family="gemma3"), machine(16 * GIB))
    monkeypatch.setattr(serve_plan, "find_spec", lambda name: None if name == "vllm" else object())
    monkeypatch.setattr(serve_plan.shutil, "which", lambda name: None)
    assert serve("google/gemma-3-4b-it") == 0
    assert isinstance(served.services[-1], SupervisedEngine)
    assert "our engine does not run the gemma3 family" in capsys.readouterr().out
    assert serve("google/gemma-3-4b-it", "--vllm-command", "vllm") == 0
    assert vllm_of(served).command == ("vllm",)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--backend", "sglang"], "--backend"),
        (["--backend", "native", "--sleep-after", "5"], "--sleep-after is vLLM's alone (--backend native)"),
        (["--backend", "transformers", "--no-retry", "--vllm-command", "v"], "--vllm-command and --no-retry"),
        (["--backend", "native", "--no-retry"], "--no-retry is vLLM's and llama.cpp's alone"),
        (["--backend", "native", "--no-retry", "--sleep-after", "5"], "--sleep-after are vLLM's alone"),
        (["--backend", "native", "--vllm-command", "v", "--llamacpp-command", "l"], "say --backend vllm,"),
        (["--sleep-after", "5"], "say --backend vllm"),
        (["--backend", "native", "--trust-remote-code"], "is not for snugvl's own engine, which runs no"),
        (["--backend", "llamacpp", "--trust-remote-code"], "is not for llama.cpp, which runs no"),
        (["--trust-remote-code"], "runs no checkpoint's code"),
        (["--backend", "vllm", "--language-only", "--images", "2"], "leave one out"),
        (["--backend", "vllm", "--vllm-command", " "], "--vllm-command is empty"),
        (["--backend", "vllm", "--vllm-command", "'open"], "No closing quotation"),
        (["--attach", "http://127.0.0.1:1", "--backend", "native"], "takes a vLLM or a llama.cpp server"),
        (["--attach", "http://127.0.0.1:1", "--context", "2048"], "--context can't be chosen for a vLLM"),
        (["--attach", "http://h:1", "--language-only", "--no-retry"], "--no-retry and --language-only"),
        (["--attach", "http://h:1", "--no-prefix-cache"], "--no-prefix-cache can't be chosen for a vLLM"),
        (["--attach-api-key", "k"], "name it with --attach"),
        (["--llamacpp-command", "x", "--backend", "native"], "--llamacpp-command is llama.cpp's alone"),
        (["--llamacpp-command", ""], "--llamacpp-command is empty"),
        (["--backend", "llamacpp", "--dtype", "float16"], "--dtype is not for llama.cpp"),
        (["--backend", "llamacpp", "--attach", "http://h:1", "--context", "9"], "for a llama.cpp that runs"),
        (["--language-only", "--tower", "streamed"], "no vision tower to stream"),
        (["--backend", "vllm", "--tower", "streamed"], "--tower streamed is not for vLLM (--backend vllm)"),
        (["--backend", "vllm", "--step-graphs"], "--step-graphs is not for vLLM (--backend vllm)"),
        (["--backend", "vllm", "--no-step-graphs"], "--no-step-graphs is not for vLLM (--backend vllm)"),
        (["--attach", "http://h:1", "--step-graphs"], "--step-graphs can't be chosen for a vLLM"),
        (["--attach", "http://h:1", "--no-step-graphs"], "--no-step-graphs can't be chosen for a vLLM"),
        (["--attach", "http://h:1", "--tower", "resident"], "--tower can't be chosen for a vLLM"),
        (["--backend", "vllm", "--speculation", "mtp"], "--speculation mtp is not for vLLM (--backend vllm)"),
        (["--backend", "vllm", "--embedding", "cpu"], "--embedding cpu is not for vLLM (--backend vllm)"),
        (["--attach", "http://h:1", "--embedding", "cpu"], "--embedding can't be chosen for a vLLM"),
    ],
)  # fmt: skip
def test_what_does_not_go_together(
    served: Served, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve("pocket", *words) == 2
    assert said in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert not served.settings


def test_options_that_vllm_does_not_have(served: Served, on: Any, capsys: pytest.CaptureFixture[str]) -> None:
    on(qwen3_vl("2B"), machine(16 * GIB))
    assert serve("m", "--backend", "vllm", "--dtype", "float16", "--max-queue", "3") == 2
    assert "--dtype and --max-queue are not for vLLM" in " ".join(
        capsys.readouterr().err.replace("│", " ").split()
    )
    assert serve("m", "--backend", "vllm", "--weights", "int4") == 5
    assert "vLLM serves what is stored, bf16" in capsys.readouterr().err
    assert serve("m", "--backend", "vllm", "--sleep-after", "0") == 3
    assert "more than 0" in capsys.readouterr().err


def test_vllm_on_a_machine_without_a_gpu(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve("pocket", "--backend", "vllm", "--device", "cpu") == 5
    err = capsys.readouterr().err
    assert "there is no GPU" in err
    assert "--attach URL" in err


def test_a_kind_of_model_that_nobody_can_plan(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unknown(model: str) -> Candidate:
        raise UnsupportedModel(f"{model} is a Strange4Causal")

    monkeypatch.setattr(serve_plan, "_named", unknown)
    assert serve("strange") == 4
    assert "--backend transformers may run it" in capsys.readouterr().err
    assert serve("strange", "--backend", "vllm") == 4
    assert serve("strange", "--backend", "transformers") == 0
    assert "transformers, without a plan: strange is a Strange4Causal" in capsys.readouterr().out
    assert served.services[0]._start.choice.engine == "transformers"


def test_attach_needs_no_plan_and_no_model(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve("--attach", "http://127.0.0.1:8001", "--attach-api-key", "secret-key") == 0
    choice = vllm_of(served)
    assert (choice.attach, choice.api_key, choice.model) == ("http://127.0.0.1:8001", "secret-key", "")
    out = capsys.readouterr().out
    assert "vllm at http://127.0.0.1:8001, which is neither started nor ended" in out
    assert "secret-key" not in out
    assert serve("my-model", "--attach", "http://127.0.0.1:8001") == 0
    assert served.settings[1].names == ("my-model",)
    assert serve("--attach", "ftp://127.0.0.1") == 2
    assert "'--attach': 'ftp://127.0.0.1' is not the address of a server" in capsys.readouterr().err


def test_attach_to_garbage_is_one_line_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import http.server
    import threading

    from snugvl.server import run as runner

    monkeypatch.undo()
    assert runner.run is not None

    class Garbage(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>not a vLLM")

        def log_message(self, *words: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Garbage) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        code = serve("--attach", url)
        server.shutdown()
    err = capsys.readouterr().err
    assert code == EngineError.exit_code == 1
    assert url in err
    assert "Traceback" not in err


def diagnosis(kind: str, *changes: Change) -> Diagnosis:
    cause = Cause(kind, "certain", "because", ())  # type: ignore[arg-type]
    return Diagnosis(True, False, "vllm", "0.33", None, None, False, 1, 1, (cause,), changes=changes)


@pytest.mark.parametrize("kind", ["out_of_memory", "context", "weights", "tenants", "cuda_graphs"])
def test_a_failed_start_is_planned_again_with_less(served: Served, on: Any, kind: str) -> None:
    on(qwen3_vl("2B", fp8=True), machine(8 * GIB))
    assert serve("m", "--backend", "vllm") == 0
    before = vllm_of(served)
    assert before.replan is not None
    after = before.replan(diagnosis(kind), before)
    assert after is not None
    assert after.arguments != before.arguments
    old, new = (dict(zip(each.arguments, each.arguments[1:], strict=False)) for each in (before, after))
    share = (float(new["--gpu-memory-utilization"]), float(old["--gpu-memory-utilization"]))
    assert share[0] == share[1] if kind in ("context", "weights") else share[0] < share[1]
    if kind in ("out_of_memory", "cuda_graphs"):
        assert "--enforce-eager" in after.arguments
        assert int(new["--max-num-batched-tokens"]) == 512
    if kind == "context":  # the first thing that a plan gives up is speed, then pixels and context
        names = ("--max-model-len", "--max-num-batched-tokens", "--max-num-seqs")
        assert [int(new[name]) for name in names] <= [int(old[name]) for name in names]
    assert {row.name for row in after.planned} >= {"KV cache", "weights: decoder"}
    assert after.facts.plan != before.facts.plan
    assert after.facts.plan.settings["context"] == int(new["--max-model-len"])


def told(choice: Any) -> int:
    """Bytes of the plan that `/memory` will show."""
    return int(choice.facts.plan.total_bytes)


def test_what_is_not_memory_gets_the_diagnosis_own_changes(served: Served, on: Any) -> None:
    on(qwen3_vl("2B", fp8=True), machine(8 * GIB))
    assert serve("m", "--backend", "vllm") == 0
    before = vllm_of(served)
    assert before.replan is not None
    after = before.replan(diagnosis("dtype", Change("--dtype", None, "float16", "")), before)
    assert after is not None
    assert after.arguments == (*before.arguments, "--dtype", "float16")


def test_where_less_does_not_fit_there_is_no_second_try(served: Served, on: Any) -> None:
    on(qwen3_vl("4B"), machine(11 * GIB))
    assert serve("m", "--backend", "vllm") == 0
    before = vllm_of(served)
    assert before.replan is not None
    assert before.replan(diagnosis("out_of_memory"), before) is None


def launched(monkeypatch: pytest.MonkeyPatch, on: Any, log: str, *words: str) -> int:
    """The whole command over a vLLM that fails as a log did. No retry ever helps it."""
    from tests.backends.vllm.helpers import FAKE

    monkeypatch.undo()
    monkeypatch.setattr("snugvl.cli.options.machine_from", lambda choice: machine(8 * GIB))
    facts = replace(qwen3_vl("2B", fp8=True), name="m")
    monkeypatch.setattr(serve_plan, "_named", lambda model: Candidate(facts))
    fake = " ".join((*FAKE, f"log:{log}"))
    return serve("m", "--backend", "vllm", "--vllm-command", fake, *words)


@pytest.mark.parametrize("words", [[], ["--no-retry"]])
def test_a_start_that_fails_is_told_with_its_cause_and_a_way_out(
    monkeypatch: pytest.MonkeyPatch, on: Any, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert launched(monkeypatch, on, "vllm0191_cudagraph_4060.log", *words) == 5
    captured = capsys.readouterr()
    assert "Engine   vllm: as asked for" in captured.out
    assert "snugvl: vLLM is starting" in captured.err
    last = captured.err.splitlines()[-1]
    assert "CUDA graphs" in last
    assert "Change:" in last
    assert "Traceback" not in last
    assert ("starting again" in captured.err or "once more" in captured.err) == (not words)


def test_the_format_of_the_cache_reaches_the_engine(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, expected in (([], "auto"), (["--kv-cache", "fp8"], "fp8")):
        assert serve("pocket", *words) == 0
        assert served.services[-1]._start.choice.kv_cache == expected
    planned = served.services[-1]._start.choice.planned
    assert planned is not None
    assert planned.settings.kv == "fp8"
    assert serve("pocket", "--backend", "transformers", "--kv-cache", "fp8") != 0
    assert "--kv-cache fp8 is not for transformers" in capsys.readouterr().err


def test_what_a_saved_plan_was_asked_for_reaches_the_engine(served: Served, tmp_path: Path) -> None:
    """Its settings did, and what changes no byte was forgotten; what is said now comes first."""
    path = tmp_path / "plan.json"
    assert run(["plan", "pocket", "--speculation", "ngram", "--context", "512", "--save", str(path)]) == 0
    assert serve("--plan", str(path)) == 0
    choice = served.services[-1]._start.choice
    assert (choice.model, choice.speculation, choice.context) == ("pocket", "ngram", 512)
    assert serve("--plan", str(path), "--speculation", "off") == 0
    assert served.services[-1]._start.choice.speculation == "off"


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("gguf") / "pocket.gguf"
    export(str(locate(POCKET)), out)
    return str(out)


def test_a_gguf_goes_to_llama_cpp_with_the_plans_flags(
    served: Served, gguf: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_plan, "find_spec", lambda name: object())
    for words in ([], ["--backend", "llamacpp", "--context", "1024", "--concurrency", "2", "--no-retry"]):
        assert serve(gguf, "--device", "cpu", *words) == 0
        service = served.services[-1]
        assert isinstance(service, LlamacppEngine)
    printed = capsys.readouterr().out
    for why in ("GGUF files are its own", "as asked for"):
        assert f"Engine   llamacpp: {why}; F16, in a process of its own" in printed
    words = service.choice.arguments
    assert words[:2] == ("-m", gguf)
    assert {("-c", "2048"), ("-np", "2"), ("-dev", "none"), ("-fit", "off")} <= set(pairwise(words))
    assert words[2] == "--mmproj"
    assert not service.choice.retry
    assert sum(row.planned_bytes or 0 for row in service.choice.planned) == told(service.choice) > 20_000_000
    assert gguf.rpartition("/")[0] not in served.settings[-1].names[0]


def test_a_gguf_without_a_llama_cpp_is_refused_with_the_way_and_the_plan(
    served: Served, gguf: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_plan, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "/nowhere")
    assert serve(gguf, "--device", "cpu") != 0
    err = capsys.readouterr().err
    assert "for a GPU a llama-server in a build for it" in err, "the wheel knows none but Apple's"
    assert "pip install 'snugvl[llamacpp]'" in err
    assert f"llama-server -m {gguf}" in err
    assert serve(gguf, "--backend", "llamacpp") == 1
    assert "--llamacpp-command" in capsys.readouterr().err
    assert serve(gguf, "--backend", "llamacpp", "--llamacpp-command", "/nowhere/x") == 1
    assert "there is no program '/nowhere/x'" in capsys.readouterr().err


def test_attaching_to_a_llama_server(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve("--attach", "http://127.0.0.1:8001", "--backend", "llamacpp") == 0
    assert "llamacpp at http://127.0.0.1:8001, which is neither" in capsys.readouterr().out
    assert isinstance(served.services[-1], LlamacppEngine)
    assert served.services[-1].choice.attach == "http://127.0.0.1:8001"


def test_less_memory_is_planned_where_llama_cpp_ran_out(
    served: Served, gguf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_plan, "find_spec", lambda name: object())
    assert serve(gguf, "--device", "cpu") == 0
    choice = served.services[-1].choice
    assert choice.replan(diagnosis("checkpoint"), choice) == choice
    smaller = choice.replan(diagnosis("out_of_memory"), choice)
    assert smaller is not None
    assert smaller.arguments[:2] == ("-m", gguf)
    assert sum(row.planned_bytes or 0 for row in smaller.planned) > 0
