// A question of the user: its pictures, its words, and a way to put them differently.

import { copyButton } from "./clipboard.js";
import { make } from "./dom.js";
import { miniature } from "./picture.js";

export const LONGEST = 100_000; // characters

/**
 * The view of a turn `{text, pictures}` with ids. `pictures()` are those of the conversation; `show(id)` puts one on
 * the stage; `askAgain(text)` asks in other words and drops what followed.
 */
export class QuestionView {
  #turn;
  #options;

  constructor(turn, options) {
    this.#turn = turn;
    this.#options = options;
    this.text = make("div", { class: "turn-text", text: turn.text });
    this.edit = make("button", { type: "button", class: "quiet small edit", text: "Edit" });
    this.edit.addEventListener("click", () => this.#open());
    const copy = copyButton(() => turn.text);
    this.actions = make("div", { class: "turn-actions" }, copy, this.edit);
    this.node = make(
      "div",
      { class: "turn user" },
      make("p", { class: "turn-who", text: "You" }),
      this.#pictures(),
      this.text,
      this.actions,
    );
  }

  #pictures() {
    const all = this.#options.pictures();
    const own = all.filter(({ id }) => this.#turn.pictures.includes(id));
    if (!own.length) return null;
    return make("div", { class: "turn-pictures" }, ...own.map((picture) => this.#thumb(picture, all)));
  }

  #thumb(picture, all) {
    const button = make("button", { type: "button", class: "thumb" }, miniature(picture));
    button.setAttribute("aria-label", `Show picture ${all.indexOf(picture) + 1}: ${picture.name}`);
    button.addEventListener("click", () => this.#options.show(picture.id));
    return button;
  }

  #open() {
    const area = make("textarea", { rows: 3, value: this.#turn.text, maxLength: LONGEST });
    area.setAttribute("aria-label", "Ask this instead");
    const cancel = make("button", { type: "button", text: "Cancel" });
    const form = make(
      "form",
      { class: "form edit-form" },
      area,
      make("p", { class: "muted small", text: "All that followed this question will be deleted." }),
      make("div", { class: "row" }, make("button", { type: "submit", class: "primary", text: "Ask again" }), cancel),
    );
    const close = () => {
      form.replaceWith(this.text);
      this.actions.hidden = false;
      this.edit.focus();
    };
    cancel.addEventListener("click", close);
    form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        if (event.target === cancel) close();
        else form.requestSubmit();
      } else if (event.key === "Escape") close();
    });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = area.value.trim();
      if (!text) return area.focus();
      close();
      return this.#options.askAgain(text);
    });
    this.text.replaceWith(form);
    this.actions.hidden = true;
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }
}
