"""transformers in this process: prompts are prepared in the caller's thread, tokens made in the engine's."""

import weakref
from collections.abc import Mapping
from functools import partial
from itertools import count
from time import monotonic

from snugvl.backends.protocol import Capabilities, GoOn, Message, Request, ToolUse, going_on
from snugvl.backends.receiver import Receiver
from snugvl.backends.service import Load, Tokens
from snugvl.backends.streams import ReceiverStream, check_combination, check_pictures, deliver, fail_all
from snugvl.backends.transformers.engine import TransformersEngine
from snugvl.backends.transformers.prompts import Preparer
from snugvl.backends.transformers.pulse import Pulse, Reading
from snugvl.backends.transformers.row import ModelPrompt, ModelRequest
from snugvl.backends.worker import EngineWorker
from snugvl.engine.sampling.grammar import TokenGrammar
from snugvl.errors import EngineError, RequestError
from snugvl.inputs.grammar import GrammarCompiler


class TransformersBackend:
    """A loaded model on transformers. Safe to use from several threads and event loops."""

    def __init__(
        self,
        engine: TransformersEngine,
        preparer: Preparer,
        capabilities: Capabilities,
        weights: Mapping[str, int],
    ) -> None:
        """`weights`: bytes of the weights, by row of the ledger."""
        self._engine = engine
        self._preparer = preparer
        self._capabilities = capabilities
        self._weights = dict(weights)
        self._grammars = GrammarCompiler(preparer.tokenizer, preparer.vocab_size, preparer.tool_form)
        self._receivers: dict[str, Receiver] = {}  # touched by the engine's thread only
        self._ids = count()
        pulse = Pulse(engine.model)
        self._memory = Reading(engine.memory, pulse)
        self._stats = Reading(lambda: engine.stats, pulse)
        # The worker must not hold this backend: dropped without `close`, it stops its thread, also at exit.
        self._worker = EngineWorker(
            engine, partial(deliver, engine.abort, self._receivers), partial(fail_all, self._receivers)
        )
        weakref.finalize(self, self._worker.close)

    @property
    def capabilities(self) -> Capabilities:
        """What this model can do."""
        return self._capabilities

    def submit(self, request: Request, go_on: GoOn = going_on) -> ReceiverStream:
        """Prepare and start a request; it runs whether or not the stream is read.

        Args:
            go_on: called while it is prepared; nothing is started where it raises.

        Raises:
            RequestError, ImageError: it is wrong, or too large; nothing was started.
            EngineError: the backend is closed, or its queue is full.
        """
        check_combination(request)
        check_pictures(request, self._capabilities)
        self._check_ids(request)
        grammar = self._grammar(request, go_on)  # before the pictures, which cost more
        prompt = self._prompt(request, go_on)
        go_on()
        tokenizer = self._preparer.tokenizer
        stop_ids = frozenset(tokenizer.eos_ids) | frozenset(request.sampling.stop_token_ids)
        model_request = ModelRequest(
            request_id=str(next(self._ids)),
            prompt=prompt,
            sampling=request.sampling,
            stop_ids=stop_ids,
            deadline=None if request.deadline_s is None else monotonic() + request.deadline_s,
            grammar=grammar,
            vocabulary=frozenset(prompt.prompt.prompt_ids),
        )
        receiver = Receiver(
            tokenizer,
            prompt.prompt,
            request.sampling,
            stop_ids,
            calls=None if request.tools is None else self._preparer.tool_form,
            grammar=request.grammar is not None,
        )
        self._worker.call(lambda: self._add(model_request, receiver))
        return ReceiverStream(partial(self.abort, model_request.request_id), receiver)

    def memory(self) -> Mapping[str, int]:
        """Bytes held, by component."""
        held = self._memory.now(self._worker.ask)
        return {"weights": sum(self._weights.values()), **held}

    def stats(self) -> Load:
        """What the engine is doing; as it was before the present step, where that lasts."""
        return self._stats.now(self._worker.ask)

    def tokenize(
        self, prompt: str | tuple[Message, ...], tools: ToolUse | None = None, go_on: GoOn = going_on
    ) -> Tokens:
        """Token ids of a bare prompt, or of a conversation through the chat template.

        Raises:
            RequestError: text that can't be tokenised, or a conversation the template refuses.
            RequestTooLarge: so much text that it can't fit into the context.
        """
        most = self._capabilities.context_tokens
        if isinstance(prompt, str):
            self._preparer.tokenizer.refuse_oversized(len(prompt), most, field="prompt")
            return Tokens(self._preparer.ids_of(prompt, special=True))
        tools_of = () if tools is None else tools.tools
        made = self._preparer.prepare(prompt, tools=tools_of, most=most, go_on=go_on).prompt
        return Tokens(made.prompt_ids, made.image_tokens)

    def detokenize(self, ids: tuple[int, ...]) -> str:
        """The text of token ids, control tokens included."""
        return self._preparer.tokenizer.decode(list(ids), skip_special=False)

    def warm_up(self) -> bool:
        """Do now what the first request with a grammar would wait for: see `GrammarCompiler`."""
        self._grammars.warm_up()
        return False

    def close(self) -> None:
        """End all requests with an error and stop the engine. Safe to call twice."""
        self._worker.close()
        self._grammars.close()
        fail_all(self._receivers, EngineError("the model was closed while this request was running"))

    def abort(self, request_id: str) -> None:
        """End a request and free what it holds; unknown ids are ignored."""
        self._worker.post(lambda: self._abort(request_id))

    def _check_ids(self, request: Request) -> None:
        vocab = self._preparer.vocab_size
        for token in request.sampling.logit_bias:
            if not 0 <= token < vocab:
                raise RequestError(
                    f"logit_bias has token id {token}; this model's vocabulary is 0 to {vocab - 1}",
                    field="logit_bias",
                )

    def _prompt(self, request: Request, go_on: GoOn) -> ModelPrompt:
        # One token less than the context: an answer needs at least one.
        room = self._capabilities.context_tokens - 1
        if request.prompt is not None:
            return self._preparer.prepare_prompt(request.prompt, max_tokens=room)
        tools = () if request.tools is None else request.tools.tools
        return self._preparer.prepare(request.messages, tools=tools, max_tokens=room, most=room, go_on=go_on)

    def _grammar(self, request: Request, go_on: GoOn) -> TokenGrammar | None:
        if request.tools is not None:
            return self._grammars.compile_tools(request.tools, go_on=go_on)
        if request.grammar is None:
            return None
        return self._grammars.compile(request.grammar, choices=request.sampling.n, go_on=go_on)

    def _add(self, request: ModelRequest, receiver: Receiver) -> None:
        self._engine.add(request)
        self._receivers[request.request_id] = receiver

    def _abort(self, request_id: str) -> None:
        self._engine.abort(request_id)
        receiver = self._receivers.pop(request_id, None)
        if receiver is not None:
            receiver.mailbox.close()
