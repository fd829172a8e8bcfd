"""Our engine in this process: prompts are prepared in the caller's thread, tokens made in the engine's."""

import logging
import weakref
from collections.abc import Mapping
from functools import partial
from itertools import count
from time import monotonic

from snugvl.backends.native.ahead import KernelsAhead
from snugvl.backends.native.kernel_processes import Ahead
from snugvl.backends.native.worker import EngineWorker
from snugvl.backends.receiver import Receiver
from snugvl.backends.streams import (
    ReceiverStream,
    deliver,
    fail_all,
)
from snugvl.core.checks import check_combination, check_pictures
from snugvl.core.messages import Capabilities, GoOn, Message, Request, ToolUse, going_on
from snugvl.core.sampling import check_scores
from snugvl.core.service import Load, Tokens
from snugvl.engine.engine import Engine
from snugvl.engine.request import EngineRequest
from snugvl.engine.sampling.grammar import TokenGrammar
from snugvl.errors import EngineError
from snugvl.inputs.grammar import GrammarCompiler
from snugvl.inputs.prompt import PreparedPrompt, Processor
from snugvl.inputs.reasoning import PLAIN, ThinkingDefault

logger = logging.getLogger(__name__)


class NativeBackend:
    """A loaded model on our engine. Safe to use from several threads and event loops."""

    def __init__(
        self,
        engine: Engine,
        processor: Processor,
        capabilities: Capabilities,
        thinking: ThinkingDefault = PLAIN,
        kernels: KernelsAhead | None = None,
    ) -> None:
        """`kernels`: the compiler of kernels ahead of their use, or None."""
        self._engine = engine
        self._thinking = thinking
        self._processor = processor
        self._capabilities = capabilities
        self._grammars = GrammarCompiler(
            processor.tokenizer, processor.config.text.vocab_size, processor.template.tool_form
        )
        self._receivers: dict[str, Receiver] = {}  # touched by the engine's thread only
        self._ids = count()
        self._kernels = kernels or KernelsAhead()
        self._graphs_ahead = False  # whether some are to be recorded before they are needed
        # The worker must not hold this backend: dropped without `close`, it stops its thread, also at exit.
        self._worker = EngineWorker(
            engine,
            partial(deliver, engine.abort, self._receivers),
            partial(fail_all, self._receivers),
            ended=engine.close,
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
        grammar = self._grammar(request, go_on)  # before the pictures, which cost more
        prompt = self._prompt(request, go_on)
        go_on()
        check_scores(request.sampling, None if request.prompt is None else len(prompt.prompt_ids))
        tokenizer = self._processor.tokenizer
        stop_ids = frozenset(tokenizer.eos_ids) | frozenset(request.sampling.stop_token_ids)
        engine_request = EngineRequest(
            request_id=str(next(self._ids)),
            prompt_ids=prompt.prompt_ids,
            sampling=request.sampling,
            vision=prompt.vision,
            stop_ids=stop_ids,
            deadline=None if request.deadline_s is None else monotonic() + request.deadline_s,
            grammar=grammar,
        )
        receiver = Receiver(
            tokenizer,
            prompt,
            request.sampling,
            stop_ids,
            calls=None if request.tools is None else self._processor.template.tool_form,
            grammar=request.formed,
        )
        try:
            self._worker.call(lambda: self._add(engine_request, receiver))
        except BaseException:  # Ctrl+C while this thread waited: it may have been accepted all the same
            self.abort(engine_request.request_id)
            raise
        return ReceiverStream(partial(self.abort, engine_request.request_id), receiver)

    def memory(self) -> Mapping[str, int]:
        """Bytes held, by component."""
        return self._worker.call(self._engine.memory)

    def stats(self) -> Load:
        """What the engine is doing."""
        return self._worker.call(self._stats)

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
            return Tokens(self._processor.count_prompt(prompt, most=most))
        tools_of = () if tools is None else tools.tools
        template = self._thinking.template(Request(prompt, tools=tools))
        counted = self._processor.count(prompt, tools=tools_of, template=template, most=most, go_on=go_on)
        return Tokens(counted.prompt_ids, counted.image_tokens)

    def detokenize(self, ids: tuple[int, ...]) -> str:
        """The text of token ids, control tokens included."""
        return self._processor.tokenizer.decode(list(ids), skip_special=False)

    def settle(self, ahead: Ahead) -> None:
        """Requests are taken: let what later ones would wait for be done beside them."""
        self._graphs_ahead = ahead == "graphs"

    def warm_up(self) -> bool:
        """What the first request with a grammar would stall all others for; then, if wished, CUDA graphs.

        One graph a call, and only when kernels are compiled: a request that comes meanwhile waits for it.
        """
        self._grammars.warm_up()
        if self._graphs_ahead and self._kernels.finished.is_set():
            try:
                self._graphs_ahead = self._worker.call(lambda: self._engine.capture_next())
            except Exception:
                logger.exception("a CUDA graph can't be recorded ahead; each is when it is needed")
                self._graphs_ahead = False
        return self._graphs_ahead

    def close(self) -> None:
        """End all requests with an error, and give back the engine's memory. Safe to call twice."""
        self._kernels.stop()
        self._grammars.close()
        self._worker.close()
        fail_all(self._receivers, EngineError("the model was closed while this request was running"))
        self._engine.close()  # once more: where a bug ended its thread, the error held tensors until now

    def abort(self, request_id: str) -> None:
        """End a request and free what it holds; unknown ids are ignored."""
        self._worker.post(lambda: self._abort(request_id))

    def _prompt(self, request: Request, go_on: GoOn) -> PreparedPrompt:
        # One token less than the context: an answer needs at least one.
        room = self._capabilities.context_tokens - 1
        if request.prompt is not None:
            return self._processor.prepare_prompt(request.prompt, max_tokens=room)
        tools = () if request.tools is None else request.tools.tools
        return self._processor.prepare(
            request.messages,
            tools=tools,
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

    def _stats(self) -> Load:
        self._engine.poll_memory()  # an engine that idles makes no steps, in which it would
        return self._engine.stats

    def _add(self, request: EngineRequest, receiver: Receiver) -> None:
        self._engine.add(request)
        self._receivers[request.request_id] = receiver

    def _abort(self, request_id: str) -> None:
        self._engine.abort(request_id)
        receiver = self._receivers.pop(request_id, None)
        if receiver is not None:
            receiver.mailbox.close()
