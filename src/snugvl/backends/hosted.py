"""A loaded model in this process: requests become prompts here, and tokens of its engine become answers.

Our own engine and transformers' are its subclasses; each says what it does with a request whose prompt is
ready. Prompts are prepared in the caller's thread, tokens are made in the engine's.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Generic

from snugvl.backends.engine_thread import Receiver
from snugvl.backends.inbox import OneAnswer
from snugvl.core.messages import Capabilities, Delta, GoOn, Request, going_on
from snugvl.core.sampling import check_scores
from snugvl.core.service import Load, Tokens, check_combination, check_pictures
from snugvl.engine.sampling.grammar import TokenGrammar
from snugvl.inputs.grammar import GrammarCompiler
from snugvl.inputs.prompt import P, PromptMaker, check_ids
from snugvl.inputs.reasoning import ThinkingDefault


class ReceiverStream(OneAnswer):
    """The answer of an engine in this process."""

    def __init__(self, abort: Callable[[], object], receiver: Receiver) -> None:
        super().__init__(receiver.prompt_tokens, abort)
        self._mailbox = receiver.mailbox

    def _next(self) -> Delta | None:
        return self._mailbox.get()

    async def _next_async(self) -> Delta | None:
        return await self._mailbox.get_async()

    def forward(self, put: Callable[[Delta], None], end: Callable[[Exception | None], None]) -> None:
        """Hand every delta to `put` and the end to `end`, in place of reading; see `Mailbox.forward`."""
        self._mailbox.forward(put, end)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedRequest(Generic[P]):
    """A request whose prompt is ready for the engine.

    Attributes:
        stop_ids: token ids that end an answer, unless `sampling.ignore_eos`.
        receiver: takes the tokens.
        deadline: `time.monotonic()` seconds after which it ends with `DeadlineExceeded`.
    """

    request: Request
    prompt: P
    stop_ids: frozenset[int]
    receiver: Receiver
    deadline: float | None
    grammar: TokenGrammar | None


class Hosted(ABC, Generic[P]):
    """A loaded model in this process. Safe to use from several threads and event loops.

    Beside what every `Backend` has it has what a server asks of an engine.
    """

    def __init__(
        self, prompts: PromptMaker[P], capabilities: Capabilities, thinking: ThinkingDefault
    ) -> None:
        """`thinking`: whether it thinks unless it is told."""
        self._prompts = prompts
        self._capabilities = capabilities
        self._thinking = thinking
        self._grammars = GrammarCompiler(prompts.tokenizer, prompts.vocab_size, prompts.tool_form)

    @property
    def capabilities(self) -> Capabilities:
        """Abilities and limits of the loaded model."""
        return self._capabilities

    def submit(self, request: Request, go_on: GoOn = going_on) -> ReceiverStream:
        """Prepare and start a request; it runs whether or not the stream is read. `go_on`: called while it is
        prepared; nothing is started where it raises.

        Raises:
            RequestError, ImageError: it is wrong, or too large; nothing was started.
            EngineError: the backend is closed, or its queue is full.
        """
        check_combination(request)
        check_pictures(request, self._capabilities)
        grammar = self._grammar(request, go_on)  # before the pictures, which cost more
        prompt = self._prompt(request, go_on)
        go_on()
        check_scores(request.sampling, None if request.prompt is None else len(prompt.prompt_ids))
        tokenizer = self._prompts.tokenizer
        stop_ids = frozenset(tokenizer.eos_ids) | frozenset(request.sampling.stop_token_ids)
        receiver = Receiver(
            tokenizer,
            prompt,
            request.sampling,
            stop_ids,
            calls=None if request.tools is None else self._prompts.tool_form,
            grammar=request.formed,
        )
        deadline = None if request.deadline_s is None else monotonic() + request.deadline_s
        abort = self._begin(PreparedRequest(request, prompt, stop_ids, receiver, deadline, grammar))
        return ReceiverStream(abort, receiver)

    @abstractmethod
    def memory(self) -> Mapping[str, int]:
        """Bytes held, by component."""

    @abstractmethod
    def stats(self) -> Load:
        """Work of the engine at this moment, and its counters since it was loaded."""

    def tokenize(self, request: Request, go_on: GoOn = going_on) -> Tokens:
        """Token ids of a request's prompt: a text as it is, or a conversation through the chat template.

        They may be more than the context holds, within reason.

        Raises:
            RequestError: text that can't be tokenised, or a conversation the template refuses.
            RequestTooLarge: so much text that it can't fit into the context.
        """
        most = self._capabilities.context_tokens
        if isinstance(request.prompt, str):
            return Tokens(self._prompts.count_prompt(request.prompt, most=most))
        tools = () if request.tools is None else request.tools.tools
        template = self._thinking.template(request)
        counted = self._prompts.count(
            request.messages, tools=tools, template=template, most=most, go_on=go_on
        )
        return Tokens(counted.prompt_ids, counted.image_tokens)

    def detokenize(self, ids: tuple[int, ...]) -> str:
        """The text of token ids, control tokens included.

        Raises:
            RequestError: the model has no such token.
        """
        check_ids(ids, self._prompts.vocab_size, field="tokens")
        return self._prompts.tokenizer.decode(list(ids), skip_special=False)

    def warm_up(self) -> bool:
        """Do some of what later requests would wait for, while none waits; returns whether more is left."""
        self._grammars.warm_up()
        return False

    @abstractmethod
    def close(self) -> None:
        """End all requests with an error, and give back the engine's memory. Safe to call twice."""

    @abstractmethod
    def _begin(self, ready: PreparedRequest[P]) -> Callable[[], object]:
        """Give a request to the engine; what aborts it.

        Raises:
            RequestError, RequestTooLarge: the engine can't take it, ever.
            EngineError: the engine is closed, or its queue is full.
        """

    def _prompt(self, request: Request, go_on: GoOn) -> P:
        # One token less than the context: an answer needs at least one.
        room = self._capabilities.context_tokens - 1
        if request.prompt is not None:
            return self._prompts.prepare_prompt(request.prompt, max_tokens=room)
        return self._prompts.prepare(
            request.messages,
            tools=() if request.tools is None else request.tools.tools,
            template=self._thinking.template(request),
            max_tokens=room,
            go_on=go_on,
        )

    def _grammar(self, request: Request, go_on: GoOn) -> TokenGrammar | None:
        if request.tools is not None:
            return self._grammars.compile_tools(request.tools, choices=request.sampling.n, go_on=go_on)
        if request.grammar is None:
            return None
        return self._grammars.compile(request.grammar, choices=request.sampling.n, go_on=go_on)
