"""Pocket as GGUF and mmproj: every weight arrives, and llama.cpp sees with them what our engine sees."""

import base64
import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file
from training.gguf_export import export

from snugvl.checkpoint.locate import POCKET, locate
from snugvl.checkpoint.read import facts_of

PICTURE = Path(__file__).parents[2] / "examples/images/shapes.png"
SEES = """
import json, os, sys, urllib.request, xllamacpp as x
given = json.loads(sys.stdin.read())
params = x.CommonParams()
params.model.path, params.mmproj.path, params.n_ctx = given["model"], given["mmproj"], 1024
params.image_min_tokens, params.image_max_tokens, params.verbosity = 52, 72, 1
server = x.Server(params)
request = urllib.request.Request(
    server.listening_address + "/v1/chat/completions",
    json.dumps(given["body"]).encode(), {"Content-Type": "application/json"},
)
print(json.loads(urllib.request.urlopen(request).read())["choices"][0]["message"]["content"], flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    out = tmp_path_factory.mktemp("gguf") / "pocket.gguf"
    beside = export(str(locate(POCKET)), out)
    assert beside is not None
    return out, beside


def test_every_weight_arrives(files: tuple[Path, Path]) -> None:
    theirs = {each.name: each for path in files for each in gguf.GGUFReader(path).tensors}
    mine = load_file(locate(POCKET) / "model.safetensors")
    assert sum(int(each.n_elements) for each in theirs.values()) == sum(
        each.numel() for each in mine.values()
    )
    pairs = {
        "token_embd.weight": mine["model.language_model.embed_tokens.weight"],
        "blk.3.attn_k_norm.weight": mine["model.language_model.layers.3.self_attn.k_norm.weight"],
        "blk.5.ffn_down.weight": mine["model.language_model.layers.5.mlp.down_proj.weight"],
        "v.patch_embd.weight.1": mine["model.visual.patch_embed.proj.weight"][:, :, 1],
        "v.deepstack.3.fc2.bias": mine["model.visual.deepstack_merger_list.1.linear_fc2.bias"],
        "mm.2.weight": mine["model.visual.merger.linear_fc2.weight"],
    }
    for name, value in pairs.items():
        wanted = value.float().numpy().astype(theirs[name].data.dtype)
        assert np.array_equal(theirs[name].data, wanted), name


def test_its_facts_are_those_of_the_checkpoint(files: tuple[Path, Path]) -> None:
    ours, theirs = facts_of(POCKET), facts_of(str(files[0]))
    assert theirs.text == ours.text
    assert theirs.family == ours.family
    assert ours.vision is not None
    assert theirs.vision is not None
    assert theirs.vision.deepstack_levels == ours.vision.deepstack_levels == 2
    assert theirs.vision.rule.tokens(256, 256) == ours.vision.rule.tokens(256, 256, 73728)


@pytest.mark.extended
def test_llama_cpp_sees_what_our_engine_sees(files: tuple[Path, Path]) -> None:
    pytest.importorskip("xllamacpp")
    url = "data:image/png;base64," + base64.b64encode(PICTURE.read_bytes()).decode()
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "Describe this image in one sentence."},
    ]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 60}
    given = {"model": str(files[0]), "mmproj": str(files[1]), "body": body}
    run = subprocess.run(
        [sys.executable, "-c", SEES], input=json.dumps(given), capture_output=True, text=True, timeout=300
    )
    ours = subprocess.run(
        [sys.executable, "-m", "snugvl", "caption", "--model", "pocket", str(PICTURE)],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert run.stdout.strip() == ours.stdout.strip()
