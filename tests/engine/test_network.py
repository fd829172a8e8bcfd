"""The engine on the real network, fp32: in company, in chunks and preempted as alone and whole."""

from pathlib import Path

import pytest
import torch

from snugvl.config import EngineConfig
from snugvl.engine.engine import Engine
from snugvl.engine.request import EngineRequest, VisionItem
from snugvl.models.loader import load_model
from snugvl.sampling import SamplingParams
from tests.checkpoints import END, IMAGE, START
from tests.engine.toy import run, tokens


def requests() -> list[EngineRequest]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for name, sides in enumerate([(), ((4, 6),), ((2, 4), (8, 4), (6, 6))]):
        ids, items = list(range(10, 17 + name)), []
        for h, w in sides:
            patches = torch.randn(h * w, 3 * 2 * 16 * 16, generator=generator)
            items.append(VisionItem(patches, (1, h, w), f"{name}{h}{w}".encode()))
            ids += [START, *[IMAGE] * (h * w // 4), END, 20 + h]
        made.append(
            EngineRequest(str(name), tuple(ids), SamplingParams(max_tokens=24, logprobs=1), tuple(items))
        )
    return made


def test_company_chunks_and_preemption_change_no_token(tiny_untied: Path) -> None:
    model = load_model(tiny_untied, dtype=torch.float32, device=torch.device("cpu"))
    whole = EngineConfig(num_blocks=64, max_model_len=256)
    alone = [run(Engine(model, whole), item)[item.request_id] for item in requests()]
    assert len({tuple(tokens(answer)) for answer in alone}) == 3
    tight = EngineConfig(num_blocks=12, block_size=8, max_model_len=96, max_num_seqs=4, max_batched_tokens=7)
    here = Engine(model, tight)
    together = run(here, *requests())
    for item, right in zip(requests(), alone, strict=True):
        mine = together[item.request_id]
        assert tokens(mine) == tokens(right)
        assert [o.logprob for o in mine] == pytest.approx([o.logprob for o in right], abs=1e-4)
    assert here.stats.preemptions > 0
