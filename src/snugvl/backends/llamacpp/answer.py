"""llama-server's chunks of `/completion` as deltas of ours: one stream for each choice.

    {"content": …, "tokens": ids, "tokens_predicted": …, "tokens_evaluated": the prompt's, "stop": false,
     "completion_probabilities": [{"token": …, "bytes": …, "logprob": …, "top_logprobs": …}]}
    {"content": "", "stop": true, "stop_type": "eos", "limit" or "word", "stopping_word": …, "timings": …}

A token that a request stops at is known by its id; the stream is left then.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from snugvl.backends.child.answer import Chunks, ReasoningSyntax
from snugvl.backends.child.http import ChildApi
from snugvl.core.messages import Delta, Logprob, Usage
from snugvl.core.sampling import SamplingParams

_FINISH: Mapping[str, Any] = {"limit": "length", "eos": "stop", "word": "stop", "none": "stop"}


class LlamacppChunks(Chunks):
    """Reads the chunks of one request: see `Chunks`."""

    engine: ClassVar = "llama.cpp"

    def __init__(
        self,
        sampling: SamplingParams,
        prompt_tokens: int,
        image_tokens: int,
        reasoning: ReasoningSyntax | None,
    ) -> None:
        """`prompt_tokens`: as counted before; where that couldn't be, llama.cpp's own count is taken."""
        super().__init__(sampling, reasoning)
        self._prompt_tokens, self._image_tokens = prompt_tokens, image_tokens
        self._held: dict[int, tuple[Logprob, ...]] = {}  # of tokens whose text hasn't come
        self._stopped: tuple[int, str] | None = None  # a token, and the text that it ended

    @property
    def usage(self) -> Usage:
        """See `Chunks`."""
        return Usage(self._prompt_tokens, self._count(), self._image_tokens)

    def ended(self, answer: int) -> bool:
        """Whether a choice has ended."""
        return answer not in self._unfinished

    def over(self, answer: int) -> bool:
        """Whether a token ended it that llama.cpp would go on after."""
        return self.ended(answer)

    async def settle(self, api: ChildApi) -> None:
        """Take the text of the token that ended a choice off the end of its text."""
        if self._stopped is None:
            return
        token, said = self._stopped
        self._stopped = None
        text = str((await api.call("/detokenize", {"tokens": [token]})).get("content", ""))
        assert self._last is not None
        self._last = replace(self._last, text=said.removesuffix(text), stop=text)

    def _read(self, chunk: Mapping[str, Any], answer: int) -> Iterator[Delta]:
        final = bool(chunk["stop"])
        text, tokens = str(chunk["content"]), chunk.get("tokens") or []
        self._generated[answer] = int(chunk["tokens_predicted"])
        self._prompt_tokens = max(self._prompt_tokens, int(chunk["tokens_evaluated"]))
        stopped = next((token for token in tokens if token in self._stop_ids), None)
        logprobs = tuple(self._logprob(item) for item in chunk.get("completion_probabilities") or ())
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
        generated = self._count()
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
