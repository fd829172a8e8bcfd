// The list of kept conversations: open one, delete one or all.

import { byId, bytes, make, plural, say } from "./dom.js";
import { shown } from "./picture.js";
import { forget, forgetAll, kept, MOST_BYTES, MOST_KEPT } from "./store.js";
import { begin, open, talk } from "./talk.js";

const dialog = byId("talks-dialog");
const list = byId("talks");

export function wireConversations() {
  byId("talks-bounds").textContent =
    `They are kept in this browser only: the last ${MOST_KEPT}, up to ${bytes(MOST_BYTES)} with their pictures.`;
  byId("talks-button").addEventListener("click", async () => {
    await draw();
    dialog.showModal();
  });
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
  say(byId("talks-empty"), reason);
  byId("talks-delete").hidden = !all.length;
  list.replaceChildren(...all.map(itemOf));
}

function itemOf(kept) {
  const questions = kept.turns.filter(({ role }) => role === "user").length;
  const facts = [plural(questions, "question"), plural(kept.pictures.length, "picture"), when(kept.updated)];
  const here = kept.id === talk().id;
  const button = make(
    "button",
    { type: "button", class: "talk" },
    make("span", { class: "talk-title", text: kept.title }),
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
  return make("li", {}, button, cross);
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
