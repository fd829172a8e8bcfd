"""Every way in which a llama.cpp fails: told with a cause and a way out, and nothing is left of it."""

import os
import signal
import sys
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from training.gguf_export import export

from snugvl.backends.child.service import Ending, understand
from snugvl.backends.llamacpp import settings
from snugvl.backends.llamacpp.service import LlamacppEngine
from snugvl.backends.llamacpp.settings import LlamacppChoice
from snugvl.backends.supervisor import Supervision
from snugvl.bench.measure import free_port
from snugvl.checkpoint.locate import POCKET, locate
from snugvl.core.messages import Request, user
from snugvl.core.sampling import SamplingParams
from snugvl.diagnose.result import Diagnosis
from snugvl.errors import CheckpointError, DoesNotFit, EngineError, EngineUnavailable, RequestError
from tests.backends.children import QUICK, processes, started
from tests.backends.contract.engines import read
from tests.backends.vllm.helpers import GARBAGE, listening
from tests.backends.vllm.real.install import missing
from tests.backends.waiting import ready
from tests.patience import until_async as until

pytestmark = pytest.mark.anyio
LOGS = Path(__file__).parents[2] / "diagnose" / "logs"
SHORT = Supervision(ping_s=0.05, snapshot_s=0.02, backoff_s=0.05, watchdog_s=0.3)
FLAGS = ("-c", "512", "-np", "1", "-fit", "off", "--cache-ram", "0", "-t", "1", "-dev", "none")


@pytest.fixture(scope="module")
def pocket(tmp_path_factory: pytest.TempPathFactory) -> LlamacppChoice:
    """Pocket without its tower on a real llama.cpp."""
    if not settings.find_spec(settings.WHEEL):
        missing("llama.cpp isn't installed: pip install xllamacpp")
    out = tmp_path_factory.mktemp("gguf") / "pocket.gguf"
    export(str(locate(POCKET)), out)
    return LlamacppChoice("pocket", ("-m", str(out), *FLAGS), command=None)


def engine(
    choice: LlamacppChoice, supervision: Supervision = QUICK
) -> AbstractAsyncContextManager[LlamacppEngine]:
    """See `started`."""
    return started(LlamacppEngine(choice, supervision))


async def failure(choice: LlamacppChoice) -> Exception:
    """How a start fails."""
    async with engine(choice) as service:
        await until(lambda: service.health.state == "failed")
        assert service.failure is not None
        with pytest.raises(EngineUnavailable):
            await service.submit(Request((user("anybody?"),)))
        assert not processes(service)
        return service.failure


def program(folder: Path, script: str) -> tuple[str, ...]:
    """A llama-server of a few lines of Python."""
    path = folder / "llama-server"
    path.write_text(f"#!{sys.executable} -S\nimport sys\n{script}\n")
    path.chmod(0o755)
    return (str(path),)


VERSION = "if '--version' in sys.argv: raise SystemExit(print('{}', file=sys.stderr) or 0)\n"
NEW = VERSION.format("version: 0.4.1-dev (build 10989, commit 38a5b42d9)")


async def test_there_is_no_such_command() -> None:
    error = await failure(LlamacppChoice("m", command=("/nowhere/llama-server",)))
    assert "'/nowhere/llama-server'" in str(error)
    assert "--llamacpp-command" in str(error)


async def test_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(settings, "find_spec", lambda name: None)
    assert "pip install 'snugvl[llamacpp]'" in str(await failure(LlamacppChoice("m")))


@pytest.mark.parametrize("said", ["version: 6123 (abc123)", "version: 0.1.0 (build 7000, commit abc)"])
async def test_it_is_too_old(tmp_path: Path, said: str) -> None:
    error = await failure(LlamacppChoice("m", command=program(tmp_path, VERSION.format(said))))
    assert f"b{settings.OLDEST} or later" in str(error)


def test_a_version_that_will_do_is_known(tmp_path: Path) -> None:
    found = settings.find(program(tmp_path, NEW))
    assert (found.version, found.guided) == ("b10989", False)


async def test_the_file_is_no_gguf(pocket: LlamacppChoice, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"no model" * 1000)
    error = await failure(LlamacppChoice("m", ("-m", str(wrong), *FLAGS)))
    assert "did not start" in str(error)
    assert "wrong.gguf" in str(error) or "magic" in str(error)


async def test_a_flag_that_it_does_not_know_is_named_and_left_out_once(pocket: LlamacppChoice) -> None:
    choice = LlamacppChoice("m", (*pocket.arguments, "--no-such"), retry=False)
    assert "--no-such" in str(await failure(choice))
    async with engine(replace(choice, retry=True)) as service:
        await ready(service)
        assert "--no-such" not in service.choice.arguments


def test_flags_that_are_ours_are_refused() -> None:
    with pytest.raises(RequestError, match="--port"):
        LlamacppEngine(LlamacppChoice("m", ("--port", "1")))


@pytest.mark.parametrize(
    ("log", "words"), [("llamacpp_weights.log", "weights"), ("llamacpp_context.log", "KV cache")]
)
async def test_out_of_memory_is_planned_again_once(tmp_path: Path, log: str, words: str) -> None:
    seen: list[str] = []

    def replan(diagnosis: Diagnosis, before: LlamacppChoice) -> LlamacppChoice:
        seen.extend(cause.kind for cause in diagnosis.causes[:1])
        return LlamacppChoice("m", ("-c", "128"), command=before.command)

    lines = f"print(open({str(LOGS / log)!r}).read()); raise SystemExit(1)"
    words_of = program(tmp_path, NEW + lines)
    error = await failure(LlamacppChoice("m", ("-c", "256"), command=words_of, replan=replan))
    assert isinstance(error, DoesNotFit)
    assert words in str(error)
    assert "(A second start, with -c 128, failed too.)" in str(error)
    assert len(seen) >= 1


async def test_a_start_that_hangs(tmp_path: Path) -> None:
    choice = LlamacppChoice("m", command=program(tmp_path, NEW + "import time\ntime.sleep(1000)"), idle_s=0.3)
    assert "hung at its start" in str(await failure(choice))


async def answered(service: LlamacppEngine, **sampling: Any) -> int:
    params = SamplingParams(**{"max_tokens": 3, "ignore_eos": True} | sampling)
    deltas = await read(await service.submit(Request(prompt="A red", sampling=params)))
    assert deltas[-1].usage is not None
    return deltas[-1].usage.completion_tokens


async def test_it_dies_while_it_answers_and_comes_back(pocket: LlamacppChoice) -> None:
    async with engine(pocket) as service:
        await ready(service)
        params = SamplingParams(max_tokens=500, ignore_eos=True)
        stream = await service.submit(Request(prompt="A red", sampling=params))
        reader = aiter(stream)
        await anext(reader)
        before = processes(service)
        serving = next(each for each in before if "wheel" in " ".join(each.cmdline()[:4]))
        os.kill(serving.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="SIGKILL"):
            async for _ in reader:
                pass
        await until(lambda: service.health.restarts == 1)
        assert await answered(service) == 3
        assert not any(process.is_running() for process in before)


@pytest.mark.extended
async def test_it_hangs_and_is_started_again(pocket: LlamacppChoice) -> None:
    async with engine(pocket, SHORT) as service:
        await ready(service)
        serving = next(each for each in processes(service) if "wheel" in " ".join(each.cmdline()[:4]))
        os.kill(serving.pid, signal.SIGSTOP)
        await until(lambda: "hung" in service.health.detail or service.health.restarts)
        await until(lambda: service.health.restarts >= 1)
        assert not serving.is_running()


async def test_attaching_to_nobody_and_to_something_else() -> None:
    nobody = await failure(LlamacppChoice(attach=f"http://127.0.0.1:{free_port()}"))
    assert "nothing answers" in str(nobody)
    assert "llama-server -m FILE.gguf" in str(nobody)
    with listening(GARBAGE, "html") as address:
        other = await failure(LlamacppChoice(attach=address))
    assert "llama.cpp server" in str(other)


@pytest.mark.parametrize("log", ["llamacpp_gguf_key", "llamacpp_projector", "llamacpp_mmproj_n_embd"])
def test_files_that_it_cannot_read_end_with_the_exit_code_of_model_files(log: str) -> None:
    lines = Path(f"tests/diagnose/logs/thread_{log}.log").read_text(encoding="utf-8").splitlines()
    ending = Ending("it ended", tuple(lines[1:]))
    failure = understand(ending, LlamacppChoice("m", ()), "llama.cpp", ("llama-server",))
    assert failure.error.exit_code == CheckpointError.exit_code
