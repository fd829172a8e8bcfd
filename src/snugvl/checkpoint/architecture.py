"""The architecture of a network, as our engine builds it: frozen, checked values, the same for every family.

`checkpoint/families/` reads them from `config.json`, one module a family. The planner's wider and looser
view, of models that other engines run, is `checkpoint/facts.py`.
"""

import math
from dataclasses import dataclass, replace
from typing import Final, Literal

from snugvl.core.formats import IntegerPrecision, integer_of
from snugvl.errors import RequestError

LayerKind = Literal["full", "sliding", "linear"]
"""How a decoder layer looks back: at everything, at a window, or through a recurrent state."""


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Linear scaling: every frequency is divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling: low frequencies divided by `factor`, high ones kept, those between interpolated.

    A frequency is low when it turns fewer than `low` times in `original` tokens, high from `high` times.
    """

    factor: float
    low: float
    high: float
    original: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (https://arxiv.org/abs/2309.00071).

    Frequencies that turn more than `fast` times in `original` tokens are kept, those that turn fewer than
    `slow` times divided by `factor`. Cosine and sine are multiplied by `magnitude`.
    """

    factor: float
    original: int
    fast: float
    slow: float
    truncate: bool
    magnitude: float


@dataclass(frozen=True, slots=True)
class LongRope:
    """LongRoPE (https://arxiv.org/abs/2402.13753) with its short factors, one divisor per frequency.

    The long ones replace them beyond the original context, also for tokens that are in the cache already, so
    a prompt's meaning would change with its answer's length; our engine stays within that context.
    """

    factors: tuple[float, ...]
    magnitude: float


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | LongRope


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding.

    Attributes:
        theta: base of the frequencies.
        dims: values of each head that are rotated, the first ones.
        sections: rotary frequencies for time, height and width (M-RoPE), or None for plain positions.
        interleaved: whether the sections alternate (Qwen3-VL) or follow one another (Qwen2.5-VL).
        scaling: how the frequencies differ from those of `theta`.
    """

    theta: float
    dims: int
    sections: tuple[int, int, int] | None = None
    interleaved: bool = False
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Gated delta-rule attention: sizes of its heads, and of the convolution before them.

    `tiled`: value head `i` has key head `i mod key_heads`, as in GGUF files; else as many in a row share one.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    tiled: bool = False

    @property
    def values(self) -> int:
        """Width of all value heads together."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: queries, keys and values side by side."""
        return 2 * self.key_heads * self.key_dim + self.values


@dataclass(frozen=True, slots=True)
class Mixture:
    """Mixture-of-experts layers: a router chooses `used` of `count` gated MLPs for each token.

    Attributes:
        width: intermediate size of an expert.
        shared: intermediate size of the gated MLP that every token passes beside them; 0 without one.
        layers: which of the decoder's layers are such; others have an MLP.
    """

    count: int
    used: int
    width: int
    shared: int
    layers: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class TextConfig:
    """The decoder.

    Attributes:
        qkv_bias, o_bias: whether the attention's projections have biases.
        qk_norm: whether queries and keys are normed, head by head.
        kinds: kind of each layer.
        window: tokens that a "sliding" layer sees, its own included; None without such layers.
        fused: whether the checkpoint stores queries, keys and values as one tensor, gate and up as another.
        max_position_embeddings: tokens that our engine runs; the checkpoint may allow more (`LongRope`).
        linear: sizes of the "linear" layers; None without such.
        gated: whether the query matrix also makes a gate for attention's output.
        norm_offset: added to the weights of the norms; 1 where they are stored as their distance from 1.
        predictors: layers of the multi-token predictor that is loaded (`models/networks.py`), each with keys
            and values of its own behind those of the decoder.
        mixture: of the layers that are mixtures of experts; None without such.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: Rope
    kinds: tuple[LayerKind, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    fused: bool = False
    linear: LinearAttention | None = None
    gated: bool = False
    norm_offset: float = 0.0
    predictors: int = 0
    mixture: Mixture | None = None

    def mixture_of(self, layer: int) -> Mixture | None:
        """The mixture that a layer has instead of an MLP, or None; the predictor's is the last layer's."""
        if self.mixture is None:
            return None
        return self.mixture if self.mixture.layers[min(layer, self.num_layers - 1)] else None

    def window_of(self, layer: int) -> int | None:
        """Number of tokens that a layer sees, its own included; None for all."""
        return self.window if self.kinds[layer] == "sliding" else None

    def place_of(self, layer: int) -> int:
        """A layer's index among the layers with keys and values, or among those with a recurrent state."""
        linear = self.kinds[layer] == "linear"
        return sum((kind == "linear") == linear for kind in self.kinds[:layer])

    @property
    def kv_layers(self) -> int:
        """Number of layers that keep keys and values, those of the predictor included."""
        return sum(kind != "linear" for kind in self.kinds) + self.predictors

    @property
    def linear_layers(self) -> int:
        """Number of layers with a recurrent state."""
        return self.kinds.count("linear")


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The vision tower. Sizes in pixels for `patch_size`, in patches for `spatial_merge_size`.

    Attributes:
        window: side of a window in patches, outside of which a patch doesn't see; None where all blocks see
            a whole frame.
        full_blocks: indices of the blocks that see a whole frame all the same.
        tokens_per_second: positions on the axis of time that a second of video takes; None where the prompt
            has the times as text.
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    out_hidden_size: int
    num_position_embeddings: int
    deepstack_layers: tuple[int, ...]
    hidden_act: str
    rope_theta: float
    window: int | None = None
    full_blocks: tuple[int, ...] = ()
    tokens_per_second: int | None = None

    @property
    def patch_dim(self) -> int:
        """Values in one flattened patch: channels × frames × height × width."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def position_grid(self) -> int:
        """Side of the square grid of learned position embeddings."""
        return math.isqrt(self.num_position_embeddings)


@dataclass(frozen=True, slots=True)
class VisionTokens:
    """Ids of the placeholder tokens of pictures and videos, and of the tokens around them."""

    image: int
    video: int
    start: int
    end: int


WHOLE_ROW: Final = 1 << 40  # columns; no row is longer


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """FP8 weights: one `weight_scale_inv` per block of `rows` × `columns` of them; `WHOLE_ROW`: of all
    columns."""

    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class PackedInt4:
    """Pre-quantized weights of few bits: `group` columns of a row share a scale and a zero point.

    The files' tensors tell which matrices are stored so; others stay as they are. `symmetric`: files need no
    zero points, code 8 means 0. `offset`: the number added to stored zero points. `bits`: 4; matrices stored
    in `others` have 8, as their shapes tell. In our own format ("snugvl") `bits` and `group` are those of the
    narrowest matrices; shapes tell each one's.
    """

    method: Literal["awq", "gptq", "compressed-tensors", "snugvl"]
    group: int
    symmetric: bool = False
    offset: int = 0
    bits: int = 4
    others: tuple["PackedInt4", ...] = ()

    @property
    def weights(self) -> IntegerPrecision:
        """The precision of its narrowest matrices in memory."""
        return integer_of(self.bits)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything needed to build the network, as the checkpoint has it.

    `vision` and `vision_tokens` are both None for a model that only reads text. One that sees, but is served
    without its tower (`--language-only`), keeps its tokens: no prompt may hold them. `predictor`: whether the
    checkpoint has a multi-token predictor, which is loaded on request alone (`with_predictor`).
    """

    architecture: str
    text: TextConfig
    vision: VisionConfig | None
    vision_tokens: VisionTokens | None
    tie_word_embeddings: bool
    dtype: str
    quantization: Fp8Blocks | PackedInt4 | None = None
    predictor: bool = False

    def with_predictor(self) -> "ModelConfig":
        """The configuration with its multi-token predictor loaded.

        Raises:
            RequestError: it has none that our engine runs.
        """
        if not self.predictor:
            raise no_predictor(self.architecture)
        return replace(self, text=replace(self.text, predictors=1))

    @property
    def placeholders(self) -> tuple[int, ...]:
        """Ids of the tokens whose embeddings come from the vision tower."""
        tokens = self.vision_tokens
        return () if tokens is None else (tokens.image, tokens.video)


def no_predictor(model: str) -> RequestError:
    """The error for `--speculation mtp` on a model without a predictor that our engine runs."""
    return RequestError(
        f"{model} has no multi-token predictor (tensors mtp.*, one layer) that speculation 'mtp' needs; "
        "use 'ngram', which needs nothing, or 'off'",
        field="speculation",
    )
