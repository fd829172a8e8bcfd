// An answer of the model: its reasoning folded, its Markdown as elements, its boxes on the pictures.

import { drawOver, frameOf } from "./boxes.js";
import { copyButton } from "./clipboard.js";
import { make, plural } from "./dom.js";
import { GrowingMarkdown } from "./markdown.js";

const OPENING = "<think>";
const CLOSING = "</think>";

/**
 * What a model thought and what it answered, where both stand in one text. Some prompts open the thinking
 * themselves, so the closing mark may stand alone.
 */
export function splitThoughts(content) {
  const end = content.lastIndexOf(CLOSING);
  const begun = content.trimStart().startsWith(OPENING);
  if (end < 0 && !begun) return { reasoning: "", text: content };
  const thoughts = (end < 0 ? content : content.slice(0, end)).trimStart();
  const text = end < 0 ? "" : content.slice(end + CLOSING.length).trimStart();
  return { reasoning: begun ? thoughts.slice(OPENING.length) : thoughts, text };
}

/**
 * The view of a turn `{text, reasoning, model, note, boxes}`; `note` says how it ended, boxes are grounding.js's.
 * `pictures()` are those of the conversation; `again()` asks once more; `moved()` is called when the user chose
 * another picture for the boxes.
 */
export class AnswerView {
  #turn;
  #options;
  #thoughts;
  #answer;

  constructor(turn, options) {
    this.#turn = turn;
    this.#options = options;
    this.body = make("div", { class: "turn-text markdown" });
    this.note = make("p", { class: "turn-note muted small", hidden: true });
    this.figures = make("div", { class: "boxed-pictures", hidden: true });
    this.reasoning = this.#fold();
    const regenerate = make("button", { type: "button", class: "quiet small regenerate", text: "Regenerate" });
    regenerate.addEventListener("click", options.again);
    const copy = copyButton(() => turn.text);
    this.node = make(
      "div",
      { class: "turn assistant" },
      make("p", { class: "turn-who", text: turn.model }),
      this.reasoning,
      this.body,
      this.note,
      this.figures,
      make("div", { class: "turn-actions" }, copy, regenerate),
    );
    this.#answer = new GrowingMarkdown(this.body);
  }

  #fold() {
    const text = make("div", { class: "markdown" });
    const fold = make("details", { class: "reasoning", hidden: true }, make("summary", { text: "Reasoning" }), text);
    this.#thoughts = new GrowingMarkdown(text);
    fold.addEventListener("toggle", () => fold.open && this.#thoughts.update(this.#turn.reasoning));
    return fold;
  }

  /** The answer grew. */
  grow() {
    this.busy(true);
    this.reasoning.hidden = !this.#turn.reasoning;
    if (this.reasoning.open) this.#thoughts.update(this.#turn.reasoning);
    this.#answer.update(this.#turn.text);
  }

  /** The answer is all there. */
  finish() {
    this.busy(false);
    const { text, reasoning, note } = this.#turn;
    this.reasoning.hidden = !reasoning;
    if (this.reasoning.open) this.#thoughts.finish(reasoning);
    this.#answer.finish(text);
    this.note.textContent = ` (${note})`;
    this.note.hidden = !note;
    this.#drawBoxes();
  }

  busy(yes) {
    this.node.classList.toggle("busy", yes);
    this.node.setAttribute("aria-busy", String(yes)); // screen readers wait for what is still written anew
  }

  #drawBoxes() {
    const { boxes } = this.#turn;
    const all = this.#options.pictures().filter(({ kind }) => kind === "picture");
    const drawn = all.filter(({ id }) => boxes.some(({ picture }) => picture === id));
    this.figures.replaceChildren(...drawn.map((picture) => this.#figureOf(picture, all)));
    this.figures.hidden = drawn.length === 0;
  }

  #figureOf(picture, all) {
    const own = this.#turn.boxes.filter((box) => box.picture === picture.id);
    const objects = own.map(({ label, box: [x1, y1, x2, y2] }) => ({ label, box: { x1, y1, x2, y2 } }));
    const { frame, overlay } = frameOf(picture, { width: picture.width ?? 4, height: picture.height ?? 3 });
    drawOver(overlay, { width: 1, height: 1, objects });
    const caption = make("figcaption", { class: "muted small" }, `${plural(own.length, "box", "boxes")} on `);
    caption.append(all.length > 1 ? this.#chooser(picture, all) : picture.name);
    return make("figure", { class: "boxed" }, frame, caption);
  }

  /** Which of several pictures is meant is often a guess: it can be put right. */
  #chooser(picture, all) {
    const names = all.map(({ id, name }, index) => make("option", { value: id, text: `${index + 1}: ${name}` }));
    const select = make("select", { class: "small" }, ...names);
    select.setAttribute("aria-label", "Picture of these boxes");
    select.value = picture.id;
    select.addEventListener("change", () => {
      for (const box of this.#turn.boxes) if (box.picture === picture.id) box.picture = select.value;
      const chosen = select.value;
      this.#drawBoxes();
      this.figures.querySelectorAll("select").forEach((each) => each.value === chosen && each.focus());
      this.#options.moved();
    });
    return select;
  }
}
