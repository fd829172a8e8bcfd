"""vLLM's chunks as deltas of ours.

    {"choices": [{"index": 0, "delta": {"content": …} or "text": …, "logprobs": …, "finish_reason": …,
                  "stop_reason": a stop string or a token id}], "usage": …}   … and last one with the usage

The usage comes after everything, and belongs to the last delta: the last end of a choice waits for it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import nan
from typing import Any

from snugvl.backends.child.answer import Reasoning
from snugvl.backends.child.http import ChildApi
from snugvl.core.messages import Delta, Logprob, TokenLogprob, Usage
from snugvl.core.sampling import SamplingParams
from snugvl.errors import EngineError
from snugvl.inputs.reasoning import ReasoningSplitter

_FINISH: Mapping[str, Any] = {"stop": "stop", "length": "length", "abort": "abort", "tool_calls": "stop"}


class VllmChunks:
    """Reads the chunks of one request. `reasoning`: None where none is to be told from the answer."""

    def __init__(
        self, sampling: SamplingParams, reasoning: Reasoning | None = None, prompt: str = ""
    ) -> None:
        """`prompt`: what the answer begins with where log-probabilities of the prompt are wanted."""
        self._copies = sampling.n if sampling.greedy else 1  # of a greedy answer, which is asked for once
        self._unfinished = set(range(1 if sampling.greedy else sampling.n))
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._alternatives = sampling.logprobs or 0
        self._splitters = {
            index: ReasoningSplitter(reasoning.opened, call=reasoning.call)
            for index in self._unfinished
            if reasoning is not None
        }
        self._prompt = prompt
        self._judges, self._judged = sampling.prompt_logprobs, False  # wanted, and told
        # Choices whose piece with the prompt hasn't come yet.
        self._unechoed = set(self._unfinished) if sampling.prompt_logprobs else set()
        self._generated: dict[int, int] = {}  # tokens by choice
        self._last: Delta | None = None
        self._usage, self._cached = Usage(0, 0), 0
        self.stop_token: int | None = None  # ended the choice that was read last, and has no text yet

    @property
    def prompt_tokens(self) -> int:
        """As far as known; a chunk with a choice has it."""
        return self._usage.prompt_tokens

    def ended(self, answer: int) -> bool:
        """Whether every choice has ended."""
        return not self._unfinished

    def over(self, answer: int) -> bool:
        """Never: the usage follows."""
        return False

    def read(self, chunk: Mapping[str, Any], answer: int = 0) -> list[Delta]:
        """What a chunk adds. `answer`: there is one for all choices.

        Raises:
            EngineError: it isn't of the form above.
        """
        try:
            self._count(chunk.get("usage"))
            for choice in chunk.get("choices", ()):
                told = chunk.get("usage") or {}
                self._generated[int(choice["index"])] = int(told.get("completion_tokens") or 0)
            return [delta for choice in chunk.get("choices", ()) for delta in self._choice(choice)]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(f"vLLM sent a chunk that we don't understand ({error!r})") from None

    def end(self) -> list[Delta]:
        """What was held back: the end of the last choice, with the usage of all."""
        if self._last is None:
            return []
        usage = replace(self._usage, completion_tokens=self._usage.completion_tokens * self._copies)
        ends = self._copy_delta(self._last)
        return [*ends[:-1], replace(ends[-1], usage=usage, cached_tokens=self._cached)]

    async def settle(self, api: ChildApi) -> None:
        """Ask for the text of the token that ended the choice that was read last, where one did."""
        if self.stop_token is None:
            return
        assert self._last is not None
        answer = await api.call("/detokenize", {"tokens": [self.stop_token]})
        self._last = replace(self._last, stop=str(answer.get("prompt", "")))
        self.stop_token = None

    def _count(self, usage: Mapping[str, Any] | None) -> None:
        if usage is None:
            return
        details = usage.get("prompt_tokens_details") or {}
        pictures = details.get("multimodal_tokens") or {}
        prompt, completion = int(usage["prompt_tokens"]), int(usage.get("completion_tokens") or 0)
        # A chunk counts the tokens of its own choice; the last one those of all.
        images = sum(int(number) for number in pictures.values())
        self._cached = int(details.get("cached_tokens") or 0)
        self._usage = Usage(prompt, max(completion, self._usage.completion_tokens), images)

    def _choice(self, choice: Mapping[str, Any]) -> Iterator[Delta]:
        index, finish = int(choice["index"]), choice.get("finish_reason")
        text, reasoning = self._parts(choice, last=finish is not None)
        logprobs = _logprobs(choice.get("logprobs"), self._alternatives)
        scored: tuple[Logprob, ...] = ()
        if index in self._unechoed:  # the first piece of a choice has the prompt before it
            self._unechoed.discard(index)
            text = text.removeprefix(self._prompt)
            scored, logprobs = logprobs[: self.prompt_tokens], logprobs[self.prompt_tokens :]
            scored, self._judged = () if self._judged else scored, True
        generated = sum(self._generated.values()) * self._copies
        reason = choice.get("stop_reason")
        if finish == "stop" and not isinstance(reason, str) and not self._judges:
            logprobs = logprobs[:-1]  # of the token that ended it, which is no text
        delta = Delta(
            text,
            index,
            logprobs,
            reasoning=reasoning,
            completion_tokens=generated,
            prompt_logprobs=scored,
        )
        if finish is None:
            if text or reasoning or logprobs:
                yield from self._copy_delta(delta)
            return
        self._unfinished.discard(index)
        stop = reason if isinstance(reason, str) else None
        delta = replace(delta, finish_reason=_FINISH[finish], stop=stop)
        if isinstance(reason, int) and reason in self._stop_ids:
            self.stop_token = reason
        if self._last is not None:
            yield self._last
        self._last = delta

    def _parts(self, choice: Mapping[str, Any], *, last: bool) -> tuple[str, str]:
        """Text and reasoning. A server with a parser of reasoning tells them apart itself."""
        if "text" in choice:
            return choice["text"] or "", ""
        delta = choice.get("delta") or {}
        text, told = (
            delta.get("content") or "",
            delta.get("reasoning") or delta.get("reasoning_content") or "",
        )
        index = int(choice["index"])
        if told:
            self._splitters.pop(index, None)
        splitter = self._splitters.get(index)
        if splitter is None:
            return text, told
        reasoning, text = splitter.push(text)
        thought, rest = splitter.flush() if last else ("", "")
        return text + rest, reasoning + thought

    def _copy_delta(self, delta: Delta) -> list[Delta]:
        copy = replace(delta, prompt_logprobs=())
        return [delta, *(replace(copy, choice=choice) for choice in range(1, self._copies))]


def _logprobs(value: Mapping[str, Any] | None, most: int) -> tuple[Logprob, ...]:
    """Those of a chat's chunk (`content`) or of a completion's (`tokens`, `token_logprobs`, …).

    Beside the `most` alternatives vLLM lists the token itself where it is none of them.
    """
    if not value:
        return ()
    if "tokens" not in value:
        return tuple(
            Logprob(*_token(item), tuple(TokenLogprob(*_token(top)) for top in item["top_logprobs"][:most]))
            for item in value.get("content") or ()
        )
    tops = value.get("top_logprobs") or [None] * len(value["tokens"])
    return tuple(
        Logprob(token, token.encode(), nan if logprob is None else float(logprob), _rank(top)[:most])
        for token, logprob, top in zip(value["tokens"], value["token_logprobs"], tops, strict=True)
    )


def _token(item: Mapping[str, Any]) -> tuple[str, bytes, float]:
    token = item["token"]
    raw = item.get("bytes")
    return token, token.encode() if raw is None else bytes(raw), float(item["logprob"])


def _rank(top: Mapping[str, float] | None) -> tuple[TokenLogprob, ...]:
    pairs = sorted((top or {}).items(), key=lambda pair: -pair[1])
    return tuple(TokenLogprob(text, text.encode(), float(logprob)) for text, logprob in pairs)
