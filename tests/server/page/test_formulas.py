"""Formulas in answers: MathML made of Temml's tree; amounts and what can't be read stay as written."""

from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.server.fake import FakeService, Script
from tests.server.page.conftest import OpenPage, PageOf, answers, ask, take_sample

ANSWER = r"""The area is $A = \pi r^2$, and \(x_1\) is its root.

$$
\sum_{i=1}^{n} \frac{a_i}{b_i}
$$

\[
\begin{aligned} a &= b \\ &= \sqrt[3]{c} \tag{7}\end{aligned}
\]

Between two words \[ y \] and $$z$$ too.

- an item with $\vec{v}$

| formula |
|--|
| $\cancel{x}$ |

"""
# Markdown, and what of it are formulas.
READ: dict[str, list[str]] = {
    "It costs $5 and $10.": [],
    "It costs $5, or 5$ there.": [],
    "between $5 and $10-$20": [],
    "$ x $ and $x $ and $ x$": [],
    r"\$x$ and $x\$": [],
    "`$x$` and `\\(x\\)`": [],
    "```\n$$x$$\n```": [],
    "$$\nx\n\ny\n$$": [],  # an empty line ends a paragraph
    "$$x": [],
    "\\\\(x\\\\)": [],  # backslashes that are escaped
    r"$\text{costs \$5}$": [r"\text{costs \$5}"],
    "$x$-axis and ($y$), $z$.": ["x", "y", "z"],
    "a$x$b": ["x"],
    "$$x$$": ["x"],
    "$$x$$ and $$y$$": ["x", "y"],
    "> $$\n> x\n> $$": ["x"],
    "1. One:\n   $$\n   x\n   $$\n2. Two": ["x"],
    "words before\n\\[\nx\n\\]\nwords after": ["x"],
    r"$a_b$ and $c_d$": ["a_b", "c_d"],  # underscores between them are no emphasis
}
FORMULAS_OF = """async (texts) => {
    const { markdown } = await import("/page/markdown.js");
    const read = [];
    const real = temml.__renderToMathMLTree;
    return texts.map((text) => {
        const found = [];
        temml.__renderToMathMLTree = (content, options) => {
            found.push(content);
            return real(content, options);
        };
        markdown(text);
        temml.__renderToMathMLTree = real;
        return found;
    });
}"""
SHOWN = """async (texts) => {
    const { markdown } = await import("/page/markdown.js");
    return texts.map((text) => {
        const root = document.createElement("div");
        root.className = "markdown";
        root.append(markdown(text));
        document.body.append(root);
        const shown = {
            text: root.textContent,
            elements: [...new Set([...root.querySelectorAll("*")].map((node) => node.localName))],
            attributes: [...root.querySelectorAll("math, math *")].flatMap((of) => of.getAttributeNames()),
            height: root.getBoundingClientRect().height,
            wide: document.documentElement.scrollWidth > innerWidth,
        };
        root.remove();
        return shown;
    });
}"""
HOSTILE = [
    r"$\href{javascript:alert(1)}{x}$",
    r"$\url{https://evil.example}$",
    r"$\includegraphics{https://evil.example/x.png}$",
    r"$\class{skip}{x} \id{model}{x} \htmlStyle{position: fixed}{x} \style{position:fixed}{x}$",
    r"$\text{<img src=x onerror=alert(1)>}$",
    r"$\color{url(https://evil.example)}{x}$",
    r"$\def\a{\a\a}\a$",
    r"$$\rule{9999em}{9999em}$$",
    r"$\kern-9999em x$",
    r"$\raisebox{-9999em}{x}$",
]


def answered(page_of: PageOf, text: str) -> Locator:
    page = page_of(FakeService(Script((text[: len(text) // 2], text[len(text) // 2 :]))))
    take_sample(page, "Shapes")
    ask(page, "What is it?")
    expect(answers(page)).to_have_count(1)
    return answers(page)


def test_formulas_become_mathml(page_of: PageOf) -> None:
    answer = answered(page_of, ANSWER)
    expect(answer.locator("math")).to_have_count(8)
    expect(answer.locator(".formula-source")).to_have_count(0)
    expect(answer.locator("p > .formula msup").first).to_have_text("r2")
    expect(answer.locator(".formula.block mfrac").first).to_be_visible()
    expect(answer.locator(".formula.block")).to_have_count(4)
    expect(answer.locator("mroot")).to_have_count(1)
    expect(answer.locator("li math, td math")).to_have_count(2)
    namespace = "node => node.namespaceURI"
    assert answer.locator("math").first.evaluate(namespace) == "http://www.w3.org/1998/Math/MathML"
    tall = answer.locator(".formula.block").first.bounding_box()
    assert tall is not None
    assert tall["height"] > 40  # a sum over its limits, drawn as one


def test_a_wide_formula_scrolls_by_itself(page_of: PageOf) -> None:
    wide = " + ".join(rf"\frac{{a_{{{index}}}}}{{b}}" for index in range(60))
    block = answered(page_of, f"$$\n{wide}\n$$").locator(".formula.block")
    assert block.evaluate("(node) => node.scrollWidth > node.clientWidth")
    block.focus()
    block.press("ArrowRight")
    block.page.wait_for_function("(node) => node.scrollLeft > 0", arg=block.element_handle())


@pytest.fixture(scope="module")
def page(url: str, open_once: OpenPage) -> Page:
    """A page whose modules are asked; it stays as it is."""
    return open_once(url)


def test_what_is_a_formula_and_what_an_amount(page: Page) -> None:
    found = page.evaluate(FORMULAS_OF, list(READ))
    assert dict(zip(READ, found, strict=True)) == READ


def test_what_can_not_be_read_stays_as_it_was_written(page: Page) -> None:
    texts = [r"$\frac{a}$", r"$\nosuchcommand{x}$", "$" + "x" * 2500 + "$"]
    for text, shown in zip(texts, page.evaluate(SHOWN, texts), strict=True):
        assert shown["text"] == text
        assert "math" not in shown["elements"]


def test_a_hostile_formula_is_text(page: Page) -> None:
    """A policy that is broken fails this test as well, at the end of the module."""
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    found: list[dict[str, Any]] = page.evaluate(SHOWN, HOSTILE)
    for text, shown in zip(HOSTILE, found, strict=True):
        assert not {"a", "img", "script", "style", "mglyph", "annotation-xml"} & set(shown["elements"]), text
        assert not {"href", "id", "src", "onerror"} & set(shown["attributes"]), text
        assert shown["height"] < 600, text
        assert not shown["wide"], text
    assert not any("evil.example" in each for each in asked)
