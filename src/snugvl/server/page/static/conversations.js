// The list of kept conversations: find, open, rename, take away, delete.

import { byId, bytes, download, make, number, plural, say } from "./dom.js";
import { fileName, jsonOf, markdownOf } from "./exchange.js";
import { shown } from "./picture.js";
import { find, forget, forgetAll, kept, MOST_BYTES, MOST_KEPT, rename } from "./store.js";
import { begin, LONGEST_TITLE, open, talk } from "./talk.js";

const AROUND = 40; // characters shown before and after what was found

const dialog = byId("talks-dialog");
const list = byId("talks");
const search = byId("talks-search");

export function wireConversations() {
  byId("talks-bounds").textContent =
    `They are kept in this browser only: the last ${MOST_KEPT}, up to ${bytes(MOST_BYTES)} with their pictures.`;
  byId("talks-button").addEventListener("click", async () => {
    search.value = "";
    await draw();
    dialog.showModal();
  });
  search.addEventListener("input", draw);
  byId("talks-close").addEventListener("click", () => dialog.close());
  twice(byId("talks-delete"), "Delete all", async () => {
    await forgetAll();
    drop();
    await draw();
    byId("talks-close").focus();
  });
}

async function draw() {
  let all = [];
  let reason = "";
  try {
    all = await kept();
    if (!all.length) reason = "No conversation is kept yet: each one is from its first question on.";
  } catch {
    reason = "This browser lets the page store nothing, so no conversation is kept.";
  }
  const words = search.value.trim();
  const found = all.map((each) => ({ kept: each, place: placeOf(words, each) })).filter(({ place }) => place !== null);
  if (words && all.length) reason = `${number(found.length)} of ${plural(all.length, "conversation")}`;
  say(byId("talks-empty"), reason);
  byId("talks-find").hidden = !all.length;
  byId("talks-delete").hidden = !all.length;
  list.replaceChildren(...found.map(({ kept, place }) => itemOf(kept, place)));
}

/** Where a conversation has these words: a piece of text around them, "" for its title; null where it hasn't. */
function placeOf(words, { title, turns }) {
  const wanted = words.toLowerCase();
  if (title.toLowerCase().includes(wanted)) return "";
  for (const { text } of turns) {
    const at = text.toLowerCase().indexOf(wanted);
    if (at < 0) continue;
    return around(text, at, at + wanted.length);
  }
  return null;
}

/** A piece of text around a place, of whole words where they aren't too long. */
function around(text, from, to) {
  const before = from > AROUND ? `…${text.slice(from - AROUND, from).replace(/^\S{1,20}(?=\s)/, "")}` : text.slice(0, from);
  const rest = text.slice(to, to + AROUND);
  const after = to + AROUND < text.length ? `${rest.replace(/(?<=\s)\S{1,20}$/, "").trimEnd()} …` : rest;
  return `${before}${text.slice(from, to)}${after}`.replace(/\s+/g, " ").trim();
}

function itemOf(kept, place) {
  const questions = kept.turns.filter(({ role }) => role === "user").length;
  const facts = [plural(questions, "question"), plural(kept.pictures.length, "picture"), when(kept.updated)];
  const here = kept.id === talk().id;
  const button = make(
    "button",
    { type: "button", class: "talk" },
    make("span", { class: "talk-title", text: kept.title }),
    place ? make("span", { class: "muted small", text: place }) : null,
    make("span", { class: "muted small", text: `${facts.join(" · ")}${here ? " · shown now" : ""}` }),
  );
  button.addEventListener("click", async () => {
    if (!here && !(await open(kept.id))) return draw(); // another tab deleted it
    dialog.close();
    return byId("question").focus();
  });
  const cross = make("button", { type: "button", class: "quiet small" });
  twice(cross, "Delete", async () => {
    await forget(kept.id);
    if (kept.id === talk().id) drop();
    await draw();
    (list.querySelector("button") ?? byId("talks-close")).focus();
  }, kept.title);
  const item = make("li", {}, button, make("div", { class: "talk-tools" }));
  item.lastChild.append(
    tool("Rename", kept, () => edit(item, kept)),
    tool("Markdown", kept, () => take(kept.id, "md", "text/markdown", markdownOf)),
    tool("JSON", kept, () => take(kept.id, "json", "application/json", jsonOf)),
    cross,
  );
  return item;
}

function tool(text, { title }, act) {
  const button = make("button", { type: "button", class: "quiet small", text });
  button.setAttribute("aria-label", `${text === "Rename" ? text : `${text} of`} ${title}`);
  button.addEventListener("click", act);
  return button;
}

async function take(id, ending, type, written) {
  const found = await find(id);
  if (!found) return draw(); // another tab deleted it
  return download(new Blob([await written(found)], { type }), `${fileName(found.title)}.${ending}`);
}

/** A field in place of a conversation; Enter keeps its name, Esc doesn't. */
function edit(item, kept) {
  const field = make("input", { type: "text", value: kept.title, maxLength: LONGEST_TITLE });
  field.setAttribute("aria-label", `New name of ${kept.title}`);
  const form = make("form", { class: "talk-form" }, field, make("button", { type: "submit", class: "primary", text: "Keep" }));
  const close = async () => {
    const place = [...list.children].indexOf(item);
    await draw();
    (list.children[place]?.querySelector(".talk-tools button") ?? byId("talks-close")).focus();
  };
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const title = field.value.trim();
    if (!title) return field.focus();
    await rename(kept.id, title);
    if (kept.id === talk().id) talk().title = title;
    return close();
  });
  form.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.preventDefault(); // the dialog stays
    event.stopPropagation();
    close();
  });
  item.replaceChildren(form);
  field.select();
  field.focus();
}

/** The conversation that is shown is kept no longer: another begins, on the same picture. */
function drop() {
  talk().gone = true;
  begin(shown());
}

const when = (time) =>
  new Date(time).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });

/** A button whose first press only asks whether it is meant; to go elsewhere is to say no. */
function twice(button, name, act, what = "") {
  let asked = false;
  const show = (label) => {
    button.textContent = label;
    button.setAttribute("aria-label", `${label} ${what}`.trim());
  };
  const rest = () => {
    asked = false;
    show(name);
  };
  rest();
  button.addEventListener("click", () => {
    if (asked) {
      rest();
      act();
      return;
    }
    asked = true;
    show("Press again to delete");
    button.focus(); // Safari doesn't by itself
  });
  button.addEventListener("blur", rest);
}
