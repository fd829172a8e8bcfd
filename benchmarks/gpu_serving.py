"""`snugvl serve` on cards of any size: the server started, watched and asked, for the scripts beside this."""

import base64
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import pynvml  # type: ignore[import-untyped]
from PIL import Image

PROMPT = "Describe this picture."


def picture(width: int, height: int, seed: int) -> str:
    """A JPEG as a data URL, different for every seed."""
    noise = Image.effect_noise((width // 8, height // 8), 60 + seed % 40).convert("RGB")
    canvas = noise.resize((width, height), Image.Resampling.BICUBIC)
    canvas.putpixel((seed % width, seed * 7 % height), (255, 0, 0))
    file = io.BytesIO()
    canvas.save(file, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def question(image: str | None, max_tokens: int, **extra: Any) -> dict[str, Any]:
    """A chat request that runs to its limit."""
    content: list[dict[str, Any]] = [{"type": "text", "text": PROMPT}]
    if image is not None:
        content.insert(0, {"type": "image_url", "image_url": {"url": image}})
    return {
        "model": "m",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        **extra,
    }


class Peak:
    """The most memory that the card's processes held, by NVML, above what they held at first; sampled."""

    def __init__(self) -> None:
        pynvml.nvmlInit()
        self._card = pynvml.nvmlDeviceGetHandleByIndex(0)
        self._base = self._used()
        self.bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _used(self) -> int:
        return int(pynvml.nvmlDeviceGetMemoryInfo(self._card).used)

    def _watch(self) -> None:
        while not self._stop.wait(0.004):
            self.bytes = max(self.bytes, self._used() - self._base)

    def close(self) -> int:
        """Stop; the peak."""
        self._stop.set()
        self._thread.join()
        return self.bytes


@dataclass
class Server:
    """One `snugvl serve` process. Times are seconds since it was started."""

    checkpoint: Path
    options: Sequence[str] = ()
    timeout_s: float = 90.0
    ready_s: float = 0.0
    log: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "snugvl.cli", "serve", str(self.checkpoint), "--port", str(port)]
        command += ["--served-model-name", "m", "--device", "cuda", *self.options]
        self.started = time.perf_counter()
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ.copy()
        )
        threading.Thread(target=self._read, daemon=True).start()
        self.client = httpx.Client(base_url=self.url, timeout=120)
        while time.perf_counter() - self.started < self.timeout_s and self.process.poll() is None:
            try:
                if self.client.get("/health").status_code == 200:
                    self.ready_s = time.perf_counter() - self.started
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.02)
        return self

    @property
    def ready(self) -> bool:
        """Whether it came up."""
        return self.ready_s > 0

    @property
    def refusal(self) -> str:
        """The last thing it said, in one line."""
        time.sleep(0.2)
        lines = [line for line in self.log if line.strip()]
        return " ".join(lines[-3:])[-400:]

    def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """A streamed answer: seconds to the first token, tokens a second after it, and its usage."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        start = time.perf_counter()
        first = last = None
        usage: dict[str, Any] = {}
        with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                return {"error": response.read().decode()[:400], "status": response.status_code}
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    return {"error": json.dumps(event["error"]), "status": 200}
                if event.get("usage"):
                    usage = event["usage"]
                if event["choices"]:
                    last = time.perf_counter()
                    first = first or last
        if first is None or last is None or not usage:
            return {"error": "the stream ended early", "status": 200}
        rate = (usage["completion_tokens"] - 1) / (last - first) if last > first else 0.0
        return {"ttft_s": first - start, "tokens_s": rate, "total_s": last - start, "usage": usage}

    def memory(self) -> dict[str, Any]:
        """The server's ledger."""
        answer: dict[str, Any] = self.client.get("/memory").json()
        return answer

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(re.sub(r"\x1b\[[0-9;]*m", "", line.rstrip()))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
