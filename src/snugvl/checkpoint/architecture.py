"""What our engine must know of a network to build it: frozen, checked values, the same for every family.

`checkpoint/configs/` reads them from `config.json`, one module a family. The planner's wider and looser
view, of models that other engines run, is `checkpoint/facts.py`.
"""

import math
from dataclasses import dataclass
from typing import Literal

LayerKind = Literal["full", "sliding", "linear"]
"""How a decoder layer looks back: at everything, at a window, or through a recurrent state."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding.

    Attributes:
        theta: base of the frequencies.
        dims: values of each head that are rotated, the first ones.
        sections: rotary frequencies for time, height and width (M-RoPE), or None for plain positions.
        interleaved: whether the sections alternate (Qwen3-VL) or follow one another (Qwen2.5-VL).
    """

    theta: float
    dims: int
    sections: tuple[int, int, int] | None = None
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class TextConfig:
    """The decoder.

    Attributes:
        qkv_bias, o_bias: whether the attention's projections have biases.
        qk_norm: whether queries and keys are normed, head by head.
        kinds: of each layer.
        window: tokens that a "sliding" layer sees, its own included; None without such layers.
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

    @property
    def kv_layers(self) -> int:
        """Layers that keep keys and values."""
        return sum(kind != "linear" for kind in self.kinds)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values that one token occupies over all layers."""
        return 2 * self.kv_layers * self.num_kv_heads * self.head_dim * itemsize


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The vision tower. Sizes in pixels for `patch_size`, in patches for `spatial_merge_size`."""

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
    """Ids of the tokens that stand for a picture's or a video's encoding, and of those around them."""

    image: int
    video: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """The official FP8 layout: one `weight_scale_inv` per block of `rows` × `columns` weights."""

    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the network needs to be built, as the checkpoint says it.

    `vision` and `vision_tokens` are both None for a model that only reads text.
    """

    architecture: str
    text: TextConfig
    vision: VisionConfig | None
    vision_tokens: VisionTokens | None
    tie_word_embeddings: bool
    dtype: str
    quantization: Fp8Blocks | None = None

    @property
    def placeholders(self) -> tuple[int, ...]:
        """Ids of the tokens whose embeddings come from the vision tower."""
        tokens = self.vision_tokens
        return () if tokens is None else (tokens.image, tokens.video)

    @property
    def encoder_width(self) -> int:
        """Values the vision encoder hands over per image token: its output and each deepstack level."""
        return 0 if self.vision is None else self.text.hidden_size * (1 + len(self.vision.deepstack_layers))
