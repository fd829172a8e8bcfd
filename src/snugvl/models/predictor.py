"""The multi-token predictor (MTP) of Qwen3.5: from a hidden state and the next token to the token after it.

    hidden state of token i ── norm ─┐
                                     ├─ fc ─ a decoder layer ─ norm ─┬─ head ─ token i + 2, drafted
    embedding of token i + 1 ─ norm ─┘        its own KV at i        └─ "hidden state of token i + 1", drafted

Its hidden states are those behind the decoder's last norm. A longer draft goes on from its own output and its
own token, one place further. Embedding and head are the decoder's. Keys and values of place `i` follow from
the tokens up to `i + 1`: so a place has its entry when the token behind it is known, in the block of place
`i` and turned by its position. Whatever stands there, answers are the same: drafts are checked
(`engine/speculation.py`).

Of a large vocabulary only the first `HEAD_ROWS` rows of the head are read: a draft that reads all of 248,000
would take as long as a few layers do. A byte-pair tokenizer numbers its tokens in the order in which they
were merged, which is how often they came (Sennrich et al. 2016, https://arxiv.org/abs/1508.07909, section
3.2), so low numbers are the likeliest tokens without looking at any text. Others are never drafted, among
them control tokens.

Source: vLLM, `vllm/model_executor/models/qwen3_5_mtp.py` (the order of both halves, the norms, the layer) and
`vllm/v1/spec_decode/eagle.py` (shifted tokens, positions and what is fed back), Apache-2.0; multi-token
prediction, DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.2. transformers leaves `mtp.*` out.
"""

from dataclasses import replace
from typing import Final

import torch
from torch import nn

from snugvl.checkpoint.architecture import TextConfig
from snugvl.layers.attention import AttentionMetadata
from snugvl.layers.kv_cache import KVCache
from snugvl.layers.linear import Linear
from snugvl.models.decoder import Layer, norm_of
from snugvl.models.rope import rotation_of

HEAD_ROWS: Final = 32_768  # of the head that a draft reads


class Predictor(nn.Module):
    """The module `mtp` of a checkpoint."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        own = replace(config, kinds=(*config.kinds, "full"))  # its layer comes after the decoder's
        self.rope = config.rope
        self.pre_fc_norm_embedding = norm_of(config, config.hidden_size)
        self.pre_fc_norm_hidden = norm_of(config, config.hidden_size)
        # It sees no quantisation: one product, on which all drafts depend.
        self.fc = Linear(2 * config.hidden_size, config.hidden_size, quantises=False)
        self.layers = nn.ModuleList([Layer(own, config.num_layers)])
        self.norm = norm_of(config, config.hidden_size)

    def forward(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """What it makes of each token's hidden state and the next one's embedding, `[tokens, hidden]`.

        Args:
            embedded: `[tokens, hidden]`, of the tokens that follow.
            hidden: `[tokens, hidden]`, behind the decoder's last norm or from this.
            positions: `[3, tokens]`, of the tokens themselves, as are `metadata`'s slots.
        """
        both = torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)), dim=-1)
        x = self.fc(both)
        rotation = rotation_of(positions, self.rope, x.dtype)
        for layer in self.layers:
            x = layer(x, rotation, cache, metadata)
        result: torch.Tensor = self.norm(x)
        return result
