"""One side of a comparison: a model in some format, its prompts, and its network layer by layer."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from PIL import Image

from snugvl.backends.native.loading import capabilities_of, storage_of
from snugvl.backends.place import TargetDevice, dtype_of
from snugvl.checkpoint.architecture import PackedInt4
from snugvl.checkpoint.catalogue import thinks_about_pictures
from snugvl.checkpoint.facts import ModelFacts
from snugvl.checkpoint.families import read_config
from snugvl.checkpoint.locate import locate
from snugvl.checkpoint.read import facts_of
from snugvl.core.formats import Precision
from snugvl.core.messages import Capabilities
from snugvl.core.options import LoadOptions
from snugvl.engine.admission import check_prompt
from snugvl.engine.request import CheckedPrompt, EngineRequest
from snugvl.engine.sampling.grammar import TokenGrammar
from snugvl.errors import RequestError
from snugvl.fidelity.variants import Question
from snugvl.inputs.grammar import GrammarCompiler
from snugvl.inputs.prompt import Processor, check_length
from snugvl.inputs.reasoning import ThinkingDefault
from snugvl.models.layered import LayeredNetwork
from snugvl.models.loader import Storage, open_checkpoint
from snugvl.planner.footprint.weights import keeps_fp8
from snugvl.planner.inventory import Inventory, inventory
from snugvl.planner.settings import Settings


@dataclass(frozen=True, slots=True, eq=False)
class PreparedQuestion:
    """A question about a picture, as one model reads it; `grammar`: the form of its answer."""

    prompt: CheckedPrompt
    grammar: TokenGrammar | None


@dataclass(frozen=True, slots=True)
class Extent:
    """Sizes of a prompt: tokens, those of pictures, and patches of the vision tower."""

    tokens: int
    image_tokens: int
    patches: int


class Participant:
    """A model in one format.

    Attributes:
        settings: its formats; the reference's are those of its files.
        dtype: type of activations.
        max_pixels: larger pictures are scaled down to this many.
    """

    def __init__(
        self, options: LoadOptions, settings: Settings, place: TargetDevice, max_pixels: int | None = None
    ) -> None:
        """
        Raises:
            CheckpointNotFound, CheckpointError, UnsupportedModel: about the checkpoint.
        """
        self.folder: Path = locate(options.model)
        self.config = read_config(self.folder)
        self.facts = facts_of(str(self.folder), offline=True)
        self.settings, self.max_pixels = settings, max_pixels
        self.dtype = dtype_of(options.dtype, place, wide=settings.itemsize == 4)
        self.processor = Processor.from_folder(self.folder, self.config)
        self.capabilities: Capabilities = replace(
            capabilities_of(self.config, self.processor, settings, self.dtype, parameters=0),
            model=options.model,
            context_tokens=self.config.text.max_position_embeddings,
        )
        self._thinking = ThinkingDefault(options.thinking, thinks_about_pictures(self.facts.family))
        tokenizer, form = self.processor.tokenizer, self.processor.template.tool_form
        self._grammars = GrammarCompiler(tokenizer, self.config.text.vocab_size, form)

    @property
    def inventory(self) -> Inventory:
        """The model's tensors, as the planner counts them."""
        return inventory(self.facts)

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return frozenset(self.processor.tokenizer.eos_ids)

    def prepared(self, question: Question, image: Image.Image) -> PreparedQuestion:
        """The prompt of a question about a picture.

        Raises:
            ImageError, RequestError: the picture or the question can't be used.
        """
        request = question.request(image, self.capabilities, self.max_pixels)
        most = self.capabilities.context_tokens - 1
        prompt = self.processor.prepare(
            request.messages, template=self._thinking.template(request), max_tokens=most
        )
        grammar = None if request.grammar is None else self._grammars.compile(request.grammar)
        checked = check_prompt(EngineRequest("", prompt.prompt_ids, vision=prompt.vision), self.config)
        return PreparedQuestion(checked, grammar)

    def grammar(self, question: Question, size: tuple[int, int]) -> TokenGrammar | None:
        """The grammar of the question's answer; None: any text."""
        request = question.request(Image.new("1", size), self.capabilities, self.max_pixels)
        return None if request.grammar is None else self._grammars.compile(request.grammar)

    def extent(self, question: Question, size: tuple[int, int]) -> Extent:
        """Sizes of the prompt about a picture of that size, without looking at a pixel.

        Raises:
            RequestError: the question can't be asked, or the prompt is longer than the model's context.
        """
        request = question.request(Image.new("1", size), self.capabilities, self.max_pixels)
        most = self.capabilities.context_tokens - 1
        counted = self.processor.count(request.messages, template=self._thinking.template(request), most=most)
        check_length(len(counted.prompt_ids) + question.limit, counted.image_tokens, most, "messages")
        merge = 1 if self.config.vision is None else self.config.vision.spatial_merge_size
        return Extent(len(counted.prompt_ids), counted.image_tokens, counted.image_tokens * merge**2)

    def text(self, tokens: tuple[int, ...]) -> str:
        """Text of an answer, without the token that ends it."""
        ends = self.ends
        return self.processor.tokenizer.decode([token for token in tokens if token not in ends]).strip()

    def storage(self) -> Storage:
        """The model's formats, for a pass that keeps no weights."""
        whole = storage_of(self.settings)
        return replace(whole, streamed=None, embedding="gpu", expert_slots=None)

    def network(self, device: torch.device, told: Callable[[int], None]) -> LayeredNetwork:
        """The model's network, with one part in memory at a time; `told`: see `LayeredNetwork`."""
        opened = open_checkpoint(self.folder, dtype=self.dtype, storage=self.storage())
        return LayeredNetwork(opened, device, told=told)

    def close(self) -> None:
        """End the processes that were started."""
        self._grammars.close()


def published(options: LoadOptions, facts: ModelFacts, place: TargetDevice) -> Settings:
    """Settings of a checkpoint in its files' own format. Activations have 16 bits on a GPU, and 32 on a CPU.

    Raises:
        RequestError: it reads no pictures.
    """
    if facts.vision is None:
        raise RequestError(
            f"{options.model} reads no pictures; compare a vision-language model", field="model"
        )
    weights: Precision = "bf16"
    if keeps_fp8(inventory(facts)):
        weights = "fp8"
    elif isinstance(form := read_config(locate(options.model)).quantization, PackedInt4):
        weights = form.weights
    wide = options.dtype == "float32" or (options.dtype == "auto" and place.device.type == "cpu")
    return Settings("native", weights, float32=wide)


def check_tokens(reference: Participant, other: Participant) -> None:
    """Refuse a model with another vocabulary: distributions over different tokens can't be compared.

    Raises:
        RequestError: names both models.
    """
    ours, theirs = reference.processor.tokenizer, other.processor.tokenizer
    same = reference.config.text.vocab_size == other.config.text.vocab_size
    if not same or ours.serialized() != theirs.serialized() or ours.eos_ids != theirs.eos_ids:
        raise RequestError(
            f"{other.capabilities.model} has other tokens than {reference.capabilities.model}; token by "
            "token, only models with the same tokenizer can be compared",
            field="model",
        )
