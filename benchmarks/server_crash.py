"""`kill -9` on the engine of a real `snugvl serve` while it streams: what clients see, and how it comes back.

    python benchmarks/server_crash.py [--out FILE]

Streams of four protocols and one answer in one piece run; the engine is killed. Checked: every stream ends
with an error event in its protocol's form, the answer with an error; /health says why and when; what comes
meanwhile gets 503 with Retry-After; the engine is ready again by itself and serves. Killed twice more, it
starts again after a pause, and /health says so (tests/backends has how long). Exits with 1 if not.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import httpx

from server_requests import CHAT, ENDLESS, MESSAGES, MODEL, RESPONSES, chat
from serving import Served, serve

KILLS = 3  # in a row; the third is followed by a pause
PIECES = 10  # of a stream, before the engine is killed
TOKENS = 3000
SAYS = [{"role": "user", "content": "hello"}]
OLLAMA = "/api/chat"


def _chat_ended(last: Any) -> bool:
    return "SIGKILL" in last["error"]["message"]


def _response_ended(last: Any) -> bool:
    return last["type"] == "response.failed" and "SIGKILL" in last["response"]["error"]["message"]


def _message_ended(last: Any) -> bool:
    return last["type"] == "error" and "SIGKILL" in last["error"]["message"]


def _line_ended(last: Any) -> bool:
    return "SIGKILL" in last["error"]


# Whatever the model would say, an answer of this schema takes hundreds of tokens.
LONG = {
    "type": "object",
    "properties": {"list": {"type": "array", "items": {"type": "boolean"}, "minItems": 900}},
    "required": ["list"],
    "additionalProperties": False,
}
# Of each protocol: its path, what is asked, and whether a last event is its error.
STREAMS: dict[str, tuple[dict[str, Any], Callable[[Any], bool]]] = {
    CHAT: (chat(Random(0), max_tokens=TOKENS, stream=True, **ENDLESS), _chat_ended),
    RESPONSES: (
        {
            "input": "hello",
            "text": {"format": {"type": "json_schema", "name": "long", "schema": LONG}},
            "stream": True,
        },
        _response_ended,
    ),
    MESSAGES: (
        {
            "model": MODEL,
            "messages": SAYS,
            "max_tokens": TOKENS,
            "output_config": {"format": {"type": "json_schema", "schema": LONG}},
            "stream": True,
        },
        _message_ended,
    ),
    OLLAMA: ({"model": MODEL, "messages": SAYS, "format": LONG}, _line_ended),
}


class Broken(SystemExit):
    """A promise that isn't kept."""


def check(kept: bool, promise: str, seen: object) -> None:
    """Tell, or stop."""
    if not kept:
        raise Broken(f"BROKEN: {promise}: {seen}")
    print(f"  kept: {promise}", flush=True)


async def stream(client: httpx.AsyncClient, path: str, talking: asyncio.Semaphore) -> list[str]:
    """The data of all events of one stream; `talking` is released once it runs."""
    body, _ = STREAMS[path]
    events = []
    async with client.stream("POST", path, json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith(("data: ", "{")):
                events.append(line.removeprefix("data: "))
                if len(events) == PIECES:
                    talking.release()
    return events


async def kill_while_streaming(served: Served) -> None:
    """Four streams and one whole answer run; kill; look at each."""
    async with httpx.AsyncClient(base_url=served.url, timeout=900) as client:
        talking = asyncio.Semaphore(0)
        whole = asyncio.create_task(client.post(CHAT, json=chat(Random(0), max_tokens=TOKENS, **ENDLESS)))
        streams = {path: asyncio.create_task(stream(client, path, talking)) for path in STREAMS}
        for _ in STREAMS:
            await asyncio.wait_for(talking.acquire(), 900)
        engine = served.engine
        assert engine is not None
        engine.kill()
        for path, task in streams.items():
            events = await asyncio.wait_for(task, 900)
            ended = STREAMS[path][1]
            check(ended(json.loads(events[-1])), f"the stream of {path} ends with its error", events[-1])
            print(f"    after {len(events) - 1} events: {events[-1][:160]}")
        answer = await asyncio.wait_for(whole, 900)
        error = answer.json()["error"]
        check(
            answer.status_code == 500 and "SIGKILL" in error["message"], "a whole answer is an error", error
        )
        health = (await client.get("/health")).json()
        check(health["state"] == "restarting", "/health says it restarts", health)
        check("SIGKILL" in health["detail"] and health["retry_after_s"] > 0, "and why, and when", health)
        refused = await client.post(CHAT, json=chat(Random(0)))
        after = int(refused.headers.get("retry-after", 0))
        check(
            refused.status_code == 503 and after >= 1, "a new request gets 503 and Retry-After", refused.text
        )


def serves(served: Served, restarts: int) -> None:
    """It came back by itself, and answers."""
    health = served.wait("ready")
    check(health["restarts"] == restarts, f"ready again by itself, {restarts} restarts", health)
    answer = httpx.post(served.url + CHAT, json=chat(Random(0)), timeout=900)
    check(answer.status_code == 200, "and it serves", answer.text)


def kill(served: Served) -> dict[str, Any]:
    """Kill the engine; the health once that is known."""
    engine = served.engine
    assert engine is not None
    engine.kill()
    return served.wait("restarting")


def crash(served: Served) -> list[float]:
    """Kill, look, kill again: seconds until it served again, each time.

    Raises:
        Broken: a promise that isn't kept.
    """
    seconds = []
    asyncio.run(kill_while_streaming(served))
    for number in range(1, KILLS + 1):
        started = time.monotonic()
        serves(served, number)
        seconds.append(round(time.monotonic() - started, 2))
        if number < KILLS:
            health = kill(served)
            print(f"    {health['detail']}")
    seen = health["detail"]
    check(f"{KILLS} times in a row" in seen, f"{KILLS} crashes in a row back off and say so", seen)
    return seconds


def main() -> None:
    """Serve, crash, tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with serve(MODEL, ["--device", "cpu", "--served-model-name", MODEL]) as served:
        seconds = crash(served)
    print(f"seconds until it served again: {seconds}")
    # Imported last: it loads torch.
    import machine

    machine.save("server/crash", {"seconds_until_it_served_again": seconds}, arguments.out)


if __name__ == "__main__":
    main()
