"""Drawing, training, resuming and exporting, at toy size."""

import dataclasses
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from training.pocket import geometry, network, packing, render, scenes, tokens, train
from training.pocket.export import checkpoint, export, restored
from training.pocket.paint import paint

# A toy of the same shape; 3598 is the size of the shipped vocabulary.
SIZE = network.Size(
    3598,
    vision_hidden=64,
    vision_layers=2,
    vision_heads=1,
    vision_inner=64,
    deepstack=(0,),
    hidden=64,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=32,
    inner=64,
    sections=(6, 5, 5),
)
PLAN = {
    "words": 200,
    "batch": 2,
    "workers": 0,
    "minutes": 5.0,
    "warmup": 2,
    "save_every": 1e9,
    "textures": 2,
    "copies": 0,  # test_world.py has them: each trainer would take seconds to draw them
}


@pytest.fixture(scope="module")
def trainer(folder, tmp_path_factory):
    torch.set_num_threads(1)
    return train.Trainer(train.Plan(out=tmp_path_factory.mktemp("run"), pack=folder, **PLAN), SIZE)


@pytest.fixture(scope="module")
def batch(trainer):
    return trainer._validation(1)[0]


def test_both_painters_agree(trainer, drawn, pool):
    packer = packing.Packer(tokens.Encoder(trainer.pack.tokenizer))
    plain = [
        dataclasses.replace(s, background=dataclasses.replace(s.background, pattern="plain", noise=0.0))
        for s in drawn
        if s.shown and all(t.kind == "shape" and t.angle == int(t.angle) for t in s.things) and s.width > 200
    ][:4]
    rows = packer.batch(plain, random.Random(0))
    patches = trainer.render(rows)
    for i, scene in enumerate(plain):
        grid = geometry.token_grid(scene.width, scene.height)
        mine = render.unpatch(patches[i], *grid)
        theirs = paint(scene, (), random.Random(1), {}).resize(mine.shape[1::-1], Image.Resampling.BICUBIC)
        assert np.abs(mine.astype(float) - np.asarray(theirs)).mean() < 5


def test_the_longest_strip_fits_its_row(trainer, drawn):
    scene = dataclasses.replace(drawn[0], width=778, height=62, things=())  # three rows of 26 tokens
    packer = packing.Packer(tokens.Encoder(trainer.pack.tokenizer))
    rows, columns = geometry.token_grid(scene.width, scene.height)
    ids, parts, positions, spans = packer.row(scene, random.Random(0))
    assert rows * columns == 78
    assert (ids == packer.image).sum() == 78
    assert ids[packing.TEXT - 1] == packer.close
    assert (parts[: packing.TEXT] == 0).sum() == packing.HEAD + 78 + 1
    assert positions[2].max() >= packing.HEAD + 25
    assert spans


@pytest.mark.extended
def test_every_core_but_one_draws_scenes(tmp_path):
    """`nproc` says OMP_NUM_THREADS: the script once trained with no workers for that reason."""
    given = tmp_path / "given"
    fake = tmp_path / "python3"
    fake.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exec "{sys.executable}" "$@"\necho "$@" > "{given}"\nexit 3\n'
    )
    fake.chmod(0o755)
    script = Path(train.__file__).parent / "gpu.sh"
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(
        [script, tmp_path / "out", "9"], env=os.environ | {"PATH": path}, check=False, capture_output=True
    )
    words = given.read_text().split()
    gpus, cores = max(1, torch.cuda.device_count()), len(os.sched_getaffinity(0))
    assert int(words[words.index("--workers") + 1]) == max(1, (cores - gpus) // gpus)


def test_a_part_sees_only_the_picture_and_itself(trainer, batch):
    mask = trainer.model.masks(batch, False)[1][0, 0]
    parts = batch.parts[0]
    second = int((parts == 2).nonzero()[0]) if (parts == 2).any() else None
    if second is not None:
        assert not mask[second, (parts == 1)].any()
        assert mask[second, (parts == 0)].all()
    assert mask.diagonal().all()


def test_training_lowers_the_loss(trainer, batch):
    losses = [float(trainer.train_step(batch)) for _ in range(4)]
    assert losses[-1] < losses[0]


@pytest.mark.extended
def test_resume_goes_on_exactly(folder, tmp_path):
    def run(out, steps, resume=False):
        plan = train.Plan(out=tmp_path / out, pack=folder, steps=steps, resume=resume, **PLAN)
        made = train.Trainer(plan, SIZE)
        made._validation = lambda count: []
        made.run()
        return made.model.state_dict()

    straight = run("a", 3)
    run("b", 2)
    resumed = run("b", 3, resume=True)
    assert all(torch.equal(straight[k], resumed[k]) for k in straight)


def test_export_gives_the_same_logits_in_transformers(trainer, batch, tmp_path):
    from transformers import Qwen3VLForConditionalGeneration

    export(trainer.model, trainer.pack.tokenizer, tmp_path, torch.float32)
    theirs = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32).eval()
    rows, columns = batch.grids[0].tolist()
    patches = trainer.render(batch).float()
    first = [k for k in range(packing.TEXT, packing.ROW) if batch.parts[0, k] == 1]
    chosen = [*range(packing.HEAD + rows * columns), packing.TEXT - 1, *first]
    ids = batch.ids[0].long()[chosen][None]
    doubled = (
        patches[0, : rows * columns * 4]
        .view(-1, 3, 1, 256)
        .expand(-1, 3, 2, 256)
        .reshape(rows * columns * 4, -1)
    )
    image = tokens.Encoder(trainer.pack.tokenizer).special["<|image_pad|>"]
    with torch.no_grad():
        expected = theirs(
            input_ids=ids, pixel_values=doubled, image_grid_thw=torch.tensor([[1, 2 * rows, 2 * columns]]),
            mm_token_type_ids=(ids == image).long(), attention_mask=torch.ones_like(ids),
        ).logits[0]  # fmt: skip
        hidden = trainer.model(patches, batch, trainer.model.masks(batch, False))[0]
        mine = hidden[chosen] @ trainer.model.language_model.embed_tokens.weight.T
    assert torch.allclose(mine, expected, atol=1e-4)


def test_checkpoint_can_be_read_back(trainer):
    again = restored(checkpoint(trainer.model, torch.float32))
    state = trainer.model.state_dict()
    assert all(torch.allclose(again[k], state[k], atol=1e-6) for k in state)


def test_words_are_drawn_where_the_truth_says(trainer, cast, pool):
    recipe = scenes.Recipe(word_share=1.0)
    scene = next(
        s for s in (scenes.draw_scene(random.Random(i), recipe, cast, pool) for i in range(99)) if s.words
    )
    packer = packing.Packer(tokens.Encoder(trainer.pack.tokenizer))
    rows = packer.batch([scene, dataclasses.replace(scene, things=scene.shown)], random.Random(2))
    rows.scenes[1] = rows.scenes[0]
    rows.scenes[:, 13] = 0  # no grain
    patches = trainer.render(rows)
    grid = geometry.token_grid(scene.width, scene.height)
    with_words, without = (render.unpatch(patches[i], *grid).astype(float) for i in (0, 1))
    ys, xs = np.nonzero(np.abs(with_words - without).sum(-1) > 60)
    assert xs.size > 20
    boxes = [t.box for t in scene.words]
    scale = (grid[1] * 32 / scene.width, grid[0] * 32 / scene.height)
    assert abs(xs.min() - min(b[0] for b in boxes) * scale[0]) < 4
    assert abs(ys.max() - max(b[3] for b in boxes) * scale[1]) < 4
