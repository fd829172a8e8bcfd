"""vLLM's chunks as deltas of ours.

    {"choices": [{"index": 0, "delta": {"content": …} or "text": …, "logprobs": …, "finish_reason": …,
                  "stop_reason": a stop string or a token id}], "usage": …}   … and last one with the usage

The usage comes after everything, and belongs to the last delta: the last end of a choice waits for it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import nan
from typing import Any, ClassVar

from snugvl.backends.child.answer import Chunks, ReasoningSyntax
from snugvl.backends.child.http import ChildApi
from snugvl.core.messages import Delta, Logprob, TokenLogprob, Usage
from snugvl.core.sampling import SamplingParams

_FINISH: Mapping[str, Any] = {"stop": "stop", "length": "length", "abort": "abort", "tool_calls": "stop"}


class VllmChunks(Chunks):
    """Reads the chunks of one request: see `Chunks`."""

    engine: ClassVar = "vLLM"

    def __init__(
        self, sampling: SamplingParams, reasoning: ReasoningSyntax | None = None, prompt: str = ""
    ) -> None:
        """`prompt`: what the answer begins with where log-probabilities of the prompt are wanted."""
        super().__init__(sampling, reasoning)
        self._prompt = prompt
        self._judges, self._judged = sampling.prompt_logprobs, False  # wanted, and told
        # Choices whose piece with the prompt hasn't come yet.
        self._unechoed = set(self._unfinished) if sampling.prompt_logprobs else set()
        self._usage = Usage(0, 0)
        self.stop_token: int | None = None  # ended the choice that was read last, and has no text yet

    @property
    def usage(self) -> Usage:
        """See `Chunks`."""
        return replace(self._usage, completion_tokens=self._usage.completion_tokens * self._copies)

    def ended(self, answer: int) -> bool:
        """Whether every choice has ended."""
        return not self._unfinished

    def over(self, answer: int) -> bool:
        """Never: the usage follows."""
        return False

    async def settle(self, api: ChildApi) -> None:
        """Ask for the text of the token that ended the choice that was read last, where one did."""
        if self.stop_token is None:
            return
        assert self._last is not None
        answer = await api.call("/detokenize", {"tokens": [self.stop_token]})
        self._last = replace(self._last, stop=str(answer.get("prompt", "")))
        self.stop_token = None

    def _read(self, chunk: Mapping[str, Any], answer: int) -> Iterator[Delta]:
        told = chunk.get("usage")
        if told is not None:
            self._take_usage(told)
        for choice in chunk.get("choices", ()):
            self._generated[int(choice["index"])] = int((told or {}).get("completion_tokens") or 0)
        for choice in chunk.get("choices", ()):
            yield from self._choice(choice)

    def _take_usage(self, usage: Mapping[str, Any]) -> None:
        details = usage.get("prompt_tokens_details") or {}
        pictures = details.get("multimodal_tokens") or {}
        prompt, completion = int(usage["prompt_tokens"]), int(usage.get("completion_tokens") or 0)
        # A chunk counts the tokens of its own choice; the last one those of all.
        images = sum(int(number) for number in pictures.values())
        self._cached = int(details.get("cached_tokens") or 0)
        self._usage = Usage(prompt, max(completion, self._usage.completion_tokens), images)

    def _choice(self, choice: Mapping[str, Any]) -> Iterator[Delta]:
        index, finish = int(choice["index"]), choice.get("finish_reason")
        text, reasoning = self._said(choice, last=finish is not None)
        logprobs = self._logprobs(choice.get("logprobs"))
        scored: tuple[Logprob, ...] = ()
        if index in self._unechoed:  # the first piece of a choice has the prompt before it
            self._unechoed.discard(index)
            text = text.removeprefix(self._prompt)
            count = self._usage.prompt_tokens
            scored, logprobs = logprobs[:count], logprobs[count:]
            scored, self._judged = () if self._judged else scored, True
        reason = choice.get("stop_reason")
        if finish == "stop" and not isinstance(reason, str) and not self._judges:
            logprobs = logprobs[:-1]  # of the token that ended it, which is no text
        delta = Delta(
            text,
            index,
            logprobs,
            reasoning=reasoning,
            completion_tokens=self._count(),
            prompt_logprobs=scored,
        )
        if finish is None:
            if text or reasoning or logprobs:
                yield from self._copied(delta)
            return
        self._unfinished.discard(index)
        stop = reason if isinstance(reason, str) else None
        delta = replace(delta, finish_reason=_FINISH[finish], stop=stop)
        if isinstance(reason, int) and reason in self._stop_ids:
            self.stop_token = reason
        if self._last is not None:
            yield self._last
        self._last = delta

    def _said(self, choice: Mapping[str, Any], *, last: bool) -> tuple[str, str]:
        """Text and reasoning. A server with a parser of reasoning tells them apart itself."""
        if "text" in choice:
            return choice["text"] or "", ""
        index, delta = int(choice["index"]), choice.get("delta") or {}
        told = delta.get("reasoning") or delta.get("reasoning_content") or ""
        if told:
            self._splitters.pop(index, None)
            self._thought[index] = self._generated[index]
        text, reasoning = self._parts(delta.get("content") or "", index, last=last)
        return text, told + reasoning

    def _logprobs(self, value: Mapping[str, Any] | None) -> tuple[Logprob, ...]:
        """Log-probabilities of a chunk: a chat's (`content`) or a completion's (`tokens`, …)."""
        if not value:
            return ()
        if "tokens" not in value:
            return tuple(self._logprob(item) for item in value.get("content") or ())
        tops = value.get("top_logprobs") or [None] * len(value["tokens"])
        return tuple(
            Logprob(
                token,
                token.encode(),
                nan if logprob is None else float(logprob),
                _rank(top)[: self._alternatives],
            )
            for token, logprob, top in zip(value["tokens"], value["token_logprobs"], tops, strict=True)
        )


def _rank(top: Mapping[str, float] | None) -> tuple[TokenLogprob, ...]:
    pairs = sorted((top or {}).items(), key=lambda pair: -pair[1])
    return tuple(TokenLogprob(text, text.encode(), float(logprob)) for text, logprob in pairs)
