"""Pictures drawn where the network sees them: straight into normalised patches, on the GPU, any grid a row.

`patches` is [batch, 320, 3 * 256]: patches in Qwen's order (2x2 blocks in reading order), each laid out as
channel, row, column, values (v - 127.5) / 127.5. The second frame of a still picture repeats the first, so
the patch embedding of training adds both halves of its weight. Patches beyond a row's grid hold nonsense.
"""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from training.pocket import geometry, lettering, packing, world

REACH, FIELD = 1.3, 128  # half side in unit space and samples along a side of a distance field
LEVELS = (96, 56, 32)  # sides of the pictogram sprites, chosen by displayed size
PIXELS = geometry.PATCH**2


class Atlas:
    """Everything that can be drawn, as tensors on a device."""

    def __init__(
        self, sprites: Sequence[np.ndarray], pool: lettering.Pool, photos: np.ndarray, device: torch.device
    ) -> None:
        fields = [geometry.distance_field(s, FIELD, REACH) for s in world.SHAPES]
        self.fields = torch.from_numpy(np.stack(fields)).reshape(-1).to(device)  # [shapes * FIELD * FIELD]
        texels = torch.cat([_level(sprites, side) for side in LEVELS])  # [texels, 4] uint8
        self.pictograms = texels.contiguous().view(torch.int32).reshape(-1).to(device)  # little-endian RGBA
        # [photos * side * side] RGBA; one black one where there are none
        outside = photos if len(photos) else np.zeros((1, 1, 1, 3), np.uint8)
        self.photo_side = outside.shape[1]
        opaque = np.concatenate([outside, np.full_like(outside[..., :1], 255)], axis=-1)
        self.photos = torch.from_numpy(opaque).view(torch.int32).reshape(-1).to(device)
        self.ink = torch.from_numpy(pool.ink).to(device)
        self.offsets = torch.from_numpy(pool.offsets).to(device)
        self.sizes = torch.from_numpy(pool.sizes).to(device)


def _level(sprites: Sequence[np.ndarray], side: int) -> torch.Tensor:
    """All pictograms stretched to side x side, colour premultiplied by alpha: [n * side * side, 4] uint8."""
    out = []
    for sprite in sprites:
        pixels = sprite.astype(np.float32)
        pixels[..., :3] *= pixels[..., 3:] / 255
        image = Image.fromarray(pixels.round().astype(np.uint8), "RGBA")
        out.append(
            np.asarray(
                image.resize((side, side), Image.Resampling.BOX if side < 96 else Image.Resampling.BICUBIC)
            )
        )
    return torch.from_numpy(np.stack(out)).reshape(-1, 4)


def patch_places(grids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(row, column, valid) of each of the 320 patches, [batch, 320], from grids [batch, 2] of tokens."""
    index = torch.arange(packing.IMAGE * 4, device=grids.device)
    rows, columns = grids[:, :1].long(), grids[:, 1:].long()
    block, inner = index // 4, index % 4
    row = (block // columns) * 2 + inner // 2
    column = (block % columns) * 2 + inner % 2
    return row, column, block < rows * columns


def coordinates(grids: torch.Tensor, scenes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, y) of every pixel in the author's pixels, [batch, 320, 256]."""
    row, column, _ = patch_places(grids)
    inner = torch.arange(PIXELS, device=grids.device)
    side = geometry.PATCH
    x = (column[..., None] * side + inner % side + 0.5) / (grids[:, 1, None, None] * geometry.TOKEN)
    y = (row[..., None] * side + inner // side + 0.5) / (grids[:, 0, None, None] * geometry.TOKEN)
    facts = scenes[:, :, None, None]
    x, y = x * facts[:, 0], y * facts[:, 1]
    blocky = facts[:, 14] > 0  # the author's pixels show as blocks
    return torch.where(blocky, x.floor() + 0.5, x), torch.where(blocky, y.floor() + 0.5, y)


def _hash(i: torch.Tensor, j: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    value = torch.sin(i * 12.9898 + j * 78.233 + seed * 37.719) * 43758.5453
    return value - value.floor()


def _grainy(x: torch.Tensor, y: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """Smooth value noise with unit cells, 0..1."""
    i, j = x.floor(), y.floor()
    u, v = x - i, y - j
    u, v = u * u * (3 - 2 * u), v * v * (3 - 2 * v)
    top = _hash(i, j, seed) * (1 - u) + _hash(i + 1, j, seed) * u
    low = _hash(i, j + 1, seed) * (1 - u) + _hash(i + 1, j + 1, seed) * u
    return top * (1 - v) + low * v


def paint_background(x: torch.Tensor, y: torch.Tensor, scenes: torch.Tensor) -> torch.Tensor:
    """The empty picture, 0..255: [batch, 3, 320, 256]."""
    f = scenes[:, :, None, None]
    w, h, pattern, period, cos, sin, phase, seed = (f[:, k] for k in (0, 1, 8, 9, 10, 11, 12, 16))
    along = (x - w / 2) * cos + (y - h / 2) * sin
    across = (y - h / 2) * cos - (x - w / 2) * sin
    gradient = (along / (w * cos.abs() + h * sin.abs()) + 0.5).clamp(0, 1)
    u, v = along / period + phase, across / period + phase
    stripes = ((u - u.floor()) < 0.5).float()
    a, b = x / period + phase, y / period + phase
    odd = a.floor() + b.floor()
    checks = odd - 2 * (odd / 2).floor()
    dots = (((a - a.floor() - 0.5) ** 2 + (b - b.floor() - 0.5) ** 2) < 0.08).float()
    grain = 0.6 * _grainy(u * 1.5, v * 1.5, seed * 91) + 0.4 * _grainy(u * 5, v * 5, seed * 57)
    zero = torch.zeros_like(gradient)
    mix = zero
    for index, value in enumerate((zero, gradient, stripes, checks, dots, grain)):
        mix = torch.where(pattern == index, value, mix)
    mix = mix[:, None]
    first, second = scenes[:, 2:5, None, None], scenes[:, 5:8, None, None]
    return first * (1 - mix) + second * mix


def paint_photo(
    canvas: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
    scenes: torch.Tensor,
    photos: torch.Tensor,
    side: int,
) -> torch.Tensor:
    """The canvas, covered by a picture of the world outside in the rows that have one."""
    f = scenes[:, :, None, None]
    index = f[:, 18].clamp_min(0).int()
    u = ((f[:, 19] + x / f[:, 0] * f[:, 21]) * side - 0.5).clamp(0, side - 1)
    v = ((f[:, 20] + y / f[:, 1] * f[:, 22]) * side - 0.5).clamp(0, side - 1)
    u0, v0 = u.floor(), v.floor()
    color = torch.zeros_like(canvas)
    for du in (0, 1):
        for dv in (0, 1):
            i, j = (u0.int() + du).clamp_max(side - 1), (v0.int() + dv).clamp_max(side - 1)
            weight = ((u - u0 if du else 1 - u + u0) * (v - v0 if dv else 1 - v + v0))[:, None]
            texel = photos[(index * side + j) * side + i]
            color = color + torch.stack([((texel >> s) & 255).float() for s in (0, 8, 16)], dim=1) * weight
    return torch.where(f[:, 18:19] >= 0, color, canvas)


def paint_object(
    canvas: torch.Tensor, x: torch.Tensor, y: torch.Tensor, thing: torch.Tensor, scenes: torch.Tensor,
    fields: torch.Tensor, pictograms: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The canvas with one shape or pictogram a row on it; `thing` is [batch, OBJECT_FACTS]."""
    f = thing[:, :, None, None]
    kind, sprite, cx, cy, hx, hy, cos, sin = (f[:, k] for k in range(8))
    hx, hy = hx.clamp_min(1e-3), hy.clamp_min(1e-3)
    scale, soft = scenes[:, 17, None, None], scenes[:, 15, None, None]
    dx, dy = x - cx, y - cy
    a, b = (cos * dx + sin * dy) / hx, (cos * dy - sin * dx) / hy
    inside = (a.abs() < REACH) & (b.abs() < REACH)
    u = ((a / REACH + 1) / 2 * FIELD).int().clamp(0, FIELD - 1)
    v = ((b / REACH + 1) / 2 * FIELD).int().clamp(0, FIELD - 1)
    shape = torch.where(kind == 1, sprite, 0 * sprite).int()
    distance = fields[(shape * FIELD + v) * FIELD + u]
    pixel = torch.minimum(hx, hy) * scale / soft
    cover = (0.5 - distance * pixel).clamp(0, 1) * inside * (kind == 1)
    rim = (0.5 + (distance + f[:, 14]) * pixel).clamp(0, 1) * (f[:, 14] > 0)
    shade = (1 + f[:, 15] * b)[:, None]
    fill = (f[:, 8:11] * shade).clamp(0, 255)
    paint = fill * (1 - rim[:, None]) + f[:, 11:14] * rim[:, None]
    canvas = canvas * (1 - cover[:, None]) + paint * cover[:, None]
    return _paint_pictogram(canvas, a, b, kind, sprite, 2 * torch.sqrt(hx * hy) * scale, pictograms)


def _paint_pictogram(
    canvas: torch.Tensor, a: torch.Tensor, b: torch.Tensor, kind: torch.Tensor, sprite: torch.Tensor,
    shown: torch.Tensor, pictograms: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Bilinear sample of the level that fits `shown`, the displayed size in pixels."""
    count = pictograms.numel() // sum(side**2 for side in LEVELS)
    one, two = count * LEVELS[0] ** 2, count * (LEVELS[0] ** 2 + LEVELS[1] ** 2)
    big, middle = shown > 72, shown > 42
    side = torch.where(big, LEVELS[0], torch.where(middle, LEVELS[1], LEVELS[2])).int()
    base = (
        torch.where(big, 0, torch.where(middle, one, two)).int()
        + torch.where(kind == 2, sprite, 0 * sprite).int() * side * side
    )
    u, v = (a + 1) / 2 * side - 0.5, (b + 1) / 2 * side - 0.5
    u0, v0 = u.floor(), v.floor()
    fu, fv = (u - u0)[:, None], (v - v0)[:, None]
    color = torch.zeros_like(canvas)
    alpha = torch.zeros_like(fu)
    for du in (0, 1):
        for dv in (0, 1):
            i, j = u0.int() + du, v0.int() + dv
            good = (i >= 0) & (j >= 0) & (i < side) & (j < side) & (kind == 2)
            at = base + j.clamp(min=0).minimum(side - 1) * side + i.clamp(min=0).minimum(side - 1)
            weight = (fu if du else 1 - fu) * (fv if dv else 1 - fv) * good[:, None]
            texel = pictograms[at]
            color = color + torch.stack([((texel >> s) & 255).float() for s in (0, 8, 16)], dim=1) * weight
            alpha = alpha + ((texel >> 24) & 255).float()[:, None] * weight
    return canvas * (1 - alpha / 255) + color


def paint_word(
    canvas: torch.Tensor, x: torch.Tensor, y: torch.Tensor, word: torch.Tensor, offset: torch.Tensor,
    size: torch.Tensor, scenes: torch.Tensor, ink: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The canvas with one printed word a row; offset [batch] into the ink, size [batch, 2] (w, h)."""
    f = word[:, :, None, None]
    w, h = size[:, 0, None, None], size[:, 1, None, None]
    hx, hy = f[:, 3].clamp_min(1e-3), f[:, 4].clamp_min(1e-3)
    u = ((x - f[:, 1]) / hx + 1) / 2 * w - 0.5
    v = ((y - f[:, 2]) / hy + 1) / 2 * h - 0.5
    # Averages over a square as large as a displayed pixel: four samples spread by the shrinking factor.
    shrink = h / (2 * hy * scenes[:, 17, None, None])
    step = (shrink / 4).clamp(0.12, 1.0)
    total = torch.zeros_like(u)
    for su in (-1, 1):
        for sv in (-1, 1):
            total = total + _bilinear(u + su * step, v + sv * step, w, h, offset[:, None, None], ink)
    sharp = (0.9 / shrink).clamp(1.0, 2.2)
    cover = (((total / (4 * 255) - 0.5) * sharp + 0.5).clamp(0, 1) * (total > 0) * f[:, 0])[:, None]
    return canvas * (1 - cover) + f[:, 5:8] * cover


def _bilinear(
    u: torch.Tensor,
    v: torch.Tensor,
    w: torch.Tensor,
    h: torch.Tensor,
    offset: torch.Tensor,
    ink: torch.Tensor,
) -> torch.Tensor:
    u0, v0 = u.floor(), v.floor()
    total = torch.zeros_like(u)
    for du in (0, 1):
        for dv in (0, 1):
            i, j = u0.long() + du, v0.long() + dv
            good = (i >= 0) & (j >= 0) & (i < w) & (j < h)
            at = offset + j.clamp(min=0).minimum(h - 1) * w + i.clamp(min=0).minimum(w - 1)
            weight = (u - u0 if du else 1 - u + u0) * (v - v0 if dv else 1 - v + v0)
            total = total + ink[at].float() * weight * good
    return total


def finish(canvas: torch.Tensor, scenes: torch.Tensor) -> torch.Tensor:
    """Grain, rounding to bytes, normalising, patch layout: [batch, 320, 768] bfloat16."""
    noise = torch.randn(canvas.shape, device=canvas.device, dtype=canvas.dtype)
    canvas = (canvas + noise * scenes[:, 13, None, None, None]).clamp(0, 255).round()
    patches = ((canvas - 127.5) / 127.5).to(torch.bfloat16).transpose(1, 2)
    return patches.reshape(canvas.shape[0], canvas.shape[2], -1)


class Renderer:
    """Draws batches; compiled on the GPU, plain on the CPU (the tests)."""

    def __init__(self, atlas: Atlas, compiled: bool) -> None:
        self.atlas = atlas
        wrap = torch.compile if compiled else (lambda f: f)
        self.start, self.background = wrap(coordinates), wrap(paint_background)
        self.photo = wrap(paint_photo)
        self.object, self.word, self.finish = wrap(paint_object), wrap(paint_word), wrap(finish)

    @torch.no_grad()
    def __call__(self, batch: packing.Batch) -> torch.Tensor:
        """Patches of the batch's pictures: [batch, 320, 768] bfloat16."""
        atlas = self.atlas
        x, y = self.start(batch.grids, batch.scenes)
        canvas = self.background(x, y, batch.scenes)
        canvas = self.photo(canvas, x, y, batch.scenes, atlas.photos, atlas.photo_side)
        for j in range(packing.WORDS):
            index = batch.sprites[:, j].clamp_min(0)
            canvas = self.word(
                canvas,
                x,
                y,
                batch.words[:, j].contiguous(),
                atlas.offsets[index],
                atlas.sizes[index],
                batch.scenes,
                atlas.ink,
            )
        for j in range(packing.OBJECTS):
            facts = batch.objects[:, j].contiguous()
            canvas = self.object(canvas, x, y, facts, batch.scenes, atlas.fields, atlas.pictograms)
        return self.finish(canvas, batch.scenes)


def unpatch(patches: torch.Tensor, rows: int, columns: int) -> np.ndarray:
    """One row's picture as bytes, [height, width, 3], from patches [320, 768]: to look at."""
    used = (
        patches[: rows * columns * 4].float().reshape(rows, columns, 2, 2, 3, geometry.PATCH, geometry.PATCH)
    )
    picture = used.permute(0, 2, 5, 1, 3, 6, 4).reshape(rows * geometry.TOKEN, columns * geometry.TOKEN, 3)
    return ((picture * 127.5) + 127.5).round().clamp(0, 255).to(torch.uint8).numpy()
