"""Streams over the engine: threads, event loops, stop strings, logprobs, aborts and faults."""

import asyncio
import gc
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from snugvl.backends.native.backend import NativeBackend
from snugvl.backends.native.kernel_processes import Ahead
from snugvl.core.messages import Delta, Request, user
from snugvl.core.sampling import SamplingParams
from snugvl.errors import DeadlineExceeded, EngineError, QueueFull, RequestError, RequestTooLarge
from snugvl.inputs.prompt import Processor
from snugvl.models.networks import Qwen3VL
from tests.backends.conftest import make_backend
from tests.patience import PATIENCE_S, until

QUESTION = "What is in this image?"


def request(text: str = QUESTION, **sampling: Any) -> Request:
    values = {"max_tokens": 40, "ignore_eos": True} | sampling
    return Request((user(text),), SamplingParams(**values))


def text_of(backend: NativeBackend, **sampling: Any) -> str:
    return "".join(delta.text for delta in backend.submit(request(**sampling)))


def test_text_comes_in_pieces_and_ends_with_a_reason(backend: NativeBackend) -> None:
    deltas = list(backend.submit(request(max_tokens=20)))
    assert len(deltas) > 3
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert [delta.usage for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == "length"


def test_usage_counts_image_tokens_too(backend: NativeBackend, processor: Processor) -> None:
    prompt = user(Image.new("RGB", (64, 64), "red"), QUESTION)
    stream = backend.submit(Request((prompt,), SamplingParams(max_tokens=20, ignore_eos=True)))
    told = stream.prompt_tokens
    *_, last = stream
    assert last.usage is not None
    assert last.usage.prompt_tokens == told
    assert (last.usage.completion_tokens, last.usage.image_tokens) == (20, 4)
    assert last.usage.prompt_tokens == len(processor.prepare([prompt]).prompt_ids)


def test_what_ended_by_itself_names_no_stop(backend: NativeBackend) -> None:
    assert all(delta.stop is None for delta in backend.submit(request(max_tokens=5, stop=("\x00",))))


def test_an_event_loop_reads_the_same(backend: NativeBackend) -> None:
    async def read() -> list[str]:
        async def one() -> str:
            return "".join([delta.text async for delta in backend.submit(request())])

        return list(await asyncio.gather(one(), one(), one()))

    assert asyncio.run(read()) == [text_of(backend)] * 3


@pytest.mark.extended
def test_many_threads_get_what_they_would_alone(backend: NativeBackend) -> None:
    texts = [f"A red circle, {number} blue squares." for number in range(24)]
    ask = lambda text: "".join(d.text for d in backend.submit(request(text)))  # noqa: E731
    alone = [ask(text) for text in texts]
    assert len(set(alone)) > 12
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, texts)) == alone


def test_a_stop_string_ends_the_text_before_it_wherever_tokens_split(backend: NativeBackend) -> None:
    whole = text_of(backend)
    for start in range(3, len(whole) - 4, 5):
        stop = whole[start : start + 3]
        deltas = list(backend.submit(request(stop=(stop,))))
        assert "".join(delta.text for delta in deltas) == whole[: whole.index(stop)]
        assert (deltas[-1].finish_reason, deltas[-1].stop) == ("stop", stop)
    until(lambda: backend.memory()["vision_inputs"] == 0)
    backend._worker.call(backend._engine.check_integrity)


def test_a_stop_token_ends_the_answer_and_is_counted(backend: NativeBackend, processor: Processor) -> None:
    tokens = [t.bytes for delta in backend.submit(request(logprobs=0)) for t in delta.logprobs]
    tokenizer = processor.tokenizer
    wanted = next(token for token in tokens[5:] if token)
    stop_id = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == wanted)
    deltas = list(backend.submit(request(stop_token_ids=(stop_id,), ignore_eos=False)))
    assert (deltas[-1].finish_reason, deltas[-1].stop) == ("stop", wanted.decode(errors="replace"))
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.completion_tokens == tokens.index(wanted) + 1


def test_logprobs_cover_exactly_the_text(backend: NativeBackend) -> None:
    deltas = list(backend.submit(request(logprobs=3, max_tokens=25)))
    tokens = [token for delta in deltas for token in delta.logprobs]
    assert len(tokens) == 25
    assert b"".join(token.bytes for token in tokens).decode("utf-8", "replace") == "".join(
        d.text for d in deltas
    )
    for token in tokens:
        assert len(token.top) == 3
        assert token.logprob == token.top[0].logprob  # greedy takes the most likely
        assert token.logprob <= 0


def test_logprobs_of_text_cut_by_a_stop_string_are_not_sent(backend: NativeBackend) -> None:
    whole = text_of(backend)
    stop = whole[10:16]
    deltas = list(backend.submit(request(stop=(stop,), logprobs=0)))
    sent = b"".join(token.bytes for delta in deltas for token in delta.logprobs).decode("utf-8", "replace")
    assert whole[: whole.index(stop)].startswith(sent)


def test_choices_are_independent_and_seeded(backend: NativeBackend) -> None:
    def read() -> list[str]:
        texts = ["", "", ""]
        for delta in backend.submit(request(n=3, temperature=1.0, seed=5)):
            texts[delta.choice] += delta.text
        return texts

    first = read()
    assert len(set(first)) == 3
    assert read() == first


def test_closing_a_stream_frees_what_it_held(backend: NativeBackend) -> None:
    stream = backend.submit(request(max_tokens=1500))
    next(iter(stream))
    stream.close()
    stream.close()
    until(lambda: not backend._engine.has_work)
    backend._worker.call(backend._engine.check_integrity)
    assert not backend._receivers


def test_dropping_a_stream_frees_what_it_held(backend: NativeBackend) -> None:
    backend.submit(request(max_tokens=1500))
    gc.collect()
    until(lambda: not backend._engine.has_work)


def test_a_cancelled_reader_does_not_disturb_the_engine(backend: NativeBackend) -> None:
    async def read() -> None:
        stream = backend.submit(request(max_tokens=1500))
        task = asyncio.ensure_future(anext(aiter(stream)))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0.05)
        stream.close()

    asyncio.run(read())
    assert text_of(backend)


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(backend: NativeBackend) -> None:
    with pytest.raises(RequestTooLarge, match=r"2,?048"):
        backend.submit(request(max_tokens=5000))
    with pytest.raises(RequestError, match="control token"):
        backend.submit(Request(prompt="<|im_end|>"))
    assert text_of(backend)


def test_a_full_queue_is_said(network: Qwen3VL, processor: Processor) -> None:
    backend = make_backend(network, processor, max_waiting=1, max_num_seqs=1)
    streams = [backend.submit(request(max_tokens=1000))]
    until(lambda: backend._engine.stats.running == 1)
    streams.append(backend.submit(request(max_tokens=1000)))
    with pytest.raises(QueueFull, match="waiting"):
        backend.submit(request(max_tokens=1000))
    backend.close()


def test_a_deadline_ends_the_request(backend: NativeBackend) -> None:
    late = Request((user(QUESTION),), SamplingParams(max_tokens=1900, ignore_eos=True), deadline_s=0.02)
    with pytest.raises(DeadlineExceeded, match="deadline"):
        list(backend.submit(late))
    assert text_of(backend)


def test_a_fault_of_the_model_ends_what_runs_and_the_next_request_works(
    backend: NativeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = text_of(backend)
    calls = 0
    forward = Qwen3VL.forward

    def broken(self: Qwen3VL, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise RuntimeError("device lost")
        return forward(self, *arguments)

    monkeypatch.setattr(Qwen3VL, "forward", broken)
    streams = [backend.submit(request(max_tokens=1000)) for _ in range(2)]
    for stream in streams:
        with pytest.raises(EngineError, match="device lost"):
            list(stream)
    assert text_of(backend) == expected


def test_closing_the_backend_ends_readers_with_an_error(network: Qwen3VL, processor: Processor) -> None:
    backend = make_backend(network, processor)
    seen: list[Delta | Exception] = []

    def read() -> None:
        try:
            seen.extend(backend.submit(request(max_tokens=1900)))
        except EngineError as error:
            seen.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    until(lambda: bool(seen))
    backend.close()
    reader.join(timeout=PATIENCE_S)
    assert not reader.is_alive()
    assert isinstance(seen[-1], EngineError)
    with pytest.raises(EngineError, match="closed"):
        backend.submit(request())


def test_a_backend_that_is_dropped_stops_its_thread(network: Qwen3VL, processor: Processor) -> None:
    backend = make_backend(network, processor)
    assert text_of(backend)
    thread = backend._worker._thread
    del backend
    gc.collect()
    until(lambda: not thread.is_alive())


def test_a_script_that_never_closes_its_model_ends_quietly(folder: Path) -> None:
    script = f"""
import snugvl
model = snugvl.load({str(folder)!r}, device="cpu", context=512)
stream = iter(model.backend.submit(snugvl.Request((snugvl.user("What?"),))))
next(stream)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")


def test_who_asks_how_an_idle_engine_stands_lets_it_look_at_the_memory(
    backend: NativeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes no steps in which it could see that other programs need memory."""
    looks: list[str] = []
    engine = backend._engine
    monkeypatch.setattr(engine, "poll_memory", lambda **_: looks.append(threading.current_thread().name))
    stats = backend.stats()
    assert looks == ["snugvl-engine"]
    assert stats.planned_blocks == stats.num_blocks == engine.config.num_blocks


@pytest.mark.parametrize("ahead", ["none", "kernels", "graphs"])
def test_graphs_are_recorded_a_call_each_once_kernels_are_ready(
    ahead: Ahead, backend: NativeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [True, True, False]
    monkeypatch.setattr(backend._engine, "capture_next", lambda: left.pop(0))
    backend.settle(ahead)
    assert backend.warm_up() is (ahead == "graphs")
    assert len(left) == 3, "kernels are not ready"
    backend._kernels.finished.set()
    assert [backend.warm_up() for _ in range(4)] == [*[ahead == "graphs"] * 2, False, False]
    assert len(left) == (0 if ahead == "graphs" else 3)


def test_a_graph_that_fails_ahead_ends_nothing(
    backend: NativeBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> bool:
        raise RuntimeError("no graph today")

    monkeypatch.setattr(backend._engine, "capture_next", fails)
    backend._kernels.finished.set()
    backend.settle("graphs")
    assert backend.warm_up() is False
    assert "can't be recorded ahead" in caplog.text
    assert text_of(backend, max_tokens=3)
