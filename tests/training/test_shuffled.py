"""A checkpoint whose channels have another order computes the same."""

from pathlib import Path

import pytest
import torch
from training.releases import shuffle
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config


@pytest.mark.parametrize(("kind", "tied"), [(LlamaConfig, True), (Qwen2Config, False)])
def test_channels_in_another_order_compute_the_same(tmp_path: Path, kind: type, tied: bool) -> None:
    """Llama's and SmolLM2's; Qwen2's have biases, and a file may have a head of its own."""
    config = kind(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    model.save_pretrained(tmp_path)
    shuffle(tmp_path)
    moved = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.randint(0, 64, (1, 20))
    with torch.inference_mode():
        expected, found = model(ids).logits, moved(ids).logits
    assert (found - expected).norm() < 1e-4 * expected.norm()
    before, after = model.state_dict(), moved.state_dict()
    same = [name for name in before if torch.equal(before[name], after[name])]
    assert all(name.endswith(("inv_freq", "q_proj.bias", "k_proj.bias")) for name in same), same
