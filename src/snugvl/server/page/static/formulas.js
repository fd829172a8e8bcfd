// Formulas in Markdown: $…$, $$…$$, \(…\) and \[…\]. Temml reads TeX into a tree; elements of MathML are made of that
// here, as Markdown's are, so that no name of an element, an attribute or a style comes from the text unchecked.

import { make } from "./dom.js";

export const LONGEST_FORMULA = 2000; // characters; a longer one stays as it was written
const MOST_FAILURES = 500; // marks of one paragraph, or one text, that open no formula
const MOST_NODES = 4000; // of one formula
const DEEPEST = 60; // elements in one another
const MATHML = "http://www.w3.org/1998/Math/MathML";
const OPTIONS = { throwOnError: true, trust: false, maxExpand: 200, maxSize: [20, 200] }; // sizes in em and pt
const ELEMENTS = new Set(
  ("math maction menclose merror mfrac mi mmultiscripts mn mo mover mpadded mphantom mprescripts mroot mrow ms mspace " +
    "msqrt mstyle msub msubsup msup mtable mtd mtext mtr munder munderover none").split(" "),
);
const ATTRIBUTES = new Set(
  ("accent accentunder align columnalign columnlines columnspacing columnspan depth dir display displaystyle fence form " +
    "height largeop linethickness lspace mathcolor mathbackground mathsize mathvariant maxsize minsize movablelimits " +
    "notation rowalign rowlines rowspacing rowspan rspace scriptlevel separator stretchy symmetric voffset width").split(" "),
);
const STYLES = /^(color|background(-color|Color)|text(-align|Align)|font(-weight|Weight|-style|Style|Size|-size)|(padding|margin|border)([A-Z]\w+|-[\w-]+)?|width|height|vertical(-align|Align)|math(-depth|Depth|-style|Style)|display)$/;

const TOO_LONG = /\d{4,}|\d{3,}(\.\d*)?(em|ex|rem|cm|in)/; // lengths that only hostile formulas have

// What opens a formula, what closes it, and whether it stands by itself.
const MARKS = [["$$", "$$", true], ["\\[", "\\]", true], ["\\(", "\\)", false], ["$", "$", false]];

/** Teaches markdown-it formulas: tokens of type "formula", whose `block` says whether they stand by themselves. */
export function readFormulas(parser) {
  parser.inline.ruler.before("escape", "formula", inlineFormula);
  parser.block.ruler.before("fence", "formula", blockFormula, { alt: ["paragraph", "reference", "blockquote", "list"] });
}

const failures = new WeakMap(); // by markdown-it's state: marks that opened no formula

/** Counts a mark that opens none; nobody writes so many, and each costs a look ahead. */
function fail(state) {
  failures.set(state, (failures.get(state) ?? 0) + 1);
  return false;
}

function inlineFormula(state, silent) {
  if (failures.get(state) > MOST_FAILURES) return false;
  const mark = MARKS.find(([opening]) => state.src.startsWith(opening, state.pos));
  if (!mark) return false;
  const [opening, closing, block] = mark;
  const start = state.pos + opening.length;
  const end = endOf(state.src.slice(start, Math.min(state.posMax, start + LONGEST_FORMULA)), closing);
  if (end < 0) return fail(state);
  if (!silent) push(state, state.src.slice(start, start + end), mark, block);
  state.pos = start + end + closing.length;
  return true;
}

/** Where the formula that `text` begins with ends; -1 where none does. A lone dollar is an amount more often. */
function endOf(text, closing) {
  for (let at = text.indexOf(closing); at >= 0; at = text.indexOf(closing, at + 1)) {
    if (at > 0 && text[at - 1] === "\\" && text[at - 2] !== "\\") continue; // \$ within a formula
    const inside = text.slice(0, at);
    if (!inside.trim()) return -1;
    if (closing !== "$") return at;
    const amount = /^\d/.test(inside) && /\s/.test(inside) && !/[\\^_=+<>]/.test(inside); // "$5, or 5$ there"
    return amount || /^\s|\s$|\n\n/.test(inside) || /\d/.test(text[at + 1] ?? "") ? -1 : at;
  }
  return -1;
}

/** A formula whose marks begin and end lines. */
function blockFormula(state, first, last, silent) {
  if (failures.get(state) > MOST_FAILURES) return false;
  const line = (at) => state.src.slice(state.bMarks[at] + state.tShift[at], state.eMarks[at]);
  const mark = MARKS.find(([opening, , block]) => block && line(first).startsWith(opening));
  if (!mark || state.sCount[first] - state.blkIndent >= 4) return false;
  const [opening, closing] = mark;
  const lines = [line(first).slice(opening.length)];
  for (let [at, length] = [first, 0]; length <= LONGEST_FORMULA; length += lines.at(-1).length) {
    const found = lines.at(-1).indexOf(closing);
    if (found >= 0) {
      const after = lines.at(-1).slice(found + closing.length).trim();
      lines.push(lines.pop().slice(0, found));
      const content = lines.join("\n");
      if (after || !content.trim()) return false; // words follow: it is inline
      if (silent) return true;
      state.line = at + 1;
      push(state, content, mark, true).map = [first, at + 1];
      return true;
    }
    at += 1;
    if (at >= last || state.sCount[at] < state.blkIndent || state.isEmpty(at)) break;
    lines.push(line(at));
  }
  return fail(state);
}

function push(state, content, [opening, closing], block) {
  const token = state.push("formula", "math", 0);
  token.content = content.trim();
  token.markup = `${opening}${content}${closing}`;
  token.block = block;
  return token;
}

/** The element of a "formula" token; what Temml can't read, and what is `meta.plain`, stays as it was written. */
export function formula({ content, markup, block, meta }) {
  try {
    if (meta?.plain) throw new RangeError("too many formulas");
    const tree = globalThis.temml.__renderToMathMLTree(content, { ...OPTIONS, displayMode: block, macros: {} });
    const math = elementOf(tree, 0, { left: MOST_NODES });
    return block ? make("div", { class: "formula block", tabIndex: 0 }, math) : make("span", { class: "formula" }, math);
  } catch {
    return make("code", { class: "formula-source", text: markup });
  }
}

function elementOf(node, depth, budget) {
  budget.left -= 1;
  if (budget.left < 0 || depth > DEEPEST) throw new RangeError("a formula of too many parts");
  if (node.text !== undefined) return document.createTextNode(node.text);
  const known = ELEMENTS.has(node.type);
  const made = node.type === undefined ? document.createDocumentFragment() : document.createElementNS(MATHML, known ? node.type : "mrow");
  if (node.type !== undefined) dress(made, node);
  made.append(...node.children.map((child) => elementOf(child, depth + 1, budget)));
  return made;
}

function dress(made, { attributes, classes, style }) {
  for (const [name, value] of Object.entries(attributes)) if (ATTRIBUTES.has(name) && !TOO_LONG.test(value)) made.setAttribute(name, value);
  if (classes.some(Boolean)) made.setAttribute("class", classes.filter(Boolean).join(" "));
  const written = (attributes.style ?? "").split(";").map((each) => each.split(":").map((part) => part.trim()));
  for (const [name, value] of [...Object.entries(style), ...written]) {
    // Set by script: the page's policy allows no attribute of styles.
    if (STYLES.test(name) && !TOO_LONG.test(value)) made.style.setProperty(name.replace(/[A-Z]/g, (letter) => `-${letter.toLowerCase()}`), value);
  }
}
