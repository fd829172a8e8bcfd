"""llama-server's chunks of `/completion` as deltas of ours: one stream for each choice.

    {"content": …, "tokens": ids, "tokens_predicted": …, "tokens_evaluated": the prompt's, "stop": false,
     "completion_probabilities": [{"token": …, "bytes": …, "logprob": …, "top_logprobs": …}]}
    {"content": "", "stop": true, "stop_type": "eos", "limit" or "word", "stopping_word": …, "timings": …}

A token that a request stops at is known by its id; the stream is left then.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from snugvl.backends.child.answer import Reasoning
from snugvl.backends.child.http import ChildApi
from snugvl.core.messages import Delta, Logprob, TokenLogprob, Usage
from snugvl.core.sampling import SamplingParams
from snugvl.errors import EngineError
from snugvl.inputs.reasoning import ReasoningSplitter

_FINISH: Mapping[str, Any] = {"limit": "length", "eos": "stop", "word": "stop", "none": "stop"}


class LlamacppChunks:
    """Reads the chunks of one request. `reasoning`: None where none is to be told from the answer."""

    def __init__(
        self, sampling: SamplingParams, prompt_tokens: int, image_tokens: int, reasoning: Reasoning | None
    ) -> None:
        streams = range(1 if sampling.greedy else sampling.n)
        self._copies = sampling.n if sampling.greedy else 1  # of a greedy answer, which is asked for once
        self._unfinished = set(streams)
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._alternatives = sampling.logprobs or 0
        self._splitters = {
            index: ReasoningSplitter(reasoning.opened, call=reasoning.call)
            for index in streams
            if reasoning is not None
        }
        self._prompt_tokens, self._image_tokens = prompt_tokens, image_tokens
        self._generated = dict.fromkeys(streams, 0)
        self._held: dict[int, tuple[Logprob, ...]] = {}  # of tokens whose text hasn't come
        self._cached = 0
        self._last: Delta | None = None
        self._stopped: tuple[int, str] | None = None  # a token, and the text that it ended

    @property
    def prompt_tokens(self) -> int:
        """Those that were counted before; where that couldn't be, those that llama.cpp counted."""
        return self._prompt_tokens

    def ended(self, answer: int) -> bool:
        """Whether a choice has ended."""
        return answer not in self._unfinished

    def over(self, answer: int) -> bool:
        """Whether a token ended it that llama.cpp would go on after."""
        return self.ended(answer)

    def read(self, chunk: Mapping[str, Any], answer: int) -> list[Delta]:
        """What a chunk adds.

        Raises:
            EngineError: it isn't of the form above.
        """
        try:
            return list(self._read(chunk, answer))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(f"llama.cpp sent a chunk that we don't understand ({error!r})") from None

    async def settle(self, api: ChildApi) -> None:
        """Take the text of the token that ended a choice off the end of its text."""
        if self._stopped is None:
            return
        token, said = self._stopped
        self._stopped = None
        text = str((await api.call("/detokenize", {"tokens": [token]})).get("content", ""))
        assert self._last is not None
        self._last = replace(self._last, text=said.removesuffix(text), stop=text)

    def end(self) -> list[Delta]:
        """What was held back: the end of the last choice, with the usage of all."""
        if self._last is None:
            return []
        usage = Usage(self._prompt_tokens, sum(self._generated.values()) * self._copies, self._image_tokens)
        ends = self._copied(self._last)
        return [*ends[:-1], replace(ends[-1], usage=usage, cached_tokens=self._cached)]

    def _read(self, chunk: Mapping[str, Any], answer: int) -> Iterator[Delta]:
        final = bool(chunk["stop"])
        text, tokens = str(chunk["content"]), chunk.get("tokens") or []
        self._generated[answer] = int(chunk["tokens_predicted"])
        self._prompt_tokens = max(self._prompt_tokens, int(chunk["tokens_evaluated"]))
        stopped = next((token for token in tokens if token in self._stop_ids), None)
        logprobs = tuple(self._logprobs(chunk.get("completion_probabilities") or ()))
        logprobs = self._held.pop(answer, ()) + logprobs
        if stopped is not None or (final and chunk["stop_type"] == "eos"):
            logprobs = logprobs[:-1]
        elif not text and not final:  # it may be the model's own end, which is no text
            self._held[answer], logprobs = logprobs, ()
        finish: Any = "stop" if stopped is not None else _FINISH[chunk["stop_type"]] if final else None
        if finish is None or stopped is None:
            text, reasoning = self._parts(text, answer, last=finish is not None)
        else:
            reasoning = ""
        generated = sum(self._generated.values()) * self._copies
        delta = Delta(text, answer, logprobs, reasoning=reasoning, completion_tokens=generated)
        if finish is None:
            if text or reasoning or logprobs:
                yield from self._copied(delta)
            return
        self._unfinished.discard(answer)
        if final:
            self._cached = int((chunk.get("timings") or {}).get("cache_n") or 0)
        if self._last is not None:
            yield replace(self._last, completion_tokens=generated)
        self._last = replace(delta, finish_reason=finish, stop=chunk.get("stopping_word") or None)
        if stopped is not None:
            self._stopped = stopped, text

    def _parts(self, text: str, answer: int, *, last: bool) -> tuple[str, str]:
        """Text and reasoning."""
        splitter = self._splitters.get(answer)
        if splitter is None:
            return text, ""
        reasoning, said = splitter.push(text)
        thought, rest = splitter.flush() if last else ("", "")
        return said + rest, reasoning + thought

    def _logprobs(self, items: Any) -> Iterator[Logprob]:
        for item in items:
            tops = item.get("top_logprobs") or ()
            yield Logprob(
                *_token(item), tuple(TokenLogprob(*_token(top)) for top in tops[: self._alternatives])
            )

    def _copied(self, delta: Delta) -> list[Delta]:
        return [delta, *(replace(delta, choice=choice) for choice in range(1, self._copies))]


def _token(item: Mapping[str, Any]) -> tuple[str, bytes, float]:
    return item["token"], bytes(item["bytes"]), float(item["logprob"])
