// Markdown as elements. markdown-it reads it into tokens; elements are made of those here, so that no HTML is
// ever parsed and no name of an element or address comes from the text unchecked.

import { copyButton } from "./clipboard.js";
import { make } from "./dom.js";
import { formula, readFormulas } from "./formulas.js";

const MOST_CHARACTERS = 100_000; // beyond these an answer stays plain text: it would take seconds
const MOST_NODES = 50_000; // elements and texts
const FORMULA_NODES = 4; // that a formula takes beside its letters
const MOST_FORMULAS = 20_000; // characters of formulas; those beyond stay as they were written
const CODE_NODES = 8; // that a block of code takes, its button included
const DEEPEST = 40; // of lists in quotes in lists; markdown-it leaves out what is deeper
const ELEMENTS = new Set([
  "p", "blockquote", "ul", "ol", "li", "table", "thead", "tbody", "tr", "th", "td", "strong", "em", "s",
]);
const SAFE_LINK = /^(https?|mailto):/i;

const parser = globalThis.markdownit({ html: false, linkify: true, breaks: true, maxNesting: DEEPEST });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false }); // "README.md" is no address
readFormulas(parser);

/** The tokens of `text`, or null where it is too long, too deep or too much for elements. */
function tokensOf(text) {
  if (text.length > MOST_CHARACTERS) return null;
  const tokens = parser.parse(text, {});
  let count = 0;
  let formulas = 0;
  for (const token of tokens) {
    count += token.tag === "code" ? CODE_NODES : 1 + (token.children?.length ?? 0);
    for (const each of [token, ...(token.children ?? [])].filter(({ type }) => type === "formula")) {
      formulas += each.content.length;
      count += FORMULA_NODES + 2 * each.content.length;
      each.meta = { plain: formulas > MOST_FORMULAS };
    }
    if (count > MOST_NODES || token.level >= DEEPEST - 1) return null;
  }
  return tokens;
}

/**
 * Shows an answer that grows. Blocks that are complete stay the elements that they are, so nothing flickers, a
 * selection stays, and only the last block is read again: the time for each piece does not grow with the answer.
 */
export class GrowingMarkdown {
  #root;
  #text = "";
  #settled = 0; // characters whose blocks are complete
  #tail = []; // elements of the last block
  #plain = false;
  #timer = null;
  #cost = 0; // milliseconds that the last rendering took

  constructor(root) {
    this.#root = root;
  }

  /** Shows the whole `text` so far, soon: at most so often that the page does nothing else half of the time. */
  update(text) {
    this.#text = text;
    this.#timer ??= setTimeout(() => {
      this.#timer = null;
      const started = performance.now();
      this.#render();
      this.#cost = performance.now() - started;
    }, Math.max(30, 2 * this.#cost));
  }

  /** Shows the whole `text` now. */
  finish(text) {
    clearTimeout(this.#timer);
    this.#timer = null;
    this.#text = text;
    const fresh = markdown(text);
    const old = [...this.#root.childNodes];
    const made = [...fresh.childNodes];
    made.forEach((node, index) => {
      if (index >= old.length) this.#root.append(node);
      else if (!old[index].isEqualNode(node)) old[index].replaceWith(node); // a link whose address came later
    });
    for (const extra of old.slice(made.length)) extra.remove();
  }

  #render() {
    if (this.#plain || this.#text.length > MOST_CHARACTERS) return this.#renderPlain();
    const rest = this.#text.slice(this.#settled);
    const tokens = tokensOf(rest);
    if (tokens === null) return this.#renderPlain();
    const starts = tokens.filter(({ level, map, nesting }) => level === 0 && map && nesting >= 0);
    const last = starts.at(-1);
    const first = last ? tokens.indexOf(last) : tokens.length;
    for (const node of this.#tail) node.remove();
    this.#root.append(elementsOf(tokens.slice(0, first)));
    const tail = elementsOf(tokens.slice(first));
    this.#tail = [...tail.childNodes];
    this.#root.append(tail);
    if (last) this.#settled += offsetOfLine(rest, last.map[0]);
    return undefined;
  }

  #renderPlain() {
    const text = plain(this.#text);
    if (this.#plain) this.#root.firstElementChild.append(this.#text.slice(this.#root.textContent.length));
    else this.#root.replaceChildren(text);
    this.#plain = true;
  }
}

/** A fragment that shows `text`. */
export function markdown(text) {
  const tokens = tokensOf(text);
  const fragment = document.createDocumentFragment();
  fragment.append(tokens === null ? plain(text) : elementsOf(tokens));
  return fragment;
}

const plain = (text) => make("div", { class: "plain-text", text });

function offsetOfLine(text, line) {
  let offset = 0;
  for (let count = 0; count < line; count += 1) offset = text.indexOf("\n", offset) + 1;
  return offset;
}

function elementsOf(tokens) {
  const fragment = document.createDocumentFragment();
  const open = [fragment];
  for (const token of tokens) {
    const top = open.at(-1);
    if (token.nesting < 0) {
      if (!token.hidden) open.pop();
    } else if (token.nesting > 0) {
      if (token.hidden) continue; // a paragraph of a tight list
      const [outer, inner] = opened(token);
      top.append(outer);
      open.push(inner);
    } else {
      append(top, token);
    }
  }
  return fragment;
}

/** The element to append, and the one that holds what follows. */
function opened(token) {
  if (token.tag === "a") return twice(link(token.attrGet("href")));
  if (/^h[1-6]$/.test(token.tag)) return twice(heading(Number(token.tag[1])));
  const node = document.createElement(ELEMENTS.has(token.tag) ? token.tag : "span");
  if (token.tag === "ol" && token.attrGet("start") !== null) node.start = Number(token.attrGet("start"));
  const align = /text-align:(left|center|right)/.exec(token.attrGet("style") ?? "");
  if (align) node.classList.add(`align-${align[1]}`);
  if (token.tag !== "table") return twice(node);
  // A wide table is scrolled by itself, with the keyboard too.
  return [make("div", { class: "table", tabIndex: 0 }, node), node];
}

const twice = (node) => [node, node];

/** All of them stand below the panel's own heading, whichever an answer begins with or leaves out. */
const heading = (level) => make("h3", { class: `heading level-${level}` });

function link(address) {
  const node = make("a", {});
  if (!SAFE_LINK.test(address ?? "")) return make("span", {});
  node.href = address;
  node.target = "_blank";
  node.rel = "noopener noreferrer nofollow";
  node.title = address; // where it leads, whatever its words say
  return node;
}

function append(top, token) {
  if (token.type === "inline") {
    top.append(elementsOf(token.children));
  } else if (token.type === "fence" || token.type === "code_block") {
    top.append(code(token.content, token.info.trim().split(/\s+/)[0]));
  } else if (token.type === "code_inline") {
    top.append(make("code", { text: token.content }));
  } else if (token.type === "formula") {
    top.append(formula(token));
  } else if (token.type === "hr") {
    top.append(document.createElement("hr"));
  } else if (token.type === "hardbreak" || token.type === "softbreak") {
    top.append(document.createElement("br"));
  } else if (token.type === "image") {
    top.append(imageLink(token)); // never fetched: no other host hears of the reader
  } else {
    top.append(token.content);
  }
}

function imageLink(token) {
  const node = link(token.attrGet("src"));
  node.textContent = `🖼 ${token.content || token.attrGet("src")}`.slice(0, 200);
  return node;
}

function code(text, language) {
  const block = text.replace(/\n$/, "");
  return make(
    "div",
    { class: "code" },
    make(
      "div",
      { class: "code-head" },
      make("span", { class: "muted small", text: language.slice(0, 40) }),
      copyButton(() => block, "Copy code"),
    ),
    make("pre", { tabIndex: 0 }, make("code", { text: block })),
  );
}
