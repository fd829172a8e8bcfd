"""Every way in which a vLLM fails: told with a cause and a way out, and nothing is left of it."""

import asyncio
import logging
import os
import re
import signal
import stat
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from snugvl.backends.child import life
from snugvl.backends.child.watch import MOVED_BYTES, WORK_SHARE, Activity, ProcessReading, readings
from snugvl.backends.llamacpp.service import LlamacppEngine
from snugvl.backends.llamacpp.settings import LlamacppChoice
from snugvl.backends.process.supervised import Supervision
from snugvl.backends.vllm.service import VllmEngine
from snugvl.backends.vllm.settings import VllmChoice
from snugvl.bench.measure import free_port
from snugvl.diagnose.result import Diagnosis
from snugvl.errors import DoesNotFit, EngineError, EngineUnavailable, RequestError
from tests.backends.children import QUICK, processes
from tests.backends.vllm.helpers import (
    FAKE,
    GARBAGE,
    HERE,
    answer,
    engine,
    fake,
    listening,
    say,
)
from tests.backends.waiting import ready
from tests.patience import NEVER_S
from tests.patience import until_async as until
from tests.server.fake import FakeService
from tests.server.live import live

pytestmark = pytest.mark.anyio
LOGS = HERE.parents[1] / "diagnose" / "logs"
# What it looks at is silent for so long, or a slow machine would be taken for it.
SHORT = Supervision(ping_s=0.05, snapshot_s=0.02, backoff_s=0.05, watchdog_s=0.3)


async def failure(choice: VllmChoice, supervision: Supervision = QUICK) -> Exception:
    """How a start fails."""
    async with engine(choice, supervision) as service:
        await until(lambda: service.health.state == "failed")
        assert service.failure is not None
        assert service.health.detail == str(service.failure)
        with pytest.raises(EngineUnavailable):
            await service.submit(say("anybody?"))
        assert not processes(service)
        return service.failure


async def test_there_is_no_such_command() -> None:
    error = await failure(fake(command=("/nowhere/vllm",)))
    assert "'/nowhere/vllm'" in str(error)
    assert "--vllm-command" in str(error)


async def test_no_other_user_reaches_it() -> None:
    """vLLM's own /metrics, /tokenize and /sleep ask for no key: it listens in a folder of ours, no port."""
    async with engine(fake("family")) as service:
        await ready(service)
        words = next(p for p in processes(service) if "fake_vllm.py" in " ".join(p.cmdline()[:3])).cmdline()
        door = Path(words[words.index("--uds") + 1])
        assert door.is_socket()
        assert stat.S_IMODE(door.parent.stat().st_mode) == 0o700
        assert not any(process.net_connections("inet") for process in processes(service))
    assert not door.parent.exists()


async def test_a_temporary_folder_of_too_long_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    assert "TMPDIR" in str(await failure(fake()))


async def test_vllm_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    error = await failure(VllmChoice("some/model"))
    assert "not installed" in str(error)
    assert "pip install 'snugvl[vllm]'" in str(error)


async def test_the_command_is_no_program(tmp_path: Path) -> None:
    script = tmp_path / "vllm"
    script.write_text("#!/nowhere/python\n")
    script.chmod(0o755)
    error = await failure(fake(command=(str(script),)))
    assert "can't be started" in str(error)


# What a start's log says → the kind of error, a word of its cause, the flag that is changed.
CAUSES = {
    "vllm033_q4bfp8_5060_wsl2.log": (DoesNotFit, "largest image", "--mm-processor-kwargs"),
    "vllm033_q2b_context_4060.log": (DoesNotFit, "context is too long", "--max-model-len"),
    "vllm033_q4bfp8_overfree_5060_wsl2.log": (DoesNotFit, "more than is free", "--gpu-memory-utilization"),
    "vllm0191_cudagraph_4060.log": (DoesNotFit, "CUDA graphs", "--max-num-seqs"),
    "vllm08_sampler_warmup_3060.log": (DoesNotFit, "warm-up", "--max-num-seqs"),
    "vllm033_unknown_flags.log": (EngineError, "does not know", "--disable-v1-engine"),
}


@pytest.mark.parametrize("log", CAUSES)
@pytest.mark.sample("vllm0191_cudagraph_4060.log", "vllm033_unknown_flags.log")
async def test_a_cause_is_found_and_the_flags_are_changed_once(
    log: str, caplog: pytest.LogCaptureFixture
) -> None:
    kind, words, flag = CAUSES[log]
    caplog.set_level(logging.WARNING, "snugvl.vllm")
    named = re.search(r"Qwen/[\w.-]+", (LOGS / log).read_text())
    model = named[0] if named else "m"
    arguments = ("--disable-v1-engine",) if "unknown" in log else ()
    async with engine(fake(f"log:{log}", model, arguments=arguments)) as service:
        await until(lambda: service.health.state == "failed")
        assert isinstance(service.failure, kind)
        assert words in str(service.failure)
        assert "second start" in str(service.failure)
        assert (flag in service.choice.arguments) == (flag != "--disable-v1-engine")
    (told,) = (text for text in caplog.messages if "trying once more" in text)
    assert flag in told


async def test_what_no_flag_cures_is_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    error = await failure(fake("log:vllm033_q8b_weights_oom_5060.log", "Qwen/Qwen3-VL-8B-Instruct"))
    assert isinstance(error, DoesNotFit)
    assert "weights alone are too big" in str(error)
    assert "snugvl plan" in str(error)
    assert not any("trying once more" in text for text in caplog.messages)


async def test_a_setting_that_is_refused_is_told_with_vllms_own_words() -> None:
    error = await failure(fake("log:vllm022_gpu_names.log"))
    assert isinstance(error, EngineError)
    assert "does not accept its settings: invalid literal for int() with base 10: 'GPU-1111" in str(error)
    assert "takes their numbers alone" in str(error)


async def test_the_changed_flags_help() -> None:
    async with engine(fake("log:vllm033_q2b_context_4060.log!--max-model-len")) as service:
        await ready(service)
        assert "--max-model-len" in service.choice.arguments
        assert service.health.restarts == 0
        assert await answer(service, "it works") == "it works"


async def test_without_retry_it_fails_at_once() -> None:
    async with engine(fake("log:vllm033_q2b_context_4060.log!--max-model-len", retry=False)) as service:
        await until(lambda: service.health.state == "failed")
        assert "--max-model-len" in str(service.failure)
        assert service.choice.arguments == ()


async def test_the_plan_makes_the_changes() -> None:
    asked: list[Diagnosis] = []

    def replan(diagnosis: Diagnosis, choice: VllmChoice) -> VllmChoice:
        asked.append(diagnosis)
        return replace(choice, arguments=("--max-model-len", "99"))

    async with engine(fake("log:vllm033_q2b_context_4060.log!99", replan=replan)) as service:
        await ready(service)
        assert service.choice.arguments == ("--max-model-len", "99")
    assert [diagnosis.causes[0].kind for diagnosis in asked] == ["context"]


async def test_a_plan_without_changes_gives_up() -> None:
    error = await failure(fake("log:vllm033_q2b_context_4060.log", replan=lambda *_: None))
    assert "context is too long" in str(error)


async def test_a_crash_at_the_start() -> None:
    error = await failure(fake("start:raise"))
    assert "no such thing as a model" in str(error)
    assert "vllm serve echo" in str(error)


async def test_a_start_that_hangs() -> None:
    for startup_s in (1, 10, 100):  # a busy machine may need more than the first for the first line
        error = await failure(fake("hang", startup_s=float(startup_s)))
        assert f"not ready after {startup_s} s" in str(error)
        if "Resolved" in str(error):
            break
    assert "Resolved architecture" in str(error)  # its last line


@pytest.mark.parametrize(
    ("behaviour", "last"),
    [("mute", "written no line"), ("hang", "Resolved architecture"), ("chatter", "still waiting")],
)
@pytest.mark.sample("mute-written no line")
async def test_a_start_that_does_nothing_more(behaviour: str, last: str) -> None:
    for idle_s in (0.8, 8.0, 80.0):  # a busy machine may need more than the first for the first lines
        error = await failure(fake(behaviour, "some/model", idle_s=idle_s))
        if last in str(error):
            break
    assert "computed, read and written nothing" in str(error)
    assert last in str(error)
    assert "snugvl pull some/model" in str(error)
    assert "HF_HUB_OFFLINE=1" in str(error)
    assert "VLLM_LOGGING_LEVEL=DEBUG vllm serve some/model" in str(error)


@pytest.mark.parametrize(("flag", "hint"), [("--tensor-parallel-size", "NCCL_P2P_DISABLE"), ("-O", "doctor")])
@pytest.mark.sample("--tensor-parallel-size-NCCL_P2P_DISABLE")
async def test_the_way_out_of_a_hang_depends_on_what_was_started(flag: str, hint: str) -> None:
    error = await failure(fake("mute", "pocket", idle_s=0.4, arguments=(flag, "2")))
    assert hint in str(error)
    assert "pull" not in str(error)


class Fed(Activity):
    """Looks when the processes have had their share of a busy machine; one that has no work won't use it."""

    def look(self, line: str, since_s: float) -> None:
        end = time.monotonic() + 20
        while not (self._worked() or self._serves()) and time.monotonic() < end:
            time.sleep(0.02)
        super().look(line, since_s)

    def _worked(self) -> bool:
        before = ProcessReading(0.0, 0)
        pairs = [(now, self._seen.get(pid, before)) for pid, now in readings(self._family()).items()]
        return (
            sum(now.cpu_s - then.cpu_s for now, then in pairs) >= WORK_SHARE * self._limit_s
            or sum(now.moved_bytes - then.moved_bytes for now, then in pairs) >= MOVED_BYTES
        )

    def _serves(self) -> bool:
        """Whether it listens by now: it has no work any more."""
        words = list[str]()
        for each in self._family():
            with suppress(psutil.Error):
                words += each.cmdline()
        return "--uds" in words and Path(words[words.index("--uds") + 1]).is_socket()


@pytest.mark.parametrize("behaviour", ["spin", "read"])
@pytest.mark.sample("read")
async def test_a_start_that_works_without_a_word_is_left_alone(
    behaviour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life, "Activity", Fed)
    async with engine(fake(behaviour, idle_s=0.4)) as service:
        await ready(service)
        assert await answer(service, "at last") == "at last"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("web", "GET /v1/models"),
        ("files", "GET /health gave 404"),
        ("openai", "GET /v1/models"),
        ("noise", "not HTTP"),
        ("mute", "hung at its start"),
    ],
)
@pytest.mark.sample("web-GET /v1/models", "openai-GET /v1/models")
async def test_garbage_on_its_port(kind: str, words: str) -> None:
    error = await failure(fake(command=(*GARBAGE, kind)), SHORT if kind == "mute" else QUICK)
    assert words in str(error)


async def test_a_child_that_ignores_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snugvl.backends.child.life.GRACE_S", 0.1)
    async with engine(fake("stubborn")) as service:
        await ready(service)
        assert len(processes(service)) == 4
    # `engine` sees to it that nobody is left.


async def test_a_nanny_that_is_told_to_end_takes_it_along() -> None:
    async with engine(fake("family")) as service:
        await ready(service)
        before = processes(service)
        assert service.pid is not None
        os.kill(service.pid, signal.SIGTERM)
        await until(lambda: not any(process.is_running() for process in before))
        await until(lambda: service.health.restarts == 1)


async def test_attached_to_nothing(caplog: pytest.LogCaptureFixture) -> None:
    error = await failure(VllmChoice(attach="http://127.0.0.1:9"))
    assert not caplog.messages  # `snugvl serve` prints the failure, once
    assert "nothing answers at http://127.0.0.1:9" in str(error)
    assert "vllm serve" in str(error)


@pytest.mark.parametrize("kind", ["web", "files", "openai", "noise", "mute"])
@pytest.mark.sample("web", "openai")
async def test_attached_to_garbage(kind: str) -> None:
    with listening(GARBAGE, kind) as url:
        error = await failure(VllmChoice(attach=url), SHORT if kind == "mute" else QUICK)
    assert url in str(error)
    assert "--attach" in str(error)


async def test_attached_to_a_server_of_ours() -> None:
    """It had been taken for a vLLM."""
    with live(FakeService()) as url:
        assert f"--attach: what answers at {url} is snugvl" in str(await failure(VllmChoice(attach=url)))
        llamacpp = LlamacppEngine(LlamacppChoice(attach=url), QUICK)
        await llamacpp.start()
        await until(lambda: llamacpp.health.state == "failed")
        assert f"--attach: what answers at {url} is snugvl" in str(llamacpp.failure)
        await llamacpp.close()


async def test_attached_to_a_vllm_that_goes_and_comes_back() -> None:
    port = free_port()
    choice = VllmChoice(attach=f"http://127.0.0.1:{port}/v1")
    with listening(FAKE, "echo", port=port):
        async with engine(choice) as service:
            await ready(service)
            assert service.capabilities is not None
            assert service.capabilities.model == "echo"
            assert service.pid is None
            assert await answer(service, "attached") == "attached"
    # Closing ended nothing: the block above left it running until here.
    with listening(FAKE, "echo", port=port):
        async with engine(choice) as service:
            await ready(service)
            with pytest.raises(EngineError):
                await answer(service, "crash")
            await until(lambda: "waiting for it" in service.health.detail)
            with listening(FAKE, "echo", port=port):
                await ready(service)
                assert await answer(service, "again") == "again"


async def test_attached_with_a_wrong_key_or_model() -> None:
    with listening(FAKE, "echo", key="secret") as url:
        assert "API key" in str(await failure(VllmChoice(attach=url, api_key="wrong")))
        assert "serves echo, not other" in str(
            await failure(VllmChoice("other", attach=url, api_key="secret"))
        )
        async with engine(VllmChoice("echo", attach=url, api_key="secret")) as service:
            await ready(service)


def test_settings_that_contradict_each_other() -> None:
    for match, wrong in {
        "name of the model to serve": {},
        "can't be combined with a command": {"attach": "http://x", "command": ("vllm",)},
        "URL, such as": {"attach": "localhost:8000"},
        "more than 0, not -1": {"model": "x", "sleep_after_s": -1.0},
    }.items():
        with pytest.raises(RequestError, match=match):
            VllmChoice(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["measure", "beside"])
async def test_background_work_ends_with_its_life_though_a_cancellation_is_dropped(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As anyio drops one that comes with an answer."""
    begun = asyncio.Event()

    async def deaf(self: VllmEngine, session: Any) -> None:
        begun.set()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(NEVER_S)
        raise ValueError("an answer that can't be read")

    before = asyncio.all_tasks()
    async with engine(fake()) as service:
        if where == "measure":  # of which a start waits for the first
            await ready(service)
        monkeypatch.setattr(VllmEngine, where, deaf)
        await ready(service)
        await begun.wait()
    await until(lambda: asyncio.all_tasks() <= before)


async def test_a_bug_in_measuring_ends_neither_that_nor_what_goes_on_beside(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its task ended, and nobody said so: no more snapshots, and the engine never slept."""
    measure, faults, beside = VllmEngine.measure, [0], [0]

    async def wrong(self: VllmEngine, session: Any) -> Any:
        faults[0] += 1
        if faults[0] % 2:
            raise KeyError("a bug")
        return await measure(self, session)

    async def goes_on(self: VllmEngine, session: Any) -> None:
        beside[0] += 1
        if beside[0] < 3:
            raise KeyError("another bug")

    monkeypatch.setattr(VllmEngine, "measure", wrong)
    monkeypatch.setattr(VllmEngine, "beside", goes_on)
    async with engine(fake()) as service:
        await ready(service)
        await until(lambda: service.snapshot is not None)
        assert service.snapshot is not None
        seen = service.snapshot.at
        await until(lambda: service.snapshot and service.snapshot.at > seen and beside[0] >= 3)
        assert service.health.restarts == 0
    assert caplog.text.count("measuring failed") == 1, "said once, as long as it is the same"
    assert caplog.text.count("what goes on beside requests failed") == 1
    assert beside[0] == 3, "what is done is not begun again"
