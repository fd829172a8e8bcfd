"""Train pocket.

    python -m training.pocket.assets
    python -m training.pocket.train --minutes 24 --out .pocket/run              # one GPU
    python -m training.pocket.train --minutes 30 --out .pocket/run --resume     # on from the last checkpoint
    torchrun --nproc-per-node 2 -m training.pocket.train --minutes 8 --out .pocket/run             # two GPUs

The learning rate follows elapsed training time: warm-up over the first 300 steps, constant, then a cosine to
zero that ends when the minutes are up. Resumed runs keep the step count, the optimizer's state and the time
spent; batch k is the same in every run of one seed. Under torchrun every process draws its own batches and
the gradients are averaged, so n GPUs make one step on n batches. With `--until` the
run ends at that moment, starting and compiling included, whatever `--minutes` says.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from training.pocket import assets, lettering, looks, network, packing, photos, tokens
from training.pocket.export import export, restored
from training.pocket.optimizer import Optimizer
from training.pocket.render import Atlas, Renderer
from training.pocket.scenes import Recipe


@dataclass(frozen=True)
class Plan:
    """One run."""

    out: Path
    pack: Path = assets.PACK
    minutes: float = 24.0
    batch: int = 1024
    rate: float = 2e-3
    steady: float = 0.3  # share of the time at the full rate
    warmup: int = 300  # steps
    words: int = 240_000  # printed words in the pool
    word_share: float = 0.45  # of scenes
    strip_share: float = 0.3  # of pictures that may be as slim as 1:16
    slim_share: float = 0.25  # of pictures from 1:6 to 1:16
    photo_share: float = 0.06  # of pictures that are none of this world
    copies: int = 3  # altered copies of every drawing of a pictogram
    textures: int = 500  # made-up pictures of the world outside, beside the photographs
    until: float = 0.0  # when the run ends, in seconds of the epoch; 0: after the minutes
    check: int = 4  # batches of the validation, none: 0
    checkpoint: bool = True  # keep the optimizer's state, to resume from
    sync: int = 1  # GPUs average gradients every step (1), or their weights every so many steps
    workers: int = 15
    seed: int = 0
    save_every: float = 90.0  # seconds
    steps: int = 1 << 30  # stop after so many (tests)
    resume: bool = False
    init: str = ""  # a model folder to start from, with a fresh optimizer
    flex: bool = True


def rate_at(plan: Plan, step: int, elapsed: float) -> float:
    """The learning rate at a step, `elapsed` seconds into the training."""
    done = min(1.0, elapsed / (plan.minutes * 60))
    fall = max(0.0, (done - plan.steady) / (1 - plan.steady))
    return plan.rate * min(1.0, (step + 1) / plan.warmup) * 0.5 * (1 + math.cos(math.pi * fall))


class Trainer:
    """The network, its optimizer and where its batches come from."""

    def __init__(self, plan: Plan, size: network.Size | None = None) -> None:
        self.plan, self.born = plan, time.monotonic()
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.cuda = self.device.type == "cuda"
        torch.manual_seed(plan.seed)
        self._say("begun")
        self.pack = assets.load(plan.pack)
        self.pool = lettering.draw_pool(plan.words, self.pack.fonts, plan.seed, plan.workers)
        self._say("words drawn")
        outside = photos.pool(self.pack.photos, plan.textures, plan.seed, plan.workers)
        self._say("photographs cut")
        sprites, self.cast = looks.audition(
            self.pack.sets, plan.copies, plan.seed, plan.workers, photos=len(outside)
        )
        self._say("pictograms altered")
        self.recipe = Recipe(
            word_share=plan.word_share, strip_share=plan.strip_share, slim_share=plan.slim_share,
            photo_share=plan.photo_share, max_tokens=packing.IMAGE,
        )  # fmt: skip
        self.size = size or network.Size(tokens.Encoder(self.pack.tokenizer).size)
        self.model = network.Pocket(self.size).to(self.device)
        self.optimizer = Optimizer(self.model)
        self.step, self.elapsed, self.scenes = 0, 0.0, 0
        if plan.init:
            weights = load_file(Path(plan.init) / "model.safetensors")
            self.model.load_state_dict(restored(weights))
        if plan.resume:
            self.load()
        self.render = Renderer(Atlas(sprites, self.pool, outside, self.device), compiled=self.cuda)
        self.flex = plan.flex and self.cuda
        self._compile()
        self._say(f"prepared, {len(sprites)} sprites")

    def _say(self, done: str) -> None:
        """What the first process has done, and how long after its start."""
        if not self.rank:
            print(f"{time.monotonic() - self.born:.0f} s: {done}", flush=True)

    def _compile(self) -> None:
        self.masks, self.head = self.model.masks, self._head
        if self.cuda:
            torch.set_float32_matmul_precision("high")
            torch._dynamo.config.cache_size_limit = 64
            for module in (*self.model.visual.blocks, *self.model.language_model.layers):
                module.compile()
            for module in (self.model.visual.merger, *self.model.visual.deepstack_merger_list):
                module.compile()
            self.model.visual.places = torch.compile(self.model.visual.places)  # type: ignore[method-assign]
            self.head = torch.compile(self._head)  # type: ignore[assignment]

    def stream(self, first: int, seed: str) -> Iterator[packing.Batch]:
        """Batches from number `first` on, on the device."""
        plan = self.plan
        data = packing.Stream(
            self.pack.tokenizer, self.cast, self.pool, self.recipe, plan.batch, f"{seed} {plan.seed}",
            first * self.ranks + self.rank, self.ranks,
        )  # fmt: skip
        loader = DataLoader(
            data, batch_size=None, num_workers=plan.workers, prefetch_factor=3 if plan.workers else None,
            multiprocessing_context="fork" if plan.workers else None,
        )  # fmt: skip
        for batch in loader:
            yield self.move(batch)

    def move(self, batch: packing.Batch) -> packing.Batch:
        """The batch on the device, without waiting for the copy."""
        pin = (lambda t: t.pin_memory().to(self.device, non_blocking=True)) if self.cuda else (lambda t: t)
        return batch.map(pin)  # type: ignore[arg-type]

    def _head(
        self, hidden: torch.Tensor, where: torch.Tensor, target: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss, whether each answer token is the likeliest [answers])."""
        logits = self.model.logits(hidden, where).float()
        loss = F.cross_entropy(logits, target.long(), ignore_index=-1)
        return loss, logits.argmax(-1) == target

    def forward(self, batch: packing.Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss, hits [answers])."""
        patches = self.render(batch)
        masks = self.masks(batch, self.flex)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.cuda):
            hidden = self.model(patches if self.cuda else patches.float(), batch, masks)
            return self.head(hidden, batch.where, batch.target)

    def train_step(self, batch: packing.Batch) -> torch.Tensor:
        """One update; the loss, still on the device."""
        # Grain is the same in a resumed run, and another one on every GPU.
        torch.manual_seed((self.plan.seed * 1_000_003 + self.step) * self.ranks + self.rank)
        loss, _ = self.forward(batch)
        loss.backward()
        if self.plan.sync == 1:
            self._average([p.grad for p in self.model.parameters() if p.grad is not None])
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step(rate_at(self.plan, self.step, self.elapsed))
        self.step += 1
        if self.plan.sync > 1 and self.step % self.plan.sync == 0:
            self._average([p.data for p in self.model.parameters()])
        self.scenes += self.plan.batch * self.ranks
        return loss.detach()

    @torch.no_grad()
    def _average(self, tensors: list[torch.Tensor]) -> None:
        """Give every process the mean of these tensors over all processes."""
        if self.ranks > 1:
            flat = torch.cat([t.reshape(-1) for t in tensors])
            dist.all_reduce(flat)
            flat /= self.ranks
            parts = flat.split([t.numel() for t in tensors])
            torch._foreach_copy_(tensors, [p.view_as(t) for p, t in zip(parts, tensors, strict=True)])

    def _agree(self) -> None:
        """Let the first process's clock hold for all."""
        if self.ranks > 1:
            clock = torch.tensor([self.elapsed, self.plan.minutes], dtype=torch.float64, device=self.device)
            dist.broadcast(clock, 0)
            self.elapsed, minutes = clock.tolist()
            self.plan = replace(self.plan, minutes=minutes)

    @torch.no_grad()
    def exact(self, batch: packing.Batch) -> dict[str, float]:
        """Share of exchanges, by kind, whose every answer token is the likeliest after the true ones."""
        _, hits = self.forward(batch)
        used = batch.target >= 0
        total = int((batch.kind >= 0).sum())
        wrong = torch.zeros(total, device=self.device).index_add_(
            0, batch.exchange[used].long(), (~hits[used]).float()
        )
        kinds = batch.kind[:total].long()
        rows = torch.stack([kinds, (wrong == 0).long()], dim=1).tolist()
        found: dict[str, list[int]] = {}
        for kind, good in rows:
            found.setdefault(packing.KINDS[kind], []).append(good)
        return {kind: round(sum(g) / len(g), 4) for kind, g in sorted(found.items())}

    def save(self) -> None:
        """Checkpoint, atomically, and the model as a Hugging Face folder; the first process does it."""
        folder = self.plan.out
        if self.rank:
            return
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(), "optimizer": self.optimizer.state(), "step": self.step,
            "elapsed": self.elapsed, "scenes": self.scenes,
        }  # fmt: skip
        if self.plan.checkpoint:
            torch.save(state, folder / "state.tmp")
            (folder / "state.tmp").rename(folder / "state.pt")
        export(self.model, self.pack.tokenizer, folder / "model")

    def load(self) -> None:
        """Go on from the checkpoint in `out`; one without optimizer state starts with a fresh one."""
        state: dict[str, Any] = torch.load(
            self.plan.out / "state.pt", map_location=self.device, weights_only=True
        )
        self.model.load_state_dict(state["model"])
        if "optimizer" in state:
            self.optimizer.load(state["optimizer"])
        self.step, self.elapsed, self.scenes = state["step"], state["elapsed"], state["scenes"]

    def run(self) -> None:
        """Train until the minutes, the moment or the steps are up."""
        examples = self.stream(self.step, "train")
        check = [self.move(b) for b in self._validation(self.plan.check)]
        last = saved = time.monotonic()
        spent = self.elapsed  # by this process's clock
        losses: list[torch.Tensor] = []
        begun = self.step
        while self.elapsed < self.plan.minutes * 60 and self.step < self.plan.steps:
            batch = next(examples)
            losses.append(self.train_step(batch))
            if self.cuda and self.step % 20 == 0:
                torch.cuda.synchronize()
            now = time.monotonic()
            if self.step - begun > 10:  # the first steps compile
                spent += now - last
            elif self.step - begun == 10 and self.plan.until:
                left = max(1.0, self.plan.until - time.time()) + self.elapsed
                self.plan = replace(self.plan, minutes=left / 60)
            last = now
            if self.ranks == 1 or self.step % 10 == 0:
                self.elapsed = spent
                self._agree()
            if self.step == 60 and self.cuda:
                self._time(batch, examples)
            if self.step % 100 == 0 or self.step == 10:
                self.report(losses, check if self.step % 1000 == 0 or self.step == 100 else None)
                losses = []
            if now - saved > self.plan.save_every:
                self.save()
                saved = time.monotonic()
        if self.plan.sync > 1:
            self._average([p.data for p in self.model.parameters()])
        self.save()
        self.report(losses, check)

    def _time(self, batch: packing.Batch, examples: Iterator[packing.Batch]) -> None:
        """Print how long the parts of a step take, in milliseconds."""
        parts: tuple[tuple[str, Callable[[], object]], ...] = (
            ("a batch", lambda: next(examples)), ("render", lambda: self.render(batch)),
            ("forward", lambda: self.forward(batch)), ("backward", lambda: self.forward(batch)[0].backward()),
            ("average", lambda: self._average([p.data for p in self.model.parameters()])),
        )  # fmt: skip
        for name, work in parts:
            torch.cuda.synchronize()
            start = time.monotonic()
            for _ in range(5):
                work()
            torch.cuda.synchronize()
            print(name, round((time.monotonic() - start) * 200, 1), "ms", flush=True)
        for p in self.model.parameters():
            p.grad = None

    def _validation(self, count: int) -> list[packing.Batch]:
        """Fixed scenes of another seed than training's."""
        data = packing.Stream(
            self.pack.tokenizer, self.cast, self.pool, self.recipe, self.plan.batch, "validate"
        )
        packer = packing.Packer(tokens.Encoder(self.pack.tokenizer))
        return [data.make(packer, i) for i in range(count)]

    def report(self, losses: list[torch.Tensor], check: list[packing.Batch] | None) -> None:
        """One JSON line on stdout and in log.jsonl, by the first process."""
        if self.rank:
            return
        line: dict[str, Any] = {
            "step": self.step, "minutes": round(self.elapsed / 60, 2), "scenes": self.scenes,
            "rate": round(rate_at(self.plan, self.step, self.elapsed), 6),
            "loss": round(float(torch.stack(losses).mean()), 4) if losses else None,
        }  # fmt: skip
        if check:
            found = [self.exact(b) for b in check]
            kinds = sorted({k for f in found for k in f})
            line["exact"] = {
                k: round(sum(f.get(k, 0) for f in found) / sum(k in f for f in found), 4) for k in kinds
            }
        print(json.dumps(line), flush=True)
        self.plan.out.mkdir(parents=True, exist_ok=True)
        with (self.plan.out / "log.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for field in fields(Plan):
        name = "--" + field.name.replace("_", "-")
        if field.type is bool:
            parser.add_argument(name, action=argparse.BooleanOptionalAction, default=field.default)
        elif field.name == "out":
            parser.add_argument(name, type=Path, required=True)
        else:
            parser.add_argument(name, type=field.type, default=field.default)  # type: ignore[arg-type]
    plan = Plan(**vars(parser.parse_args()))
    if hasattr(os, "sched_setaffinity"):
        # OpenMP may have bound this thread to one core, and every worker would inherit it.
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    if "LOCAL_RANK" in os.environ:  # torchrun started several of these
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    Trainer(plan).run()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
