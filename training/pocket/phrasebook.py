"""How people put their questions: templates by kind, and words of the world outside.

{s} singular noun phrase, {p} plural, {t} a second noun phrase, {d} a direction, {w} a place. The first letter
is also used in lower case, the question mark is also left out, and spelling varies (see questions.ask_like).
"""

from typing import Final

TEMPLATES: Final[dict[str, tuple[str, ...]]] = {
    "count": (
        "How many {p} are there?", "How many {p}?", "How many {p} are in the image?",
        "How many {p} can you see?", "How many {p} do you see?", "Count the {p}.",
        "What is the number of {p}?", "How many {p} does the picture show?",
        "How many {p} are in this picture?", "Number of {p}?", "Please count the {p} in the image.",
        "How many {p} are shown?", "How many {p} did you find?", "How many {p} altogether?",
        "How many {p} in all?", "How many {p} have been drawn?", "How many {p} do you count?",
        "How many {p} can be found here?", "What is the count of {p}?", "How many {p} are there in total?",
        "The number of {p}, please.", "How many of the things are {p}?", "What's the total of {p}?",
        "Say how many {p} there are.", "How many {p} were drawn here?", "How many {p} could you find?",
        "And the number of {p}?",
    ),
    "count_all": (
        "How many objects are there?", "How many objects are in the image?", "How many things can you see?",
        "Count the objects.", "How many items are shown?", "How many objects?",
        "What is the total number of objects?", "How many things are in this picture?",
        "How many objects do you see?", "Count all the objects in the image.",
    ),
    "color": (
        "What color is the {s}?", "What is the color of the {s}?", "Which color is the {s}?",
        "What color does the {s} have?", "Color of the {s}?", "Tell me the color of the {s}.",
        "Which color does the {s} have?", "The {s} is what color?", "What's the color of the {s}?",
        "What color is the {s} in the image?",
    ),
    "shape": (
        "What shape is {c}?", "What shape is the {c} object?", "Which shape is {c}?",
        "What is the {c} shape?", "What is the shape of the {c} object?", "What {c} shape is there?",
        "Name the {c} shape.", "What is {c}?", "Which shape has the color {c}?",
        "What {c} object is in the image?",
    ),
    "where": (
        "Where is the {s}?", "Where is the {s} located?", "What is the position of the {s}?",
        "In which part of the image is the {s}?", "Where can I find the {s}?", "Location of the {s}?",
        "Where do you see the {s}?", "Where in the picture is the {s}?", "Tell me where the {s} is.",
        "Where's the {s}?",
    ),
    "exists": (
        "Is there {a}?", "Is there {a} in the image?", "Is there {a} in the picture?", "Can you see {a}?",
        "Do you see {a}?", "Does the image contain {a}?", "Does the picture show {a}?", "Is {a} visible?",
        "Are there any {p}?", "Are there {p} in the image?", "Is {a} in this picture?",
        "Do you see any {p}?", "Have you found {a}?", "Did you find {a}?", "Could there be {a}?",
        "Is there {a} here?",
    ),
    "beside": (
        "What is {d} the {s}?", "What object is {d} the {s}?", "Which objects are {d} the {s}?",
        "What can you see {d} the {s}?", "What do you see {d} the {s}?", "Which things are {d} the {s}?",
        "Name what is {d} the {s}.", "What's {d} the {s}?",
    ),
    "is_beside": (
        "Is the {s} {d} the {t}?", "Is the {s} located {d} the {t}?", "Does the {s} lie {d} the {t}?",
        "Is it true that the {s} is {d} the {t}?", "Can you see the {s} {d} the {t}?",
        "Is the {s} placed {d} the {t}?", "Tell me whether the {s} is {d} the {t}.",
        "Would you say the {s} is {d} the {t}?",
    ),
    "bigger": (
        "Which is bigger, the {s} or the {t}?", "Which is larger, the {s} or the {t}?",
        "What is bigger, the {s} or the {t}?", "What is larger: the {s} or the {t}?",
        "Is the {s} or the {t} bigger?", "Is the {s} or the {t} larger?",
        "Between the {s} and the {t}, which is bigger?", "Tell me which is larger, the {s} or the {t}.",
    ),
    "smaller": (
        "Which is smaller, the {s} or the {t}?", "What is smaller, the {s} or the {t}?",
        "Is the {s} or the {t} smaller?", "What is smaller: the {s} or the {t}?",
        "Between the {s} and the {t}, which is smaller?", "Tell me which is smaller, the {s} or the {t}.",
        "Which one is smaller, the {s} or the {t}?", "Which object is smaller, the {s} or the {t}?",
    ),
    "extreme": (
        "What is the {e} object?", "Which object is the {e}?", "What is the {e} thing in the image?",
        "Name the {e} object.", "Which is the {e} object?", "What's the {e} object?",
        "Tell me the {e} object.", "Which thing is the {e}?",
    ),
    "size": (
        "How big is the {s}?", "What size is the {s}?", "How large is the {s}?",
        "What is the size of the {s}?", "Is the {s} small, medium or large?", "Size of the {s}?",
        "Tell me the size of the {s}.", "Is the {s} large or small?",
    ),
    "at": (
        "What is in the {w}?", "What is at the {w}?", "What do you see in the {w}?",
        "Which object is in the {w}?", "What's in the {w}?", "What is in the {w} of the image?",
        "What can you see in the {w} of the picture?", "Name the object in the {w}.",
    ),
    "list": (
        "What objects are there?", "What is in the image?", "What do you see?", "What is in this picture?",
        "List the objects.", "Which objects are in the image?", "What can you see?",
        "What objects are in the picture?", "What is shown here?", "Name all objects.",
        "What things are there?", "What's in this image?", "What is this?",
    ),
    "describe": (
        "Describe this image.", "Describe the image.", "Describe the picture.", "Caption this image.",
        "What does the image show?", "Describe what you see.", "Give a short description of the image.",
        "Write a caption.", "What does this picture show?", "Tell me about this image.",
        "Describe the scene.", "Please describe this picture.",
    ),
    "text": (
        "What does it say?", "What is written?", "What is written here?", "What does the text say?",
        "Read the text.", "What text is in the image?", "Which word is written?",
        "What word is in the image?", "What is the text?", "What does the image say?",
        "Read what is written in the picture.", "What word is shown?", "What text do you see?",
        "What words are there?",
    ),
    "number": (
        "Which number is shown?", "What number is written?", "What number is in the image?",
        "Read the number.", "What is the number?", "Which number is written here?",
        "What number do you see?", "What number is this?",
    ),
    "has_text": (
        "Is there any text?", "Is there text in the image?", "Is anything written in the image?",
        "Does the image contain text?", "Can you see any text?", "Is there a word in the picture?",
        "Do you see any words?", "Are there any words in the image?",
    ),
    "text_color": (
        "What color is the text?", "What is the color of the text?", "What color is the word?",
        "Which color does the text have?", "In which color is the text written?",
        "What color are the letters?", "Color of the text?", "What's the color of the word?",
    ),
    "where_text": (
        "Where is the text?", "Where is the word?", "Where is the text located?",
        "In which part of the image is the text?", "Where can I read something?",
        "Where is something written?", "Location of the text?", "Where do you see text?",
    ),
    "background": (
        "What color is the background?", "What is the background color?",
        "What is the color of the background?", "Which color is the background?",
        "Which color does the background have?", "Background color?",
        "Tell me the color of the background.", "What color is behind the objects?",
    ),
    "pattern": (
        "What does the background look like?", "Describe the background.", "What is the background?",
        "What kind of background is it?", "Is the background plain or patterned?",
        "What pattern does the background have?", "How is the background?", "What is the background like?",
    ),
    "sides": (
        "How many sides does the {s} have?", "How many sides has the {s}?",
        "How many sides are on the {s}?", "What is the number of sides of the {s}?",
        "Number of sides of the {s}?", "Count the sides of the {s}.", "How many edges does the {s} have?",
        "The {s} has how many sides?", "How many straight sides does the {s} have?",
        "Tell me how many sides the {s} has.", "Can you count the sides of this {s}?",
        "How many sides does this {s} have?", "The number of sides on the {s}?",
        "How many sides do you count on the {s}?", "What is this {s}'s number of sides?",
    ),
    "corners": (
        "How many corners does the {s} have?", "How many corners has the {s}?",
        "Count the corners of the {s}.", "What is the number of corners of the {s}?",
        "How many vertices does the {s} have?", "The {s} has how many corners?",
        "Number of corners of the {s}?",
    ),
    "which": (
        "Which {p} are there?", "What {p} are there?", "Which {p} can you see?", "What {p} do you see?",
        "Name the {p}.", "List the {p}.", "Which {s} is there?", "Which {s} is it?", "What {s} is this?",
        "Which {p} are in the image?", "What kind of {s} is in the picture?",
    ),
    "shape_or": (
        "Is the {c} shape {a} or {b}?", "Is it {a} or {b} that is {c}?", "Is the {c} one {a} or {b}?",
        "Is the {c} object {a} or {b}?", "{a} or {b}: what is the {c} shape?",
        "Is the {c} thing {a} or {b}?", "Is the {c} shape {a} or maybe {b}?",
        "Is the {c} shape {a} or perhaps {b}?", "Is the {c} shape {a}, or is it {b}?",
        "What is the {c} shape, {a} or {b}?", "Would you say the {c} shape is {a} or {b}?",
        "Which is it, the {c} shape: {a} or {b}?", "Is the {c} one {a} or instead {b}?",
        "Do you see {a} or {b} in {c}?",
    ),
    "color_or": (
        "Is the {s} {a} or {b}?", "Is the {s} {a} or is it {b}?", "{a} or {b}: which color is the {s}?",
        "Is the color of the {s} {a} or {b}?", "What color is the {s}, {a} or {b}?",
        "Would you call the {s} {a} or {b}?", "Is the {s} {a} or maybe {b}?",
        "Is the {s} more {a} or more {b}?", "Is the {s} {a}, or perhaps {b}?",
        "Which is it, is the {s} {a} or {b}?", "Is the {s} {a} or {b} in color?",
        "Do you think the {s} is {a} or {b}?",
    ),
    "is_color": (
        "Is the {s} {c}?", "Is the {s} colored {c}?", "Is it a {c} {s}?", "Is the color of the {s} {c}?",
        "Does the {s} have the color {c}?", "Tell me whether the {s} is {c}.", "Is the {s} {c} in color?",
    ),
    "coordinates": (
        "What are the coordinates of the {s}?", "Give me the coordinates of the {s}.",
        "Coordinates of the {s}?", "What is the bounding box of the {s}?",
        "Where exactly is the {s}? Give coordinates.", "At which coordinates is the {s}?",
        "Tell me the coordinates of the {s}.", "Show me the coordinates of the {s}.",
        "What are the {s}'s coordinates?", "Please give me the box of the {s}.",
        "Can you give coordinates for the {s}?", "The coordinates of the {s}, please.",
        "I need the exact position of the {s} in coordinates.", "Where is the {s}, in coordinates?",
        "The {s}'s bounding box?", "Please write down the {s}'s box.",
        "Which coordinates does the {s} have?", "Give the exact coordinates of the {s}.",
    ),
}  # fmt: skip

DIRECTIONS: Final[dict[str, tuple[str, ...]]] = {
    "left": ("left of", "to the left of"),
    "right": ("right of", "to the right of"),
    "above": ("above", "over", "higher than"),
    "below": ("below", "under", "beneath", "lower than"),
}

EXTREMES: Final[dict[str, tuple[str, ...]]] = {
    "largest": ("largest", "biggest"),
    "smallest": ("smallest",),
    "leftmost": ("leftmost",),
    "rightmost": ("rightmost",),
    "topmost": ("topmost", "highest"),
    "bottommost": ("bottommost", "lowest"),
}

PLACES: Final[dict[str, tuple[str, ...]]] = {
    "top left": ("top left", "top left corner", "upper left"),
    "top center": ("top center", "top middle"),
    "top right": ("top right", "top right corner", "upper right"),
    "center left": ("center left", "middle left"),
    "center": ("center", "middle"),
    "center right": ("center right", "middle right"),
    "bottom left": ("bottom left", "bottom left corner", "lower left"),
    "bottom center": ("bottom center", "bottom middle"),
    "bottom right": ("bottom right", "bottom right corner", "lower right"),
}

DETECT_LIKE: Final = (
    "Detect the {n}. Report bbox coordinates in JSON format.",
    "Find all {n} and return their bounding boxes as JSON.",
    "Locate the {n} in the image, output bbox coordinates using JSON format.",
    "Where are the {n}? Answer with boxes in JSON.",
    "Outline the position of the {n} and output all the coordinates in JSON format.",
    "Give the bounding box of the {n}.",
    "Detect {n}.",
)

# How questions of any kind may begin; {} is the question, its first letter small.
POLITE: Final = (
    "Please say: {}", "Quick question: {}", "Could you say: {}", "Would you tell me: {}", "Let me ask: {}",
    "Please tell me: {}", "Can you tell me: {}", "Hey, {}", "Look at the picture: {}", "Now, {}", "Well, {}",
    "I wonder: {}", "Next question: {}", "Just a question: {}", "And {}", "So {}", "Hello, {}",
)  # fmt: skip

# How they may end, before the question mark or the full stop.
ENDINGS: Final = (
    " here",
    " in this image",
    ", please",
    " then",
    ", do you think",
    " exactly",
    " now",
    " really",
)
