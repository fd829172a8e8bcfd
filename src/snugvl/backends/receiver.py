"""From the engine's tokens to the reader's text: one receiver a request, run in the engine's thread."""

import logging
import math
from collections.abc import Callable
from typing import Any

from snugvl.backends.mailbox import Mailbox
from snugvl.core.messages import Delta, Logprob, TokenLogprob, ToolForm, Usage
from snugvl.core.sampling import SamplingParams
from snugvl.engine.request import FinishReason, TokenOutput
from snugvl.engine.sampling.likeliest import Sampled
from snugvl.errors import ENDINGS, EngineError, engine_failed
from snugvl.inputs.detokenizer import Detokenizer
from snugvl.inputs.prompt import PreparedPrompt
from snugvl.inputs.reasoning import ReasoningSplitter
from snugvl.inputs.tokenizer import Tokenizer
from snugvl.inputs.tools.forms import markers, opening

logger = logging.getLogger(__name__)


class Receiver:
    """Detokenises each choice, watches for stop strings, counts, and fills the mailbox.

    `calls`: the form of the tool calls that it may hold; None where no tools are offered. `grammar`: the
    whole text follows one, so none of it is reasoning.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: PreparedPrompt,
        sampling: SamplingParams,
        stop_ids: frozenset[int],
        *,
        calls: ToolForm | None = None,
        grammar: bool = False,
    ) -> None:
        self.mailbox: Mailbox[Delta] = Mailbox()
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._prompt = prompt
        self._stop_ids = frozenset() if sampling.ignore_eos else stop_ids
        self._own_stop_ids = frozenset(sampling.stop_token_ids)
        # The markers of tool calls are text for whoever parses them, even where they are special tokens.
        ids = [] if calls is None else [tokenizer.token_id(text) for text in markers(calls)]
        shown = frozenset(token for token in ids if token is not None)
        if sampling.special:
            shown |= tokenizer.special_ids - stop_ids - tokenizer.eos_ids - self._own_stop_ids
        self._detokenizers = {
            choice: Detokenizer(tokenizer, stop=sampling.stop, shown=shown, continues=prompt.bare)
            for choice in range(sampling.n)
        }
        # Log-probabilities by choice, and how many of them went out with their text.
        self._logprobs: dict[int, list[Logprob]] = {choice: [] for choice in range(sampling.n)}
        self._sent = dict.fromkeys(range(sampling.n), 0)
        self._completion_tokens = self._cached_tokens = self._accepted = self._rejected = 0
        self._prompt_logprobs: tuple[Logprob, ...] = ()
        reasoning = None if grammar else prompt.reasoning
        self._splitters = {
            choice: ReasoningSplitter(reasoning, call=None if calls is None else opening(calls))
            for choice in range(sampling.n)
            if reasoning is not None
        }
        self._thought = dict.fromkeys(self._splitters, 0)  # tokens of each choice's reasoning

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, image tokens included."""
        return len(self._prompt.prompt_ids)

    @property
    def done(self) -> bool:
        """Whether every choice has ended."""
        return not self._detokenizers

    def receive(self, output: TokenOutput) -> bool:
        """Take one token. True: a stop string ended this choice, so the engine should end it too."""
        if output.error is not None:
            self._detokenizers.clear()
            self.mailbox.close(output.error)
            return False
        detokenizer = self._detokenizers.get(output.choice)
        if detokenizer is None:  # a token that was under way when the choice ended
            return False
        text = self._take_token(output, detokenizer)
        finish = output.finish
        if detokenizer.stopped:
            finish = "stop"
        elif finish is not None:
            text += detokenizer.flush()
        stop = None if finish is None else self._stop_of(output, detokenizer)
        covered = detokenizer.covered
        if finish is not None and self._sampling.prompt_logprobs and not detokenizer.stopped:
            covered = len(self._logprobs[output.choice])
        self._emit(output.choice, text, finish, covered=covered, stop=stop)
        return detokenizer.stopped and output.finish is None

    def fail(self, error: Exception) -> None:
        """End the request with an error."""
        self._detokenizers.clear()
        self.mailbox.close(error)

    def _take_token(self, output: TokenOutput, detokenizer: Detokenizer) -> str:
        if output.token_id is None:
            return ""
        self._completion_tokens += 1
        self._accepted += output.accepted
        self._rejected += output.rejected
        self._cached_tokens = max(self._cached_tokens, output.cached_tokens)
        if self._completion_tokens == 1 and self._sampling.prompt_logprobs:
            self._prompt_logprobs = self._scored(output)
        ended = output.finish == "stop" and output.token_id in self._stop_ids
        # Who judges a prompt counts on a log-probability for each generated token, whichever it is.
        if output.logprob is not None and (not ended or self._sampling.prompt_logprobs):
            self._logprobs[output.choice].append(self._logprob(output))
        # The end-of-sequence token is counted but is not text.
        return "" if ended else detokenizer.push(output.token_id)

    def _stop_of(self, output: TokenOutput, detokenizer: Detokenizer) -> str | None:
        """The stop string, or the text of the stop token, that ended a choice; None for other ends."""
        if output.finish == "stop" and output.token_id in self._own_stop_ids:
            return self._tokenizer.token_bytes(output.token_id).decode("utf-8", errors="replace")
        return detokenizer.stop

    def _emit(
        self, choice: int, text: str, finish: FinishReason | None, *, covered: int, stop: str | None
    ) -> None:
        """Hand out text with the log-probabilities of the tokens it completes."""
        reasoning, splitter = "", self._splitters.get(choice)
        if splitter is not None:
            begun = splitter.thinking
            reasoning, text = splitter.push(text)
            if begun or splitter.thinking or reasoning:
                self._thought[choice] = covered
            if finish is not None:
                thought, rest = splitter.flush()
                reasoning, text = reasoning + thought, text + rest
        if finish is None:
            if text or reasoning:
                self._put(text, reasoning, choice, covered)
            return
        assert finish != "error", "an error output carries its error"
        del self._detokenizers[choice]
        if not self.done:
            self._put(text, reasoning, choice, covered, finish_reason=finish, stop=stop)
            return
        usage = Usage(self.prompt_tokens, self._completion_tokens, self._prompt.image_tokens)
        self._put(
            text,
            reasoning,
            choice,
            covered,
            finish_reason=finish,
            stop=stop,
            usage=usage,
            cached_tokens=self._cached_tokens,
            drafts=(self._accepted, self._rejected),
            reasoning_tokens=sum(self._thought.values()),
        )
        self.mailbox.close()

    def _put(self, text: str, reasoning: str, choice: int, covered: int, **last: Any) -> None:
        """Fill the mailbox. `last`: what stands in a choice's last delta alone."""
        kept = self._logprobs[choice]
        if kept:
            last["logprobs"] = tuple(kept[self._sent[choice] : covered])
            self._sent[choice] += len(last["logprobs"])
        if self._prompt_logprobs:
            last["prompt_logprobs"], self._prompt_logprobs = self._prompt_logprobs, ()
        self.mailbox.put(
            Delta(text, choice, reasoning=reasoning, completion_tokens=self._completion_tokens, **last)
        )

    def _logprob(self, token: TokenOutput | Sampled) -> Logprob:
        assert token.token_id is not None
        assert token.logprob is not None
        top = tuple(self._token_logprob(other, value) for other, value in token.top_logprobs)
        own = self._token_logprob(token.token_id, token.logprob)
        return Logprob(own.token, own.bytes, own.logprob, top)

    def _scored(self, output: TokenOutput) -> tuple[Logprob, ...]:
        """The prompt's tokens, the first of which nothing predicts."""
        first = Sampled(self._prompt.prompt_ids[0], math.nan)
        return tuple(map(self._logprob, (first, *output.prompt)))

    def _token_logprob(self, token_id: int, logprob: float) -> TokenLogprob:
        raw = self._tokenizer.token_bytes(token_id)
        return TokenLogprob(raw.decode("utf-8", errors="replace"), raw, logprob)


def fail_all(receivers: dict[str, Receiver], error: EngineError) -> None:
    """End every request with an error."""
    for receiver in receivers.values():
        receiver.fail(error)
    receivers.clear()


def deliver(
    abort: Callable[[str, int | None], object], receivers: dict[str, Receiver], output: TokenOutput
) -> None:
    """Hand a token to its request, in the engine's thread. What fails there ends that request alone.

    `abort` is told id and choice at a stop string; the id and None where all choices are to end.
    """
    receiver = receivers.get(output.request_id)
    if receiver is None:
        return
    try:
        if receiver.receive(output):
            abort(output.request_id, output.choice)
    except ENDINGS:
        raise
    except BaseException as error:  # what Rust panics at is no Exception
        logger.exception("an answer's text can't be made")
        receiver.fail(engine_failed(error))
        abort(output.request_id, None)
    if receiver.done:
        del receivers[output.request_id]
