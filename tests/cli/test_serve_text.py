"""`snugvl serve` on a text model, and on a model whose tower is left out: the whole process over HTTP."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests import text_checkpoints
from tests.inputs import pieces
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow
PICTURE = "data:image/png;base64,iVBORw0KGgo="


@contextmanager
def serving(*words: str) -> Iterator[str]:
    command = [sys.executable, "-m", "snugvl", "serve", *words, "--port", "0", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            line = next(line for line in process.stdout if "http://127.0.0.1:" in line)
            url = "http://127.0.0.1:" + line.split("http://127.0.0.1:")[1].split("/")[0].split()[0]
            lines = []
            for told in process.stderr:
                lines.append(told)
                if "ready in" in told:
                    break
            assert "ready in" in lines[-1], "".join(lines)
            yield url
            process.terminate()
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()


def test_a_text_model(tmp_path: Path) -> None:
    folder = pieces.write(tmp_path)
    text = text_checkpoints.MODELS["mistral"]
    text_checkpoints.write(folder, replace(text, values=text.values | {"vocab_size": 384}))
    with serving(str(folder)) as url:
        model = httpx.get(url + "/v1/models").json()["data"][0]
        assert model["images"] is False
        body = {"model": model["id"], "max_tokens": 5, "messages": [{"role": "user", "content": "the fox"}]}
        answer = httpx.post(url + "/v1/chat/completions", json=body, timeout=PATIENCE_S)
        assert answer.is_success, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 5
        content = [{"type": "image_url", "image_url": {"url": PICTURE}}]
        body["messages"] = [{"role": "user", "content": content}]
        for path, wrong in (
            ("/v1/chat/completions", body),
            ("/v1/vision/caption", {"image": PICTURE}),
        ):
            refused = httpx.post(url + path, json=wrong)
            assert refused.status_code == 400
            assert "reads text alone" in refused.text
        rows = {row["name"]: row for row in httpx.get(url + "/memory").json()["ledger"]["rows"]}
        assert rows["text weights"]["planned_bytes"] == rows["text weights"]["measured_bytes"]
