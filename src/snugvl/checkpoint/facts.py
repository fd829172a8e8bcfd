"""Facts of a model for the planner, the same for every family (tensors, KV layout, image-token rule), and the
material of a checkpoint that they are made of.

Read from `config.json`, the preprocessor's configuration and safetensors headers, never from weights.
The native engine's own, stricter view of what it runs is `architecture.ModelConfig`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Final, Literal, NamedTuple, Protocol

from snugvl.checkpoint.architecture import Mixture
from snugvl.core.formats import StoredPrecision

Role = Literal[
    "vision", "connector", "embedding", "lm_head", "linear", "expert", "norm", "scale", "scale8",
    "other",
]  # fmt: skip
FactSource = Literal["folder", "hub cache", "hub", "catalogue", "file"]
PREDICTOR: Final = "mtp."  # what names of a multi-token predictor's tensors begin with


class TensorFact(NamedTuple):
    """One stored tensor. `role` "linear": a matrix of a decoder layer; "scale": a quantised one's scales;
    "scale8": those of an 8-bit one among 4-bit ones.

    `loaded` False: stored, but not loaded (old rotary tables), or on request alone (Qwen3.5's mtp.*): it
    costs disk only.
    """

    name: str
    role: Role
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    loaded: bool = True


@dataclass(frozen=True, slots=True)
class KVLayer:
    """Memory that one decoder layer keeps of a sequence. `window`: tokens it looks back, or None for all.

    `state_bytes`: constant bytes a sequence of a layer with a recurrent state instead of (or beside) KV;
    `state_values`: values of the state that are kept in the cache's own format. `projected`, `values`:
    columns of a linear or gated layer's projections of a token, and of its attention's output; 0 for plain
    attention, where they follow from the heads. `value_heads`: number of them in a linear layer.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None
    state_bytes: int = 0
    state_values: int = 0
    projected: int = 0
    value_heads: int = 0
    values: int = 0

    @property
    def recurrent(self) -> bool:
        """Whether it has a state that doesn't grow with the context, and no keys and values."""
        return not self.kv_heads

    @property
    def channels(self) -> int:
        """Number of columns of a recurrent layer that its convolution runs over."""
        return self.projected - self.values

    def token_values(self, gpus: int = 1) -> int:
        """Number of values of a token's keys and values on one of `gpus` GPUs; heads fewer than these are
        kept on several."""
        return 2 * -(-self.kv_heads // gpus) * self.head_dim

    def state(self, itemsize: int) -> int:
        """Bytes of one sequence's state."""
        return self.state_bytes + self.state_values * itemsize


@dataclass(frozen=True, slots=True)
class TextFacts:
    """Sizes of a model's decoder.

    `experts_used`: number of experts that a token uses in a layer that is a mixture of experts; 0 without
    experts. `mixture`: sizes of such layers; None where the configuration doesn't give them.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    vocab_size: int
    max_position_embeddings: int
    kv_layers: tuple[KVLayer, ...]
    experts_used: int = 0
    mixture: Mixture | None = None


class ImageRule(Protocol):
    """A model's own way from an image's size to tokens, equal to transformers' processor."""

    @property
    def min_pixels(self) -> int: ...

    @property
    def max_pixels(self) -> int: ...

    def tokens(self, width: int, height: int, max_pixels: int | None = None) -> int:
        """Prompt tokens of an image, without the few wrapper tokens around it."""

    def patches(self, width: int, height: int, max_pixels: int | None = None) -> int:
        """Patches the vision tower works on."""


@dataclass(frozen=True, slots=True)
class VisionFacts:
    """The vision tower.

    `deepstack_levels`: extra encoder outputs per image token (0 for most families). `windowed`: most of its
    blocks see a window of the image (Qwen2.5-VL).
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int
    merge_size: int
    patch_dim: int
    deepstack_levels: int
    rule: ImageRule
    windowed: bool = False


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """Facts that only a GGUF has.

    Attributes:
        file_type: quantisation, such as "Q4_K_M".
        deepstack: number of embeddings of a picture's token beyond the first, each for one of the layers.
        file, projector: paths of the first part and the mmproj on this machine, or "".
        levels: indices of the tower's blocks after which a deepstack merger stands.
        why_not: why our own engine doesn't run it, or "".
        unlike: why an mmproj beside it doesn't belong to it, as a sentence, or "".
        kept: keys, values and states of each layer on our own engine; empty where it doesn't run it.
    """

    file_type: str
    deepstack: int = 0
    file: str = ""
    projector: str = ""
    levels: tuple[int, ...] = ()
    why_not: str = ""
    unlike: str = ""
    kept: tuple[KVLayer, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """One checkpoint.

    Attributes:
        name: Hub id or folder as the user gave it.
        family: "qwen3_vl", "qwen2_5_vl", "llama", …
        tensors: every stored tensor, header order.
        tied: lm_head is the embedding; a stored lm_head is then not loaded.
        quantization: precision as stored, or None for plain weights; in our own format that of the narrowest
            matrices.
        download_bytes: bytes of weight files and of the small files beside them.
        native: whether our own engine runs it.
        own: whether it is in our own format, which no other engine reads.
        gguf: facts that only a GGUF has; None for a safetensors checkpoint.
        native_positions: tokens of a context that our own engine runs, where they are fewer than the
            checkpoint allows (LongRoPE beyond its original context).
        predictor: keys and values of the multi-token predictor that the files carry, all of it; or None.
        predicts: whether the predictor is loaded.
        native_refusal: why our own engine doesn't run this checkpoint of a family that it runs, as a sentence
            without a full stop; empty where it does, or doesn't run the family.
    """

    name: str
    revision: str | None
    source: FactSource
    architecture: str
    family: str
    text: TextFacts
    vision: VisionFacts | None
    tensors: tuple[TensorFact, ...] = field(hash=False)  # thousands, for a key of a cache; the rest tells
    tied: bool
    quantization: StoredPrecision | None
    download_bytes: int
    native: bool
    native_positions: int | None = None
    own: bool = False
    gguf: GgufFacts | None = None
    predictor: KVLayer | None = None
    predicts: bool = False
    native_refusal: str = ""

    def with_predictor(self) -> "ModelFacts":
        """The facts with the multi-token predictor loaded, if there is one."""
        if self.predictor is None or self.predicts:
            return self
        tensors = tuple(
            tensor._replace(loaded=True) if tensor.name.startswith(PREDICTOR) else tensor
            for tensor in self.tensors
        )
        text = replace(self.text, kv_layers=(*self.text.kv_layers, self.predictor))
        return replace(self, text=text, tensors=tensors, predicts=True)

    @property
    def elements(self) -> int:
        """Number of stored elements, as the Hub counts them, a tied head included where it is stored."""
        return sum(prod(tensor.shape) for tensor in self.tensors)


class Stored(NamedTuple):
    """One tensor as a header has it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Material:
    """Raw material read of a checkpoint: configuration, image settings and headers.

    Attributes:
        where: the folder or the Hub id, named in errors.
        config: config.json, or a GGUF's metadata.
        images: the image processor's settings, or the metadata of a GGUF's mmproj; None where there are none.
        download_bytes: weight files and the small files beside them.
    """

    where: str
    source: FactSource
    revision: str | None
    config: Mapping[str, Any]
    images: Mapping[str, Any] | None
    tensors: tuple[Stored, ...]
    download_bytes: int
