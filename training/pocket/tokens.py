"""The tokenizer: bytes, plus one token for every word, box number and JSON piece of pocket's world.

It is an honest `tokenizer.json` (byte-level BPE without merges and with `ignore_merges`): a pre-token that is
in the vocabulary becomes one token, anything else falls to its bytes, so any UTF-8 text can be said and
printed words are always spelled letter by letter. `Encoder` does the same in plain Python, faster for the
short strings of training; a test holds the two together.
"""

import json
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from training.pocket import foreign, interview, language, phrasebook, questions, tasks, world
from training.pocket.looks import Cast
from training.pocket.scenes import Recipe, draw_scene

SPECIALS: Final = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip

LITERALS: Final = (
    "```json\n[", "```json\n[]\n```", '\n\t{"bbox_2d": ', '], "label": "', '"},', '"}', "\n]\n```",
    '{"summary": "', '", "setting": "', '", "objects": [', '{"name": "', '", "count":', ', "positions": [',
    ']}, {"name": "', ']}], "text": [', '], "text": [', '], "relations": [', "]}", '", "', ", ",
    *(f'"{p}"' for p in world.POSITIONS), language.PROMPTS.SCENE[language.PROMPTS.SCENE.index("{"):],
)  # fmt: skip

# Order matters: the first alternative that matches wins. Letters that no rule takes stay single.
PATTERN: Final = "|".join((
    r"\[\d{1,4}(?=,)", r", \d{1,4}(?=[,\]])",
    *(re.escape(x).replace('\\"', '"') for x in sorted(LITERALS, key=len, reverse=True) if x != ", "),
    r"\A[A-Za-z]+", r"(?<=\n)[A-Za-z]+",
    r'(?<="name": ")[a-z]+', r'(?<="label": ")[a-z]+', r'(?<=categories: ")[a-z]+',
    r'(?<=")[A-Za-z]+(?=[ ,])',
    r" [A-Za-z]+(?:'s)?", r" \d{1,2}(?!\d)", r"[\s\S]",
))  # fmt: skip


def byte_letters() -> list[str]:
    """The printable stand-in of each byte that byte-level tokenizers use."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    extra = (chr(256 + i) for i in range(256 - len(plain)))
    return [chr(b) if b in set(plain) else next(extra) for b in range(256)]


def world_pieces(cast: Cast, scenes: int = 6000) -> set[str]:
    """Every pre-token longer than a character in all templates and in sampled scenes' exchanges."""
    rng = random.Random("pocket vocabulary")

    class Silent:
        def pick(self, rng: random.Random) -> tuple[int, str, float, float]:
            return 0, "#", 0.6, 0.7

    found: set[str] = {x for x in LITERALS if x != ", "}
    find = re.compile(PATTERN).findall
    nouns = [*world.PICTOGRAMS, *world.SHAPES, *world.COLORS, *world.PALE_BOXES, *foreign.NOUNS]
    for text in (
        *(w for ts in phrasebook.TEMPLATES.values() for w in ts),
        *foreign.QUESTIONS,
        *phrasebook.DETECT_LIKE,
    ):
        bare = re.sub(r"\{\w\}", "", text)
        for form in (bare, bare[:1].lower() + bare[1:], bare.replace("olor", "olour")):
            found.update(find(form.rstrip("?.")), find(form))
    for noun in (*nouns, *map(world.plural, nouns)):
        for quoted in (noun, noun.replace("gray", "grey")):
            if (noun not in foreign.NOUNS and not noun.endswith("s")) or noun in world.PICTOGRAMS:
                found.update(find(quoted.partition(" ")[0].capitalize()))
            if noun.split(" ")[0] not in foreign.NOUNS or noun in nouns[: -len(foreign.NOUNS)]:
                found.update(find(f" a {quoted}"), find(f'"label": "{quoted}"'))
    for spellings in (
        *phrasebook.DIRECTIONS.values(),
        *phrasebook.EXTREMES.values(),
        *phrasebook.PLACES.values(),
    ):
        found.update(p for s in spellings for p in find(f" {s}"))
    recipe = Recipe(word_share=0.3)
    for _ in range(scenes):
        scene = draw_scene(rng, recipe, cast, Silent())
        asker = questions.Asker(scene, rng)
        spoken = [
            tasks.caption(scene, True),
            tasks.analysis(scene),
            tasks.detect_named(asker),
            interview.ask(asker),
        ]
        found.update(p for e in spoken if e and e.kind != "beyond" for p in find(e.answer) + find(e.question))
    unknown = {f" {w}" for noun in foreign.NOUNS for w in noun.split(" ")}
    found -= unknown - {f" {w}" for n in (*world.PICTOGRAMS, *world.COLORS) for w in n.split(" ")}
    found.update(find(f" {language.BEYOND}"), find(" sentence"))
    found.update(f" {n}" for n in range(11))
    found.update(("user", "assistant", "system", " grey", '"grey', "grey", "Grey"))
    return {p for p in found if len(p) > 1 and not re.fullmatch(r"(\[|, )\d+", p)}


def build(pieces: Iterable[str]) -> Tokenizer:
    """The tokenizer over these pieces: bytes, numbers, pieces, specials, in that order of ids."""
    letters = byte_letters()

    def spell(text: str) -> str:
        return "".join(letters[b] for b in text.encode())

    numbers = [f"[{n}" for n in range(1001)] + [f", {n}" for n in range(1001)]
    words = [
        *letters,
        *(spell(n) for n in numbers),
        ", ".replace(" ", letters[32]),
        *(spell(p) for p in sorted(pieces)),
    ]
    vocab = {word: i for i, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in SPECIALS])
    return tokenizer


class Encoder:
    """Text to ids like `tokenizer.json`, in Python, without special tokens."""

    def __init__(self, path: Path) -> None:
        data: dict[str, Any] = json.loads(path.read_text())
        letters = byte_letters()
        back = {letter: byte for byte, letter in enumerate(letters)}
        self.byte_ids = [data["model"]["vocab"][letter] for letter in letters]
        self.ids: dict[str, int] = {}
        for word, i in data["model"]["vocab"].items():
            raw = bytes(back[c] for c in word)
            if len(raw) > 1 or raw < b"\x80":
                self.ids[raw.decode()] = i
        self.special: dict[str, int] = {t["content"]: t["id"] for t in data["added_tokens"]}
        self.size = max(self.special.values()) + 1
        self._find = re.compile(PATTERN).findall

    def __call__(self, text: str) -> list[int]:
        """Ids of `text`."""
        out: list[int] = []
        ids = self.ids
        for piece in self._find(text):
            known = ids.get(piece)
            if known is None:
                out.extend(self.byte_ids[b] for b in piece.encode())
            else:
                out.append(known)
        return out
