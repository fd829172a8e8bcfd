"""A pocket-sized Qwen3.5 with its multi-token predictor, trained on an invented language in a minute or two.

    python training/predictor.py OUT [--steps 300] [--report FILE]
    python training/predictor.py OUT --trained --device cuda         # measures again, elsewhere

The language is made of words of three to eight tokens, each word followed by one of a few others: what comes
next is sure within a word and drawn behind it, as in text. The model (170,000 parameters, a gated delta rule
and full attention in turn) learns to continue it. Then its predictor learns from hidden states that no longer
change: of a token and the next one the token after that, and once more from its own output, as it is used.
`OUT` gets both as a checkpoint in the Hub's form, without a tokenizer.

In the end our engine continues prompts that it never saw, with `--speculation off` and `mtp`, and how many
tokens a step brings is printed. Every answer must be the same.

transformers has no predictor: it is put together from its parts here as vLLM's `qwen3_5_mtp.py` has it
(`models/networks.py` says what goes where). So it is the tests' oracle, too.
"""

import argparse
import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5RMSNorm,
)

WORDS, FOLLOWERS = 40, 3
FIRST, LAST = 8, 200  # token ids that words are made of
LENGTH = 48  # tokens of a line of text
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "tie_word_embeddings": True,
    "image_token_id": 300,
    "video_token_id": 301,
    "vision_start_token_id": 302,
    "vision_end_token_id": 303,
    "text_config": {
        "model_type": "qwen3_5_text",
        "dtype": "float32",
        "vocab_size": 320,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 160,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        "hidden_act": "silu",
        "attention_bias": False,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 2,
        "mtp_num_hidden_layers": 1,
    },
    "vision_config": {
        "model_type": "qwen3_5_vision",
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "in_channels": 3,
        "out_hidden_size": 64,
        "num_position_embeddings": 49,
        "hidden_act": "gelu_pytorch_tanh",
    },
}


class Predictor(nn.Module):
    """The module `mtp` of a Qwen3.5, of transformers' parts."""

    def __init__(self, model: Qwen3_5ForConditionalGeneration) -> None:
        super().__init__()
        config = model.config.text_config
        full = config.layer_types.index("full_attention")
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, full)])
        self.norm, self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = (
            Qwen3_5RMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3)
        )
        self._rotation = [model.model.language_model.rotary_emb]  # in a list: not a module of its own

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What it makes of hidden states and the embeddings of the tokens after them, `[lines, n, hidden]`.

        `positions`: `[3, lines, n]`.
        """
        both = torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)), -1)
        x = self.fc(both)
        count = x.shape[1]
        mask = torch.full((count, count), -torch.inf, dtype=x.dtype).triu(1)[None, None]
        x = self.layers[0](x, position_embeddings=self._rotation[0](x, positions), attention_mask=mask)
        result: torch.Tensor = self.norm(x)
        return result


class Language:
    """Words, and which may follow which."""

    def __init__(self, seed: int = 0) -> None:
        rng = random.Random(seed)
        self.words = [[rng.randrange(FIRST, LAST) for _ in range(rng.randint(3, 8))] for _ in range(WORDS)]
        self.followers = [rng.sample(range(WORDS), FOLLOWERS) for _ in range(WORDS)]

    def line(self, rng: random.Random, length: int = LENGTH) -> list[int]:
        """So many tokens from the middle of a text."""
        word, tokens = rng.randrange(WORDS), list[int]()
        while len(tokens) < length + 8:
            tokens += self.words[word]
            word = rng.choices(self.followers[word], (6, 3, 1))[0]
        start = rng.randrange(8)
        return tokens[start : start + length]


def trained(steps: int, seed: int = 0) -> tuple[Qwen3_5ForConditionalGeneration, Predictor]:
    """A model that continues the language, and its predictor."""
    torch.manual_seed(seed)
    language, rng = Language(seed), random.Random(seed)
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(**json.loads(json.dumps(CONFIG))))
    train_model(model, language, rng, steps)
    predictor = Predictor(model)
    train_predictor(model, predictor, language, rng, steps)
    return model, predictor


def batch(language: Language, rng: random.Random, lines: int = 24) -> torch.Tensor:
    """Token ids `[lines, LENGTH]`."""
    return torch.tensor([language.line(rng) for _ in range(lines)])


def train_model(
    model: Qwen3_5ForConditionalGeneration, language: Language, rng: random.Random, steps: int
) -> None:
    """Teach it the language."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for step in range(steps):
        ids = batch(language, rng)
        logits = model(input_ids=ids).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        _improve(loss, model, optimizer, schedule)
        if step % 100 == 0 or step + 1 == steps:
            print(f"model, step {step}: {loss.item():.3f} nats a token", flush=True)


def train_predictor(
    model: Qwen3_5ForConditionalGeneration,
    predictor: Predictor,
    language: Language,
    rng: random.Random,
    steps: int,
) -> None:
    """Teach it what the model, which stays as it is, will say: one token further, and two."""
    model.eval()
    optimizer = torch.optim.AdamW(predictor.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    for step in range(steps):
        ids = batch(language, rng)
        with torch.no_grad():
            hidden = model.model(input_ids=ids).last_hidden_state
            embedded = embed(ids)
        loss = torch.zeros(())
        for ahead in (1, 2):  # the second time from its own output
            rows = ids.shape[1] - ahead - 1
            positions = torch.arange(rows).expand(3, len(ids), -1)
            hidden = predictor(embedded[:, ahead : ahead + rows], hidden[:, :rows], positions)
            wanted = ids[:, ahead + 1 : ahead + 1 + rows]
            loss = loss + cross_entropy(head(hidden).flatten(0, 1), wanted.flatten())
        _improve(loss, predictor, optimizer, schedule)
        if step % 100 == 0 or step + 1 == steps:
            print(f"predictor, step {step}: {loss.item():.3f} nats for two tokens", flush=True)


def _improve(loss: torch.Tensor, module: nn.Module, optimizer: Any, schedule: Any) -> None:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()
    schedule.step()


def save(folder: Path, model: Qwen3_5ForConditionalGeneration, predictor: Predictor) -> None:
    """Write both as a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    state |= {f"mtp.{name}": tensor for name, tensor in predictor.state_dict().items()}
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))


def measure(
    folder: Path, language: Language, prompts: int, tokens: int, clients: int, device: str
) -> dict[str, Any]:
    """Answers of our engine without and with the predictor; how many tokens a step of one sequence brings."""
    from snugvl.core.config import EngineConfig
    from snugvl.core.sampling import SamplingParams
    from snugvl.engine.engine import Engine
    from snugvl.engine.request import EngineRequest
    from snugvl.models.loader import load_model

    model = load_model(folder, dtype=torch.float32, device=torch.device(device), predictor=True)
    rng = random.Random("prompts")
    asked = [language.line(rng, 16) for _ in range(prompts)]
    row: dict[str, Any] = {"clients": clients, "prompts": prompts, "tokens": tokens}
    for kind, temperature in (("greedy", 0.0), ("drawn", 1.0)):
        said: dict[str, dict[tuple[str, int], list[int | None]]] = {}
        for mode in ("off", "mtp"):
            config = EngineConfig(num_blocks=512, max_model_len=256, max_num_seqs=32, speculation=mode)
            if device != "cpu":
                config = replace(config, step_graph_bytes=256 << 20)
            engine = Engine(model, config)
            answers = said[mode] = {}
            waiting = list(enumerate(asked))
            while waiting or engine.has_work:
                while waiting and engine.stats.running + engine.stats.waiting < clients:
                    number, ids = waiting.pop(0)
                    sampling = SamplingParams(max_tokens=tokens, temperature=temperature, seed=number)
                    engine.add(EngineRequest(str(number), tuple(ids), sampling))
                for output in engine.step():
                    answers.setdefault((output.request_id, output.choice), []).append(output.token_id)
        stats = engine.stats
        row[f"{kind}: answers that differ"] = sum(said["off"][key] != said["mtp"][key] for key in said["off"])
        row[f"{kind}: right of the guessed"] = stats.accepted_tokens / max(stats.drafted_tokens, 1)
        # Of each sequence a step of its prompt, too, brings a token.
        steps = stats.generated_tokens - stats.accepted_tokens
        row[f"{kind}: tokens a step"] = stats.generated_tokens / steps
        row[f"{kind}: CUDA graphs"] = stats.graph_captures
    return row


def main() -> None:
    """Train, save, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--trained", action="store_true", help="OUT has it already")
    parser.add_argument("--device", default="cpu", help="that answers; it learns on a CPU")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--report", type=Path, help="JSON of what was measured")
    options = parser.parse_args()
    torch.set_num_threads(1)  # its tensors are too small to share
    begun = time.monotonic()
    if not options.trained:
        save(options.out, *trained(options.steps))
    seconds = time.monotonic() - begun
    asked = (options.prompts, options.tokens)
    rows = [measure(options.out, Language(), *asked, n, options.device) for n in (1, 8)]
    for row in rows:
        print(json.dumps(row, indent=1))
    print(f"trained in {seconds:.0f} s")
    if options.report is not None:
        options.report.write_text(
            json.dumps({"steps": options.steps, "seconds": seconds, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
