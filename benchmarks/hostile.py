"""Requests of hostile sizes, as many as there are patience and clients for, and what became of them.

Text and pictures of all sizes (from one pixel to 24 megapixels, up to eight of them, up to far more text than
the context holds), one token or four hundred, several choices, clients that leave early. What only costs the
client or a decoder time is rare: decoding 24 megapixels takes longer than all else.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from serving import NAME
from snugvl.bench.workload import picture_url

SIZES: dict[tuple[int, int], float] = {
    (1, 1): 4, (32, 32): 4, (64, 4000): 2, (512, 512): 4, (1024, 1024): 2, (1920, 1080): 0.8,
    (4032, 3024): 0.2, (6000, 4000): 0.05,
}  # fmt: skip
WORDS: dict[int, float] = {1: 3, 20: 3, 200: 3, 1500: 1, 6000: 0.5, 40000: 0.2}
PICTURES: dict[int, float] = {0: 3, 1: 4, 2: 1, 8: 0.2}
NEW_TOKENS: dict[int, float] = {1: 2, 8: 4, 32: 2, 64: 0.6, 400: 0.1}
CLIENTS = 16
LEAVES = 0.1  # of all clients, before their answer is complete

Beside = Callable[["Load"], Awaitable[None]]


class Load:
    """The requests of one run.

    Attributes:
        sent: how many were asked.
        outcomes: what became of them.
        wrong: what is neither a complete answer nor a clean refusal.
    """

    def __init__(self, url: str, total: int, limit_s: float, seed: int = 7) -> None:
        self.url = url
        self.total = total
        self.left = total
        self.sent = 0
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._end = time.perf_counter() + limit_s
        self._random = random.Random(seed)
        self._pictures = [picture_url(*size, number) for number, size in enumerate(SIZES)]

    def body(self) -> dict[str, Any]:
        """One request, nothing sensible about it."""
        words, pictures = self._one_of(WORDS), self._one_of(PICTURES)
        content: list[dict[str, Any]] = [{"type": "text", "text": "word " * words}]
        urls = self._random.choices(self._pictures, [*SIZES.values()], k=pictures)
        content += [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        body = {"model": NAME, "messages": [{"role": "user", "content": content}], "stream": True}
        body |= {"max_tokens": self._one_of(NEW_TOKENS), "n": self._one_of({1: 5, 3: 1})}
        greedy = self._random.random() < 0.7
        return body | ({"temperature": 0, "ignore_eos": True} if greedy else {"temperature": 1.0, "seed": 3})

    async def run(self, beside: Beside) -> None:
        """All of it, with `beside`."""
        async with httpx.AsyncClient(base_url=self.url, timeout=300, trust_env=False) as http:
            other = asyncio.ensure_future(beside(self))
            await asyncio.gather(*(self._client(http) for _ in range(CLIENTS)))
            await other

    async def until(self, share: float) -> None:
        """Wait until so much of it was asked."""
        while self.left > self.total * (1 - share):
            await asyncio.sleep(0.05)

    def _one_of(self, weights: dict[int, float]) -> int:
        return self._random.choices([*weights], [*weights.values()])[0]

    async def _client(self, http: httpx.AsyncClient) -> None:
        """Ask until nothing is left to ask."""
        while self.left > 0:
            if time.perf_counter() > self._end:
                self.left = 0
                return
            self.left -= 1
            self.sent += 1
            body, leaves = self.body(), self._random.random() < LEAVES
            try:
                outcome = await self._one(http, body, leaves=leaves)
            except httpx.HTTPError as error:
                outcome = f"broken: {type(error).__name__}"
                self.wrong.append(outcome)
            self.outcomes[outcome] += 1

    async def _one(self, http: httpx.AsyncClient, body: dict[str, Any], *, leaves: bool) -> str:
        """What became of a request."""
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                return self._refused(response, (await response.aread()).decode())
            ended = False
            async for line in response.aiter_lines():
                if line.startswith("data:") and '"error"' in line[:20]:
                    self.wrong.append(line[:300])
                    return "error in the stream"
                ended = ended or line == "data: [DONE]"
                if leaves:
                    return "left early"
            if not ended:
                self.wrong.append("a stream without its end")
            return "answered" if ended else "cut"

    def _refused(self, response: httpx.Response, text: str) -> str:
        status = response.status_code
        clean = status < 500 or (status == 503 and "retry-after" in response.headers)
        try:
            error = json.loads(text)["error"]
        except (ValueError, KeyError):
            error, clean = {}, False
        if not clean:
            self.wrong.append(f"{status}: {text[:300]}")
        return f"refused: {status} {error.get('code') or error.get('type') or '?'}"
