"""A `vllm` command that computes nothing: vLLM's log lines and its HTTP API, and every way to fail.

What it does says its first word:    fake_vllm.py BEHAVIOUR serve MODEL --uds PATH …
"""

# ruff: noqa: E501 - lines of a log are as long as they are

import json
import os
import signal
import socket
import socketserver
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[1]))
import faulty

LOGS = Path(__file__).parents[2] / "diagnose" / "logs"
CONTEXT = 64
START = """\
(APIServer pid=7) INFO 11-21 10:12:43 [api_utils.py:286] non-default args: {'model': 'fake'}
(APIServer pid=7) INFO 11-21 10:12:53 [model.py:733] Resolved architecture: Qwen3VLForConditionalGeneration
(EngineCore pid=9) INFO 11-21 10:13:01 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='fake'
(EngineCore pid=9) INFO 11-21 10:13:10 [gpu_model_runner.py:68] Starting to load model fake...
\rLoading safetensors checkpoint shards:  50% Completed | 1/2 [00:00<?, ?it/s]\r
(EngineCore pid=9) INFO 11-21 10:13:11 [gpu_model_runner.py:5] ServedModel loading took 3.25 GiB memory and 2.000000 seconds
(EngineCore pid=9) INFO 11-21 10:13:11 [gpu_worker.py:773] Available KV cache memory: 1.50 GiB
(EngineCore pid=9) INFO 11-21 10:13:11 [kv_cache_utils.py:1] GPU KV cache size: 14,016 tokens, Maximum concurrency for 64 tokens per request: 219.00x
(EngineCore pid=9) INFO 11-21 10:13:12 [model_runner.py:1164] Graph capturing finished in 3 secs, took 0.25 GiB
(EngineCore pid=9) INFO 11-21 10:13:13 [core.py:402] init engine (profile, create kv cache, warmup model) took 1.67 s
(APIServer pid=7) INFO 11-21 10:13:14 [entry.py:140] Starting vLLM server on http://127.0.0.1
"""
METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="fake"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="fake"} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="fake"} 0.25
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{engine="0",model_name="fake"} 17.0
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{engine="0",model_name="fake"} 9.0
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{engine="0",model_name="fake"} 40.0
vllm:prefix_cache_queries_created{engine="0",model_name="fake"} 1.79e+09
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{engine="0",model_name="fake"} 16.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="876"} 1.0
"""
GARBAGE = {"garbage": "<html>", "deep": "[" * 100_000}  # chunks that are no JSON objects


class Server(ThreadingHTTPServer):
    daemon_threads = True
    asleep = False
    sleeps: list[str] = []  # noqa: RUF012


class UnixServer(Server):
    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)


class Handler(BaseHTTPRequestHandler):
    """Echoes the last message's text word by word."""

    protocol_version = "HTTP/1.1"
    server: Server
    model = ""

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path == "/health":
            self.reply(200, "")
        elif path == "/version":
            self.reply(200, {"version": "0.32.0"})
        elif path == "/metrics":
            self.reply(200, METRICS)
        elif path == "/v1/models":
            key = os.environ.get("VLLM_API_KEY")
            if key and self.headers["Authorization"] != f"Bearer {key}":
                self.reply(401, {"error": "Unauthorized"})
                return
            card = {"id": self.model, "root": self.model, "max_model_len": CONTEXT, "owned_by": "vllm"}
            self.reply(200, {"object": "list", "data": [card]})
        else:
            self.reply(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"] or 0))
        body: dict[str, Any] = json.loads(raw or b"{}")
        path = urlsplit(self.path)
        if path.path == "/tokenize":
            words = self.text(body).split()
            self.reply(
                200, {"count": len(words), "max_model_len": CONTEXT, "tokens": [len(w) for w in words]}
            )
        elif path.path == "/detokenize":
            self.reply(200, {"prompt": " ".join("x" * token for token in body["tokens"])})
        elif path.path in ("/sleep", "/wake_up", "/collective_rpc"):
            print("did", self.path, body.get("method", ""), flush=True)
            self.server.asleep = path.path == "/sleep"
            self.reply(200, {"status": "ok"})
        else:
            self.generate(body, chat=path.path.endswith("chat/completions"))

    def generate(self, body: dict[str, Any], *, chat: bool) -> None:
        words = self.text(body).split()
        if self.server.asleep:
            self.fail(500, "it sleeps")
        elif words[:1] == ["long"]:
            self.fail(400, f"This model's maximum context length is {CONTEXT} tokens. However, ...")
        elif words[:1] == ["wrong"]:
            self.fail(400, "temperature is wrong", "temperature")
        elif words[:1] == ["broken"]:
            self.fail(500, "it is broken")
        else:
            self.stream(words, body, chat)

    def stream(self, words: list[str], body: dict[str, Any], chat: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        if words[:1] == ["late"]:
            self.event({"error": {"message": "Grammar error: nonsense", "code": 400, "param": None}})
            self.event("[DONE]")
            return
        if words[:1] == ["show"]:
            words = [json.dumps(body)]
        words = words[: body.get("max_tokens", CONTEXT)]
        for index, word in enumerate(words):
            self.act(word)
            last = index == len(words) - 1
            text = word if index == 0 else f" {word}"
            choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if last else None}
            choice |= {"delta": {"content": text}} if chat else {"text": text}
            self.event({"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": index + 1}})
        details = {"multimodal_tokens": {"image": 4}}
        usage = {"prompt_tokens": 7, "completion_tokens": len(words), "prompt_tokens_details": details}
        self.event({"choices": [], "usage": usage})
        self.event("[DONE]")
        self.close_connection = True

    def act(self, word: str) -> None:
        """Some words do something in the middle of an answer."""
        faulty.act(word)
        if word == "gate":
            while not Path(os.environ["FAKE_NOTES"]).exists():
                time.sleep(0.01)
        if word in ("stall", "pause"):
            time.sleep(1000)
        if word == "slow":
            time.sleep(0.2)
        if word in GARBAGE:
            self.event(GARBAGE[word])

    def text(self, body: dict[str, Any]) -> str:
        """The last message's text, or the prompt."""
        if "messages" not in body:
            prompt = body.get("prompt", "")
            return prompt if isinstance(prompt, str) else " ".join("x" * token for token in prompt)
        content = body["messages"][-1]["content"]
        return content if isinstance(content, str) else " ".join(p.get("text", "<image>") for p in content)

    def event(self, value: object) -> None:
        self.wfile.write(f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode())
        self.wfile.flush()

    def fail(self, status: int, message: str, param: str | None = None) -> None:
        self.reply(status, {"error": {"message": message, "type": "E", "param": param, "code": status}})

    def reply(self, status: int, value: object) -> None:
        data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main(words: list[str]) -> None:
    """Behave as the first word says."""
    model, flags = words[0], words[3:]
    door = flags[flags.index("--uds") + 1] if "--uds" in flags else ""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if model == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if model in ("family", "stubborn"):  # an EngineCore that outlives its parent, in a session of its own
        for own in (False, True):
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=own)
    if model.startswith("log:"):  # fails as this log did, unless it is told to do with less
        log, _, unless = model.removeprefix("log:").partition("!")
        if not unless or unless not in flags:
            sys.stdout.write((LOGS / log).read_text())
            raise SystemExit(1)
    faulty.at_start(model)
    if model == "port":
        taken = Path(os.environ["FAKE_NOTES"])
        if not taken.exists():
            taken.touch()
            print("OSError: [Errno 98] error while attempting to bind on address: address already in use")
            raise SystemExit(1)
    if model == "hang":
        print("".join(START.splitlines(keepends=True)[:2]), flush=True)
        time.sleep(1000)
    if model == "mute":
        time.sleep(1000)
    if model == "spin":  # compiles without a word
        end = time.process_time() + 1.0
        while time.process_time() < end:
            pass
    if model == "read":  # slow weights: hardly any computing
        with Path("/dev/zero").open("rb", buffering=0) as weights:
            for _ in range(60):
                weights.read(1 << 16)
                time.sleep(0.02)
    if model == "chatter":  # it hangs, and says so for ever
        while True:
            print("(EngineCore pid=9) INFO 11-21 10:13:01 [core.py:133] still waiting", flush=True)
            time.sleep(0.02)
    for line in START.splitlines(keepends=True):
        sys.stdout.write(line)
        sys.stdout.flush()
        time.sleep(0.005)
    Handler.model = flags[flags.index("--served-model-name") + 1]
    if door:
        UnixServer(door, Handler).serve_forever()  # type: ignore[arg-type]
    Server(("127.0.0.1", int(flags[flags.index("--port") + 1])), Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
