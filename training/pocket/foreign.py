"""The world outside: questions and nouns that pocket does not know and must answer honestly.

The evaluation of honesty (`honesty.py`) has wordings of its own, none of which stands here.
"""

import random
import re
from collections.abc import Sequence
from typing import Final

# Slots: {o} a noun (of pocket's world or not), {p} its plural, {a} an attribute, {j} an adjective, {v} a
# verb, {k} a verb's third person, {n} {m} numbers, {l} a language, {c} a place, {w} a word, {g} a kind of
# thing.
QUESTIONS: Final = (
    "Who is the president?", "Who is the {o}?", "Who is that?", "Who is this?", "Who made this?",
    "Who painted this?", "Who took this picture?", "Who drew the {o}?", "Who owns the {o}?", "Who are you?",
    "Who invented the {o}?", "Who {k} the {o}?", "Who is the author?", "Who lives in the {o}?",
    "Why?", "Why is the {o} here?", "Why is the {o} {j}?", "Why did the {o} {v}?", "Why is it {j}?",
    "Why does the {o} {v}?", "Why are there {p}?", "Why is this {j}?", "Why would anyone {v} a {o}?",
    "When was this taken?", "When was the {o} built?", "When did the {o} {v}?", "When is {w}?",
    "Where was this photo taken?", "Where does the {o} come from?", "Where does the {o} live?",
    "Where can I buy a {o}?", "Where is {c}?", "Where was the {o} made?", "Where am I?",
    "What is the weather?", "What is the weather like?", "What is the weather in {c}?", "Is it raining?",
    "Will it rain tomorrow?", "Is it sunny today?", "Is it cold outside?", "What is the temperature?",
    "Is it day or night?", "What time is it?", "What year is this?", "What day is it?", "Which season is it?",
    "What is the {a} of the {o}?", "What {a} does the {o} have?", "What {a} is the {o}?",
    "Which {a} is the {o}?", "Tell me the {a} of the {o}.", "Do you know the {a} of the {o}?",
    "What's the {o}'s {a}?", "Estimate the {a} of the {o}.", "What is its {a}?", "Guess the {a} of the {o}.",
    "What {a} is this?", "What is the {a}?", "How do you measure the {a} of a {o}?",
    "Give me the {a} of the {o}.", "What would the {a} of the {o} be?", "Calculate the {a} of the {o}.",
    "Compute its {a}.", "Name the {a} of the {o}.", "What {a} of {o} is that?",
    "Is the {o} {j}?", "Is the {o} {j} or {j}?", "Is this {j}?", "How {j} is the {o}?",
    "Does the {o} look {j}?",
    "Is it a {j} {o}?", "Are the {p} {j}?", "Do you think the {o} is {j}?", "Which {o} is the most {j}?",
    "Would you call the {o} {j}?", "Does it seem {j}?", "What makes the {o} {j}?", "Is the picture {j}?",
    "Is a {o} more {j} than a {o}?", "Are {p} {j}?",
    "Can the {o} {v}?", "Does the {o} {v}?", "Will the {o} {v}?", "Should I {v} the {o}?", "Can you {v}?",
    "Can I {v} this?", "Could a {o} {v}?", "Did the {o} {v}?", "Has the {o} ever {v}ed?",
    "Do {p} {v}?", "How do I {v} a {o}?", "How does a {o} {v}?", "Would the {o} {v} me?",
    "How much does the {o} cost?", "How much is the {o}?", "How much does the {o} weigh?",
    "How many euros is the {o}?", "Is the {o} expensive?", "How much would you pay for the {o}?",
    "How old is the {o}?", "How old are you?", "How tall is the {o}?", "How long is the {o}?",
    "How wide is the {o}?", "How heavy is the {o}?", "How far away is the {o}?", "How fast is the {o}?",
    "How deep is the {o}?", "How hot is the {o}?", "How many kilos does the {o} weigh?",
    "How many legs does the {o} have?", "How many eyes does the {o} have?", "How many wheels has the {o}?",
    "How many teeth does the {o} have?", "How many wings has the {o}?", "How many hours are in a day?",
    "How many people live in {c}?", "How many {p} are in the world?", "How many seats does the {o} have?",
    "How many legs are there?", "How many years does a {o} live?", "How many pixels is the {o}?",
    "How many arms has the {o}?", "How many doors does the {o} have?", "How many days are in a week?",
    "What breed is the {o}?", "What species is the {o}?", "What brand is the {o}?", "What model is the {o}?",
    "What kind of {o} is this?", "What type of {o} is it?", "Which kind of {o} is that?",
    "What is the {o} doing?", "What is the {o} holding?", "What is the {o} made of?", "What is the {o} for?",
    "What is the {o} thinking?", "What is the person wearing?", "What does the {o} eat?",
    "What does the {o} mean?", "What does the {o} smell like?", "What does the {o} taste like?",
    "What does a {o} sound like?", "What does {w} mean?", "What emotion does the {o} show?",
    "What is inside the {o}?", "What is behind the camera?", "What is the {o} called?",
    "What is a {o}?", "What is the best {o}?", "What is a synonym for {w}?", "What rhymes with {w}?",
    "What is the opposite of {w}?", "What is the meaning of life?", "What is the mood of this picture?",
    "What is the capital of {c}?", "What is the population of {c}?", "What language is this?",
    "What happens next?", "What happened before?", "What sport is this?", "What should I cook tonight?",
    "What should I do?", "What do you think about the {o}?", "What do you like?", "What can you do?",
    "What could I use the {o} for?", "What is your name?", "What is your favourite {o}?",
    "What are the ingredients of {w}?", "What is the secret?", "What is this worth?", "What style is this?",
    "What font is this?", "What software made this?", "What is the file size?", "What is the hex code?",
    "What is {n}+{m}?", "What is {n} plus {m}?", "What is {n} times {m}?", "What is {n} minus {m}?",
    "{n} + {m} = ?", "{n}*{m}", "Divide {n} by {m}.", "What is the square root of {n}?",
    "Solve x + {n} = {m}.",
    "Is {n} a prime number?", "What is {n} percent of {m}?", "Add {n} and {m}.", "Multiply {n} by {m}.",
    "Which country is this?", "Which city is this?", "Which movie is this from?", "Which artist made this?",
    "Which {o} is better?", "Which team won?", "Which {o} would you buy?", "Which company makes the {o}?",
    "Translate this into {l}.", "Translate {w} to {l}.", "How do you say {o} in {l}?",
    "What is {o} in {l}?", "Say it in {l}.", "What is the {l} word for {o}?", "Do you speak {l}?",
    "Answer in {l}.", "Write this in {l}.",
    "Is this indoors or outdoors?", "Is the {o} real?", "Is this a photo?", "Is this picture beautiful?",
    "Is the {o} happy?", "Is the {o} male or female?", "Is the {o} a good pet?", "Is it safe to {v} the {o}?",
    "Is it alive?", "Is it art?", "Is this your {o}?", "Is there life on Mars?", "Is the {o} for sale?",
    "Is the {o} broken?", "Is the {o} moving?", "Is the {o} open?", "Is the {o} from {c}?",
    "Are you a robot?", "Are you sure?", "Are you human?", "Are we alone?", "Do you like the {o}?",
    "Do you love me?", "Do you dream?", "Do you have a {o}?", "Does God exist?", "Does the {o} belong to me?",
    "Tell me a joke.", "Tell me a story about the {o}.", "Tell me about yourself.", "Tell me about {c}.",
    "Tell me something about {p}.", "Write a poem about the {o}.", "Write Python code.", "Write a song.",
    "Write a letter to the {o}.", "Write an essay about {w}.", "Sing a song.", "Explain the {o}.",
    "Explain {w}.",
    "Explain how a {o} works.", "Summarize the {o}.", "Solve the puzzle.", "Play chess with me.",
    "Invent a name for the {o}.", "Recommend a {o}.", "Define {w}.", "Spell {w} backwards.", "Draw a {o}.",
    "Make the {o} {j}.", "Remove the {o}.", "Change the {o} to a {o}.", "Give me a recipe for {w}.",
    "Imagine the {o} could {v}.", "Give the {o} a name.", "Compare {p} with {p}.", "Help me {v}.",
    "Hello", "Hi there!", "Good morning", "Thank you.", "How are you?", "Thanks!", "Bye", "Please help.",
    "Any idea who {k} the {o}?", "Any idea why the {o} is {j}?", "Any guess at the {a} of this {o}?",
    "Isn't the {o} {j}?", "Do you find this {o} {j}?", "Is that {o} {j}?", "Isn't it {j}?",
    "Is this {o} {j} or not?",
    "Is the {o} {j} for children?", "Is it {j} to {v} a {o}?", "How {j} are {p} usually?",
    "How {j} might it be?",
    "What is the usual {a} of a {o}?", "What {a} do {p} have?", "How much {a} does the {o} have?",
    "Do you happen to know its {a}?", "Could you estimate its {a} in meters?", "How many meters is the {o}?",
    "How many liters fit into the {o}?", "How many calories has the {o}?",
    "How many friends does the {o} have?",
    "How many minutes does it take to {v}?", "How many times did the {o} {v}?",
    "How many toes does a {o} have?",
    "How much money do I need to {v}?", "What would you {v}?", "What will the {o} {v}?",
    "What can the {o} {v}?",
    "Would you rather {v} or {v}?", "Do I need to {v} {w}?", "Should we {v} the {o} {w}?",
    "May I {v} your {o}?",
    "Could the {o} {v} in {c}?", "Would a {o} {v} in the sea?", "Where do {p} {v}?", "Where do you {v}?",
    "Was this {o} made in {c}?", "Was it {j} when they took it?", "Were you {j} yesterday?", "Who {k} {w}?",
    "Who discovered {w}?", "Who is the king of {c}?", "Which {w} made this?", "Which {o} did {c} {v}?",
    "In what {a} was the {o} made?", "From which {a} is the {o}?", "By whom was the {o} made?",
    "Why is {w} {j}?", "Why do {p} {v}?", "Why has nobody {v}ed it?", "When do {p} {v}?",
    "When is the {o} {j}?",
    "What is the fastest {o} on earth?", "What is the biggest {w} in {c}?", "What is the {l} for {o}?",
    "Now say {w} in {l}.", "How does one write {o} in {l}?", "Which {l} word means {o}?",
    "Can you work out {n} / {m}?", "How much is {n} and {m}?", "What does {n} minus {m} make?", "Is {n} odd?",
    "Compose a {w} about the {o}.", "Make up a {w} for me.", "Give me three facts about {p}.",
    "Rate the {o}.",
    "What day is {w}?", "What month is it?", "Is it {w} already?", "Have you ever {v}ed?",
    "Have you got a {o}?",
    "Can you help me {v} my {w}?", "Do you have {w}?", "Do you believe in {w}?", "Are you {j}?", "Am I {j}?",
    "{w}", "{w} {w}", "{w} {w} {w}?", "{w}?", "the {o} {k} {w}",
)  # fmt: skip

ATTRIBUTES: Final = """
area perimeter circumference diameter radius volume weight mass height length width depth price cost value age
name brand breed species gender temperature speed mood nationality religion owner author purpose function
material texture smell taste sound feeling emotion meaning history origin story address job profession hobby
model year manufacturer power voltage energy frequency wavelength density angle radius calories ingredients
lifespan diet habitat species family latin title artist style genre language country city capacity quality
rating warranty score population distance destination route engine mileage fuel currency symbolism pattern
expression pose rank party team opinion advice reason moral phone email serial resolution
""".split()  # noqa: SIM905
ADJECTIVES: Final = """
cute pretty beautiful ugly happy sad angry hungry tired old young new rich poor fast slow strong weak safe
dangerous poisonous edible tasty sweet sour ripe fresh rotten expensive cheap useful real fake alive dead
broken clean dirty wet dry hot cold warm heavy soft hard loud quiet funny scary friendly famous male female
tall intelligent clever stupid modern ancient electric wooden metallic tame wild rare common healthy sick
lucky asleep awake busy empty full open closed lonely brave lazy shy fluffy smooth rough magnetic waterproof
legal free popular
""".split()  # noqa: SIM905
VERBS: Final = """
fly swim run jump bite sleep eat drink sing dance talk think dream bark move drive cook read write buy sell
repair clean paint break burn melt grow die win lose play work travel climb dig hunt hide fight kiss hug
carry feed pet kill touch open close ride throw catch kick wear build use clone
""".split()  # noqa: SIM905
LANGUAGES: Final = """
German French Spanish Italian Chinese Japanese Russian Latin Greek Arabic Polish Dutch Swedish Turkish Hindi
Portuguese Korean Esperanto
""".split()  # noqa: SIM905
CITIES: Final = """
France Germany Paris London Berlin Rome Tokyo Spain Italy China Brazil Canada Egypt India Mexico Peru Texas
Kenya Norway Moscow Vienna Lisbon Sydney Africa Europe Mars
""".split()  # noqa: SIM905
WORDS: Final = """
love freedom time money justice music politics science physics chemistry algebra democracy gravity tomorrow
yesterday lunch dinner pasta soup bread football history war peace happiness internet blockchain relativity
god quantum mechanics evolution inflation philosophy homework password bitcoin christmas easter holiday
birthday sentence paragraph banana split sugar salt pepper garlic tax rent salary insurance virus vaccine
doctor lawyer
""".split()  # noqa: SIM905

NOUNS: Final = (
    "person", "man", "woman", "child", "boy", "girl", "people", "horse", "sheep", "goat", "tiger", "zebra",
    "giraffe", "dinosaur", "dragon", "unicorn", "table", "sofa", "bed", "lamp", "window", "door", "mountain",
    "river", "ocean", "beach", "street", "road", "bridge", "traffic light", "stop sign", "bench", "bottle",
    "glass", "knife", "fork", "spoon", "plate", "orange juice", "sandwich", "soup", "cheese", "tomato",
    "potato", "onion", "wall", "floor", "ceiling", "roof", "garden", "field", "lake", "motorcycle", "ship",
    "submarine", "tank", "piano", "violin", "television", "computer", "keyboard", "monitor", "printer",
    "table lamp", "candle", "mirror", "painting", "statue", "flag", "doctor", "teacher", "soldier", "king",
    "queen", "wizard", "pirate", "baby", "family", "crowd", "dancer", "singer", "kitchen", "office", "school",
    "hospital", "factory", "airport", "station", "market", "shop", "bank", "church", "tower", "skyscraper",
    "volcano", "desert", "forest", "jungle", "planet", "galaxy", "octagon", "cylinder", "cube", "sphere",
    "pyramid", "spiral", "kangaroo", "camel", "wolf", "fox", "deer", "squirrel", "eagle", "duck", "chicken",
    "shark", "dolphin", "jellyfish",
)  # fmt: skip


def _made_up(rng: random.Random) -> str:
    """A word that nobody knows: syllables, so that unknown words are met spelled every way."""
    parts = (rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(1, 3)))
    return "".join(parts) + rng.choice(("", "n", "r", "s", "t", "ck", "sh"))


def question(rng: random.Random, names: Sequence[tuple[str, str]]) -> str:
    """A question that no picture of pocket's world answers, about `names`: nouns with their plurals."""

    def fill(slot: re.Match[str]) -> str:
        kind = slot[1]
        if kind in ("n", "m"):
            return str(rng.randrange(10 ** rng.choice((1, 1, 2, 3))))
        if kind in ("o", "p"):
            return rng.choice(names)[kind == "p"]
        lists = {
            "a": ATTRIBUTES,
            "j": ADJECTIVES,
            "v": VERBS,
            "k": VERBS,
            "l": LANGUAGES,
            "c": CITIES,
            "w": WORDS,
        }
        word = _made_up(rng) if rng.random() < 0.15 else rng.choice(lists[kind])
        return f"{word}s" if kind == "k" else word

    return re.sub(r"\{(\w)\}", fill, rng.choice(QUESTIONS))
