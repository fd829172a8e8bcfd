"""The user's command: taken apart, changed, put together."""

import shlex

from snugvl.diagnose.command import arguments, parse, suggestion
from snugvl.diagnose.explain import explain
from snugvl.diagnose.result import Change, known


def test_a_typed_command_is_kept_but_for_its_changes() -> None:
    command = parse(
        "HF_HOME=/d vllm serve org/m --max_model_len=9000 --enforce-eager --limit-mm-per-prompt '{\"image\": 2}'"  # noqa: E501
    )
    assert command is not None
    assert command.model == "org/m"
    changed = command.changed((Change("--max-model-len", "9000", "4096", ""), Change("A", None, "1", "")))
    assert shlex.split(changed) == [
        "HF_HOME=/d", "A=1", "vllm", "serve", "org/m", "--max-model-len", "4096", "--enforce-eager",
        "--limit-mm-per-prompt", '{"image": 2}',
    ]  # fmt: skip


def test_the_module_form_and_docker_are_commands_too() -> None:
    module = parse("python3 -m vllm.entrypoints.openai.api_server --model org/m --port 1")
    docker = parse("docker run --gpus all -p 8000:8000 vllm/vllm-openai:v0.33.0 --model org/m")
    assert module is not None
    assert docker is not None
    assert module.model == docker.model == "org/m"
    assert docker.start[-1] == "vllm/vllm-openai:v0.33.0"


def test_several_lines_are_one_command() -> None:
    log = "$ vllm serve org/m \\\n  --port 8000 \\\n  --max-model-len 4096\nOSError: [Errno 98] Address already in use\n"  # noqa: E501
    assert explain(log).command == "vllm serve org/m --port 8001 --max-model-len 4096"


def test_a_command_below_its_log_belongs_to_it() -> None:
    log = "(EngineCore pid=1) RuntimeError: UVA is not available\nI ran:\n$ vllm serve org/m\n"
    found = explain("(APIServer pid=1) INFO [api_server.py:1] vLLM API server version 0.30.0\n" + log)
    assert found.command == "VLLM_WSL2_ENABLE_PIN_MEMORY=1 vllm serve org/m"


def test_arguments_survive_what_is_no_python() -> None:
    assert arguments("{'model': 'org/m', 'max_model_len': 4096}") == {"model": "org/m", "max_model_len": 4096}
    cut = arguments("{'model': 'org/m', 'level': <Level.O2: 2>, 'max_model_len': 4096, 'served")
    assert cut["model"] == "org/m"
    assert cut["max_model_len"] == 4096
    assert arguments("{" * 5000) == {}


def test_flags_that_are_gone_say_what_to_use() -> None:
    assert "never existed" in suggestion("--disable-v1-engine")
    assert "--max-model-len is meant" in suggestion("--max-model-length")
    assert "leave it out" in suggestion("--frobnicate")
    assert not known()["removed"].keys() & set(known()["flags"])
