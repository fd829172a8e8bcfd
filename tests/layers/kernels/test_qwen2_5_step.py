"""A prompt and a decode step of a whole small Qwen2.5 by the kernels, against plain torch.

Without a GPU the kernels are interpreted, and tensors in host memory say that they are on one, so that the
layers choose as they do there. What other families would launch is asked in `tests/engine/family_steps.py`.
"""

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from snugvl.checkpoint.families import parse_config
from snugvl.core.config import EngineConfig
from snugvl.engine.memory import allocate
from snugvl.layers.attention import AttentionMetadata
from snugvl.layers.linear import Linear, RMSNorm
from snugvl.layers.weights import FormatName
from snugvl.models.batch import ForwardBatch
from snugvl.models.loader import Storage, choose_formats
from snugvl.models.networks import LoadableNetwork, network_of

SIZES = EngineConfig(num_blocks=4, max_num_seqs=1)
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 48,
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,  # so attention's output has a width that no kernel takes
    "intermediate_size": 128,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


class _Seeming(torch.Tensor):
    """In host memory, but code takes the path of a GPU's."""

    is_cuda = True


class _OnGpu(TorchFunctionMode):
    """Makes every tensor one of those."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        if type(made) is torch.Tensor:
            return made.as_subclass(_Seeming)
        return made


def network_in(storage: Storage) -> LoadableNetwork:
    network = network_of(parse_config(CONFIG, "config.json"))
    choose_formats(network, storage, None)
    torch.manual_seed(2)
    for module in network.modules():
        if isinstance(module, Linear):
            module.put(0, torch.randn(module.rows, module.columns) * 0.15)
            if module.bias is not None:
                module.bias.data.normal_()
        elif isinstance(module, RMSNorm):
            module.weight.data.normal_(1, 0.2)
    return network.requires_grad_(False).eval()


def steps(network: LoadableNetwork) -> torch.Tensor:
    """Logits behind a prompt of three tokens, and behind one more."""
    cache = allocate(network, SIZES)
    made, context = [], 0
    for ids in ([5, 7, 11], [13]):
        slots = torch.arange(context, context + len(ids))
        context += len(ids)
        attention = AttentionMetadata(
            query_lens=(len(ids),),
            context_lens=(context,),
            slot_mapping=slots,
            block_tables=torch.zeros(1, 1, dtype=torch.int32),
            block_size=SIZES.block_size,
        ).on_device()
        batch = ForwardBatch(torch.tensor(ids), slots.expand(3, -1), attention, torch.tensor([len(ids) - 1]))
        made.append(network.forward(batch, cache))
    return torch.cat(made)


@pytest.mark.skipif(torch.cuda.is_available(), reason="benchmarks/gpu_oracle.py does the same there")
@pytest.mark.parametrize("layers", ["bf16", "int4"])
def test_a_step_by_the_kernels_is_the_plain_one(
    layers: FormatName,
) -> None:
    network = network_in(Storage(layers))
    with torch.inference_mode():
        expected = steps(network)
        with _OnGpu():
            ours = steps(network)
    assert type(ours) is _Seeming
    torch.testing.assert_close(ours.as_subclass(torch.Tensor), expected, rtol=2e-4, atol=2e-4)
