"""Scenes to training arrays: several exchanges share one picture in one row of fixed length.

    row:   <|im_start|> user \\n <|vision_start|> | 80 image tokens | <|vision_end|> | exchanges, padding
    part:  0 0 0 0                               | -1 in padding   | 0              | 1 1 2 2 2 3 ... -1 -1

A token sees earlier tokens of part 0 and of its own part, and positions start again after the picture for
every part, so each exchange is trained exactly as if it stood alone. Some rows are one long conversation.
"""

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import IterableDataset
from training.pocket import geometry, interview, lettering, tasks, tokens, world
from training.pocket.looks import Cast
from training.pocket.questions import Asker, Exchange
from training.pocket.scenes import Recipe, Scene, Thing, draw_scene

HEAD, IMAGE, ROW = 4, 80, 328  # tokens before the picture, of the picture at most (strips: 78), of a row
TEXT = HEAD + IMAGE + 1  # where exchanges begin
ANSWERS = 128  # answer tokens a row, on average, that the loss has room for
OBJECTS, WORDS = 10, 3
SCENE_FACTS, OBJECT_FACTS, WORD_FACTS = 23, 18, 8
CONVERSATIONS = 0.12  # share of rows that are one conversation
KINDS = (
    "count", "color", "shape", "where", "exists", "beside", "is_beside", "compare", "extreme", "size", "at",
    "list",
    "caption", "detailed", "scene", "detect_all", "detect", "text", "background", "beyond", "sides",
    "either", "photo",
)  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """`batch` rows as tensors."""

    ids: torch.Tensor  # [batch, ROW] int16
    parts: torch.Tensor  # [batch, ROW] int8
    positions: torch.Tensor  # [3, batch, ROW] int16: time, row, column
    where: torch.Tensor  # [batch * ANSWERS] int32: flat index of the token before each answer token
    target: torch.Tensor  # [batch * ANSWERS] int16: that answer token, -1 where unused
    exchange: (
        torch.Tensor
    )  # [batch * ANSWERS] int32: exchange number within the batch, for exact-match accuracy
    kind: torch.Tensor  # [exchanges] int8: index into KINDS
    grids: torch.Tensor  # [batch, 2] int16: rows and columns of image tokens
    scenes: torch.Tensor  # [batch, SCENE_FACTS] float32
    objects: torch.Tensor  # [batch, OBJECTS, OBJECT_FACTS] float32
    words: torch.Tensor  # [batch, WORDS, WORD_FACTS] float32
    sprites: torch.Tensor  # [batch, WORDS] int32: index into the pool, -1 where unused

    def map(self, function: "functools.partial[torch.Tensor]") -> "Batch":
        """The batch with `function` applied to every tensor."""
        return Batch(**{name: function(value) for name, value in vars(self).items()})


@functools.cache
def _image_positions(rows: int, columns: int) -> np.ndarray:
    """M-RoPE positions of the first TEXT tokens: [3, TEXT]."""
    out = np.zeros((3, TEXT), np.int16)
    out[:, :HEAD] = np.arange(HEAD)
    cells = np.arange(rows * columns)
    out[0, HEAD : HEAD + cells.size] = HEAD
    out[1, HEAD : HEAD + cells.size] = HEAD + cells // columns
    out[2, HEAD : HEAD + cells.size] = HEAD + cells % columns
    out[:, TEXT - 1] = HEAD + max(rows, columns)
    return out


def scene_facts(scene: Scene, rng: random.Random) -> list[float]:
    """Numbers the renderer needs about the whole picture; the last ones are its own whims."""
    b = scene.background
    turn = np.deg2rad(b.angle)
    rows, columns = geometry.token_grid(scene.width, scene.height)
    scale = (rows * columns * geometry.TOKEN**2 / (scene.width * scene.height)) ** 0.5
    blocky = float(scale > 1.15 and rng.random() < 0.35)
    soft = (0.5 if blocky else max(1.0, 0.85 * scale)) * rng.uniform(0.7, 1.5)
    return [
        scene.width, scene.height, *b.rgb, *b.second, world.PATTERNS.index(b.pattern), b.period,
        float(np.cos(turn)), float(np.sin(turn)), b.phase, b.noise, blocky, soft, rng.random(), scale,
        scene.photo, *_part(rng),
    ]  # fmt: skip


def _part(rng: random.Random) -> tuple[float, float, float, float]:
    """Which part of a photograph fills the picture: left, top, width, height, of 1; mirrored if negative."""
    width, height = rng.uniform(0.55, 1.0), rng.uniform(0.55, 1.0)
    left, top = rng.uniform(0, 1 - width), rng.uniform(0, 1 - height)
    return (left, top, width, height) if rng.random() < 0.5 else (left + width, top, -width, height)


def thing_facts(thing: Thing) -> list[float]:
    """Numbers the renderer needs about a shape (first 1) or a pictogram (first 2)."""
    turn = np.deg2rad(thing.angle)
    sprite = world.SHAPES.index(thing.name) if thing.kind == "shape" else thing.handle
    outline = thing.outline or thing.rgb
    return [
        1.0 if thing.kind == "shape" else 2.0, sprite, *thing.center, *thing.half, float(np.cos(turn)),
        float(np.sin(turn)), *thing.rgb, *outline, thing.outline_width if thing.outline else 0.0,
        thing.shade, 0.0, 0.0,
    ]  # fmt: skip


def exchanges(scene: Scene, rng: random.Random) -> Iterator[Exchange]:
    """Endless exchanges about a scene: a task of the product first, then questions with tasks between."""
    asker = Asker(scene, rng)
    yield tasks.pick(asker, rng)
    while True:
        if rng.random() < 0.16:
            yield tasks.pick(asker, rng)
        elif (found := interview.ask(asker)) is not None:
            yield found


class Packer:
    """Turns scenes into rows."""

    def __init__(self, encode: tokens.Encoder) -> None:
        self.encode = encode
        special = encode.special
        newline = encode("\n")
        self.end = special["<|im_end|>"]
        start = special["<|im_start|>"]
        self.head = [start, *encode("user\n"), special["<|vision_start|>"]]
        assert len(self.head) == HEAD
        self.image, self.close = special["<|image_pad|>"], special["<|vision_end|>"]
        self.answer = [self.end, *newline, start, *encode("assistant\n")]
        self.again = [*newline, start, *encode("user\n")]
        self.pad = special["<|endoftext|>"]
        self._known: dict[str, list[int]] = {}

    def _ids(self, text: str) -> list[int]:
        """Encoded with a memory for what repeats."""
        if len(text) > 160 or '"' in text:
            return self.encode(text)
        ids = self._known.get(text)
        if ids is None:
            if len(self._known) > 200_000:
                self._known.clear()
            ids = self._known[text] = self.encode(text)
        return ids

    def row(
        self, scene: Scene, rng: random.Random
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[tuple[int, int, str]]]:
        """(ids [ROW], parts [ROW], positions [3, ROW], spans (start, stop, kind) of answers)."""
        rows, columns = geometry.token_grid(scene.width, scene.height)
        count = rows * columns
        ids = np.full(ROW, self.pad, np.int16)
        parts = np.full(ROW, -1, np.int8)
        positions = np.zeros((3, ROW), np.int16)
        ids[:HEAD], ids[HEAD : HEAD + count], ids[TEXT - 1] = self.head, self.image, self.close
        parts[: HEAD + count] = 0
        parts[TEXT - 1] = 0
        positions[:, :TEXT] = _image_positions(rows, columns)
        first = HEAD + max(rows, columns) + 1
        talk = rng.random() < CONVERSATIONS
        at, part, misses, spans = TEXT, 1, 0, []
        position = first
        for exchange in exchanges(scene, rng):
            ask = self._ids(exchange.question) + self.answer
            if talk and at > TEXT:
                ask = self.again + ask
            reply = self._ids(exchange.answer)
            size = len(ask) + len(reply) + 1
            if at + size > ROW:
                misses += 1
                if misses > 2 or at + 14 > ROW:
                    break
                continue
            stop = at + size
            ids[at:stop] = [*ask, *reply, self.end]
            parts[at:stop] = part
            positions[:, at:stop] = np.arange(position, position + size, dtype=np.int16)
            spans.append((at + len(ask), stop, exchange.kind))
            at = stop
            if talk:
                position += size
            else:
                part += 1
        return ids, parts, positions, spans

    def batch(self, scenes: list[Scene], rng: random.Random) -> Batch:
        """Rows for these scenes with everything the renderer needs."""
        n = len(scenes)
        rows = [self.row(s, rng) for s in scenes]
        room = n * ANSWERS
        where, target = np.zeros(room, np.int32), np.full(room, -1, np.int16)
        owner, kinds, used = np.zeros(room, np.int32), [], 0
        for i, (ids, _, _, spans) in enumerate(rows):
            for start, stop, kind in spans:
                size = stop - start
                if used + size > room:
                    break
                where[used : used + size] = np.arange(i * ROW + start - 1, i * ROW + stop - 1)
                target[used : used + size] = ids[start:stop]
                owner[used : used + size] = len(kinds)
                kinds.append(KINDS.index(kind))
                used += size
        objects = np.zeros((n, OBJECTS, OBJECT_FACTS), np.float32)
        words = np.zeros((n, WORDS, WORD_FACTS), np.float32)
        sprites = np.full((n, WORDS), -1, np.int32)
        for i, scene in enumerate(scenes):
            for j, thing in enumerate(scene.shown):
                objects[i, j] = thing_facts(thing)
            for j, word in enumerate(scene.words):
                words[i, j] = [1.0, *word.center, *word.half, *word.rgb]
                sprites[i, j] = word.handle
        kind_row = np.full(n * 24, -1, np.int8)
        kind_row[: len(kinds)] = kinds[: n * 24]
        arrays = (
            np.stack([r[0] for r in rows]), np.stack([r[1] for r in rows]),
            np.stack([r[2] for r in rows], axis=1),
            where, target, owner, kind_row,
            np.array([geometry.token_grid(s.width, s.height) for s in scenes], np.int16),
            np.array([scene_facts(s, rng) for s in scenes], np.float32), objects, words, sprites,
        )  # fmt: skip
        return Batch(*map(torch.from_numpy, arrays))


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Batches `first`, `first + stride`, … without end; batch k is the same for any number of workers."""

    def __init__(
        self,
        tokenizer: Path,
        cast: Cast,
        pool: lettering.Pool,
        recipe: Recipe,
        batch: int,
        seed: str,
        first: int = 0,
        stride: int = 1,
    ) -> None:
        self.tokenizer, self.cast, self.pool, self.recipe = tokenizer, cast, pool, recipe
        self.batch, self.seed, self.first, self.stride = batch, seed, first, stride

    def make(self, packer: Packer, index: int) -> Batch:
        """Batch number `index`."""
        rng = random.Random(f"{self.seed} {index}")
        scenes = [draw_scene(rng, self.recipe, self.cast, self.pool) for _ in range(self.batch)]
        return packer.batch(scenes, rng)

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        step, index = (worker.num_workers, worker.id) if worker else (1, 0)
        packer = Packer(tokens.Encoder(self.tokenizer))
        index = self.first + index * self.stride
        while True:
            yield self.make(packer, index)
            index += step * self.stride
