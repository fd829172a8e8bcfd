"""The nouns of pocket's world: colours, shapes, pictograms, positions, sizes, and what is held out.

Everything that both the training renderer and the evaluation renderer must agree on lives here; no pictures
are drawn here and nothing is random but `sample_rgb`.
"""

import colorsys
import random
from typing import Final

Rgb = tuple[int, int, int]

# Hue in degrees, saturation and value in 0..1: boxes (h0, h1, s0, s1, v0, v1) inside each colour name, with
# gaps between the names so that the truth is never a matter of taste. The first box is used most. The boxes
# after it reach the shades of user interfaces (Material, Tailwind), pure colours and dark ones.
COLOR_BOXES: Final[dict[str, tuple[tuple[float, float, float, float, float, float], ...]]] = {
    "red": (
        (-8, 8, 0.82, 1.0, 0.72, 1.0), (-3, 5, 0.66, 0.84, 0.86, 1.0), (-3, 3, 0.77, 0.92, 0.76, 0.9),
        (-3, 2, 0.8, 0.92, 0.56, 0.78), (-4, 4, 0.94, 1.0, 0.52, 0.72), (346, 352, 0.88, 1.0, 0.93, 1.0),
    ),
    "orange": (
        (21, 40, 0.82, 1.0, 0.88, 1.0), (25, 37, 0.68, 0.85, 0.95, 1.0), (20, 32, 0.93, 1.0, 0.82, 0.93),
    ),
    "yellow": (
        (49, 62, 0.65, 1.0, 0.86, 1.0), (46.5, 50, 0.86, 1.0, 0.92, 1.0), (52, 60, 0.45, 0.66, 0.97, 1.0),
    ),
    "green": (
        (88, 155, 0.5, 1.0, 0.3, 1.0), (110, 130, 0.9, 1.0, 0.45, 1.0), (105, 143, 0.34, 0.5, 0.6, 0.84),
        (81, 88, 0.6, 1.0, 0.32, 0.92), (155, 162, 0.85, 1.0, 0.4, 0.76), (110, 146, 0.43, 0.55, 0.84, 0.95),
    ),
    "cyan": (
        (174, 190, 0.65, 1.0, 0.75, 1.0), (173, 186, 0.8, 1.0, 0.4, 0.76), (176, 189, 0.45, 0.66, 0.88, 1.0),
    ),
    "blue": (
        (207, 246, 0.58, 1.0, 0.42, 1.0), (236, 242, 0.9, 1.0, 0.5, 1.0), (198, 207, 0.68, 1.0, 0.6, 1.0),
        (205, 232, 0.39, 0.6, 0.78, 1.0), (222, 240, 0.62, 1.0, 0.3, 0.45), (213, 222, 0.58, 1.0, 0.42, 1.0),
    ),
    "purple": (
        (266, 284, 0.45, 1.0, 0.35, 0.95), (284, 301, 0.5, 1.0, 0.35, 0.72), (258, 267, 0.5, 0.84, 0.6, 0.98),
        (266, 292, 0.33, 0.48, 0.74, 1.0), (268, 286, 0.6, 1.0, 0.9, 1.0),
    ),
    "pink": (
        (324, 343, 0.22, 0.95, 0.9, 1.0), (343, 356, 0.2, 0.48, 0.92, 1.0),
        (327, 340, 0.72, 0.92, 0.82, 0.92),
    ),
    "brown": (
        (12, 31, 0.5, 0.9, 0.32, 0.62), (14, 32, 0.8, 0.96, 0.25, 0.48), (11, 19, 0.36, 0.52, 0.3, 0.5),
        (-1, 3, 0.72, 0.76, 0.61, 0.67),
    ),
    "black": ((0, 360, 0.0, 1.0, 0.0, 0.09), (0, 360, 0.0, 0.15, 0.0, 0.14)),
    "white": ((0, 360, 0.0, 0.03, 0.96, 1.0), (0, 360, 0.0, 0.0, 1.0, 1.0)),
    "gray": (
        (0, 360, 0.0, 0.05, 0.38, 0.76), (200, 228, 0.05, 0.19, 0.4, 0.68), (0, 360, 0.0, 0.04, 0.24, 0.38),
        (18, 40, 0.05, 0.11, 0.3, 0.62),
    ),
}  # fmt: skip
COLORS: Final = tuple(COLOR_BOXES)

# Backgrounds may also be pale; pale colours have names of their own.
PALE_BOXES: Final[dict[str, tuple[float, float, float, float, float, float]]] = {
    "light blue": (198, 232, 0.12, 0.34, 0.9, 1.0),
    "light green": (95, 145, 0.14, 0.38, 0.88, 1.0),
    "light yellow": (50, 60, 0.14, 0.36, 0.95, 1.0),
    "light purple": (256, 280, 0.12, 0.3, 0.9, 1.0),
    "light gray": (0, 360, 0.0, 0.02, 0.81, 0.91),
}

SHAPES: Final = (
    "circle", "square", "triangle", "rectangle", "star", "heart", "diamond",
    "pentagon", "hexagon", "cross", "ring", "arrow", "crescent", "oval",
)  # fmt: skip

# Degrees by which a shape may turn before its name stops being true (180 means any angle).
TURN: Final[dict[str, int]] = {
    "circle": 0, "square": 12, "triangle": 180, "rectangle": 20, "star": 180, "heart": 25, "diamond": 8,
    "pentagon": 180, "hexagon": 180, "cross": 15, "ring": 0, "arrow": 180, "crescent": 180, "oval": 30,
}  # fmt: skip

PICTOGRAMS: Final[dict[str, str]] = {
    "cat": "1F431", "dog": "1F436", "fish": "1F41F", "bird": "1F426", "rabbit": "1F430", "bear": "1F43B",
    "frog": "1F438", "pig": "1F437", "cow": "1F42E", "lion": "1F981", "monkey": "1F435", "mouse": "1F42D",
    "elephant": "1F418", "penguin": "1F427", "owl": "1F989", "butterfly": "1F98B", "bee": "1F41D",
    "snail": "1F40C", "turtle": "1F422", "snake": "1F40D", "whale": "1F433", "octopus": "1F419",
    "crab": "1F980", "spider": "1F577", "tree": "1F333", "palm tree": "1F334", "cactus": "1F335",
    "sunflower": "1F33B", "rose": "1F339", "tulip": "1F337", "mushroom": "1F344", "leaf": "1F341",
    "sun": "2600", "cloud": "2601", "rainbow": "1F308", "snowman": "26C4", "snowflake": "2744",
    "lightning": "26A1", "fire": "1F525", "globe": "1F30D", "umbrella": "2602", "car": "1F697",
    "bus": "1F68C", "bicycle": "1F6B2", "airplane": "2708", "boat": "26F5", "train": "1F682",
    "rocket": "1F680", "tractor": "1F69C", "truck": "1F69A", "helicopter": "1F681", "house": "1F3E0",
    "castle": "1F3F0", "tent": "26FA", "apple": "1F34E", "banana": "1F34C", "cherry": "1F352",
    "grapes": "1F347", "strawberry": "1F353", "watermelon": "1F349", "pineapple": "1F34D", "lemon": "1F34B",
    "carrot": "1F955", "corn": "1F33D", "pizza": "1F355", "hamburger": "1F354", "bread": "1F35E",
    "cake": "1F382", "ice cream": "1F366", "donut": "1F369", "egg": "1F95A", "cup": "2615", "key": "1F511",
    "book": "1F4D6", "guitar": "1F3B8", "drum": "1F941", "trumpet": "1F3BA", "football": "26BD",
    "basketball": "1F3C0", "tennis racket": "1F3BE", "clock": "23F0", "phone": "1F4F1", "laptop": "1F4BB",
    "camera": "1F4F7", "light bulb": "1F4A1", "scissors": "2702", "pencil": "270F", "hammer": "1F528",
    "lock": "1F512", "gift": "1F381", "balloon": "1F388", "hat": "1F3A9", "shirt": "1F455", "shoe": "1F45F",
    "glasses": "1F453", "crown": "1F451", "chair": "1FA91", "robot": "1F916", "ghost": "1F47B",
    "anchor": "2693",
}  # fmt: skip

# Kinds that can be counted without an argument: kind → (its plural, its members).
KINDS: Final[dict[str, tuple[str, frozenset[str]]]] = {
    "animal": ("animals", frozenset(tuple(PICTOGRAMS)[:24])),
    "fruit": ("fruits", frozenset({
        "apple", "banana", "cherry", "grapes", "strawberry", "watermelon", "pineapple", "lemon",
    })),
    "vehicle": ("vehicles", frozenset({
        "car", "bus", "bicycle", "airplane", "boat", "train", "rocket", "tractor", "truck", "helicopter",
    })),
    "flower": ("flowers", frozenset({"sunflower", "rose", "tulip"})),
    "shape": ("shapes", frozenset(SHAPES)),
    "pictogram": ("pictograms", frozenset(PICTOGRAMS)),
}  # fmt: skip

# Straight sides and corners of each shape as it is drawn; a heart's are a matter of taste.
SIDES: Final[dict[str, int]] = {
    "circle": 0, "oval": 0, "ring": 0, "triangle": 3, "square": 4, "rectangle": 4, "diamond": 4,
    "pentagon": 5, "hexagon": 6, "arrow": 7, "star": 10, "cross": 12,
}  # fmt: skip
CORNERS: Final[dict[str, int]] = {n: SIDES[n] for n in SIDES if n not in ("arrow", "star", "cross")}

_PLURALS: Final[dict[str, str]] = {
    "fish": "fish", "mouse": "mice", "leaf": "leaves", "cherry": "cherries", "strawberry": "strawberries",
    "butterfly": "butterflies", "octopus": "octopuses", "cactus": "cactuses", "bus": "buses",
    "cross": "crosses",
    "grapes": "grapes", "glasses": "glasses", "scissors": "scissors", "lightning": "lightning bolts",
    "sheep": "sheep", "tomato": "tomatoes", "snowman": "snowmen",
}  # fmt: skip
NO_ARTICLE: Final = frozenset(
    {"grapes", "glasses", "scissors", "lightning", "corn", "bread", "pizza", "fire"}
)

POSITIONS: Final = (
    "top left", "top center", "top right", "center left", "center", "center right",
    "bottom left", "bottom center", "bottom right",
)  # fmt: skip
PATTERNS: Final = ("plain", "gradient", "striped", "checkered", "dotted", "textured")

# Relative size = sqrt(box area / picture area). The gaps keep "small", plain and "large" apart.
SMALL_MAX: Final = 0.145
MEDIUM: Final = (0.165, 0.275)
LARGE_MIN: Final = 0.305
SIZES: Final = ("small", "medium", "large")

# ---- held out: never drawn, never named together in training --------------------------------------------
UNSEEN_PAIRS: Final = frozenset({
    ("red", "star"), ("blue", "triangle"), ("green", "heart"), ("yellow", "square"), ("purple", "circle"),
    ("orange", "hexagon"), ("black", "ring"), ("pink", "pentagon"),
})  # fmt: skip
UNSEEN_BAND: Final = (0.205, 0.225)  # relative sizes of shapes and pictograms
UNSEEN_FONTS: Final = ("OpenSans", "FreeSerif", "Cantarell", "LiberationSansNarrow")  # file name prefixes


def unseen_canvas(width: int, height: int) -> bool:
    """Whether this picture size (pixels) belongs to the evaluation only: about one size in ten."""
    return (width * 7 + height * 3) % 10 == 4


def plural(name: str) -> str:
    """The plural of the last word of `name`."""
    if name in _PLURALS:
        return _PLURALS[name]
    head, _, last = name.rpartition(" ")
    word = _PLURALS.get(last) or (last + ("es" if last.endswith(("x", "s", "ch", "sh")) else "s"))
    return f"{head} {word}" if head else word


def with_article(phrase: str) -> str:
    """`phrase` with "a" or "an", or none where the noun takes none."""
    if phrase.rpartition(" ")[2] in NO_ARTICLE:
        return phrase
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def sample_rgb(name: str, rng: random.Random) -> Rgb:
    """A colour that everybody would call `name`."""
    boxes = (PALE_BOXES[name],) if name in PALE_BOXES else COLOR_BOXES[name]
    h0, h1, s0, s1, v0, v1 = boxes[0] if len(boxes) == 1 or rng.random() < 0.5 else rng.choice(boxes[1:])
    u = rng.random
    hue, sat, val = h0 + (h1 - h0) * u(), s0 + (s1 - s0) * u(), v0 + (v1 - v0) * u()
    r, g, b = colorsys.hsv_to_rgb(hue % 360 / 360, sat, val)
    return round(r * 255), round(g * 255), round(b * 255)


def certain_name(rgb: Rgb, slack: float = 0.0) -> str | None:
    """The name of a colour (0..255) that lies inside the name's boxes, widened by `slack`; None elsewhere."""
    hue, sat, val = colorsys.rgb_to_hsv(*(v / 255 for v in rgb))
    for name, boxes in COLOR_BOXES.items():
        for h0, h1, s0, s1, v0, v1 in boxes:
            inside = s0 - slack <= sat <= s1 + slack and v0 - slack <= val <= v1 + slack
            if inside and (hue * 360 - h0 + 20 * slack) % 360 <= h1 - h0 + 40 * slack:
                return name
    return None


def color_distance(a: Rgb, b: Rgb) -> float:
    """Distance between two colours, green weighted most, 0..~255."""
    dr, dg, db = a[0] - b[0], a[1] - b[1], a[2] - b[2]
    return float((0.28 * dr * dr + 0.5 * dg * dg + 0.22 * db * db) ** 0.5)


def size_name(relative: float) -> str:
    """The size class of a relative size; callers avoid the gaps between classes."""
    if relative <= (SMALL_MAX + MEDIUM[0]) / 2:
        return "small"
    return "medium" if relative <= (MEDIUM[1] + LARGE_MIN) / 2 else "large"


def position_name(x: float, y: float) -> str:
    """The one of nine places of a centre given in 0..1."""
    return POSITIONS[min(2, int(y * 3)) * 3 + min(2, int(x * 3))]
