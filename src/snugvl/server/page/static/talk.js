// The conversation that is shown: its turns and pictures, and how it survives a reload. The address bar's history
// entry remembers which one it is, so that every tab has its own.

import { byId, say } from "./dom.js";
import { choose, pictures, revived, showPictures } from "./picture.js";
import { settings } from "./settings.js";
import * as store from "./store.js";

const PERIOD_MS = 2000; // an answer that grows is kept about so often
export const LONGEST_TITLE = 80;

let current = fresh();
let timer = null;
const listeners = [];

/** Calls `listener(talk)` when another conversation is shown. */
export const onTalk = (listener) => listeners.push(listener);

/** `{id, turns, title}`; the title is the user's, if any. A turn is `{role: "user", text, pictures}` with ids, or an answer: see answer.js. */
export const talk = () => current;

function fresh() {
  return { id: `${Date.now().toString(36)}-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`, turns: [] };
}

/** Begins anew, with the picture that is on the stage. */
export function begin(chosen = null) {
  show(fresh(), chosen ? [chosen] : []);
}

const titleOf = (turns) => (turns.find(({ role }) => role === "user")?.text.trim() || "Without words").slice(0, LONGEST_TITLE);

/** A kept conversation as it is shown; a title that isn't its first question was given by the user. */
const shownOf = ({ id, turns, title }) => ({ id, turns, title: title === titleOf(turns) ? undefined : title });

/** Shows a kept conversation. Whether it was there. */
export async function open(id) {
  const found = await store.find(id);
  if (!found) return false;
  show(shownOf(found), found.pictures.map(revived));
  return true;
}

/** Shows what this tab showed before it was loaded again, unless something was begun meanwhile. */
export async function reopen() {
  const id = history.state?.talk;
  const before = current;
  if (!id) return;
  try {
    const found = await store.find(id);
    if (found && current === before && !current.turns.length && !pictures().length) {
      show(shownOf(found), found.pictures.map(revived));
    }
  } catch {
    // Nothing can be kept here: `save` says so once there is something to keep.
  }
}

function show(next, all) {
  clearTimeout(timer);
  timer = null;
  current = next;
  remember();
  say(byId("kept-error"), "");
  showPictures(all);
  for (const listener of listeners) listener(current);
}

function remember() {
  history.replaceState(current.turns.length ? { talk: current.id } : null, "");
}

addEventListener("hashchange", remember); // a link within the page made an entry of its own

/** Keeps `which`, now; says so where this browser can't. */
export async function save(which, its = pictures()) {
  if (which === current) remember();
  if (!settings().keep) return;
  const first = which.turns.find(({ role }) => role === "user");
  try {
    if (!first) return void (await store.forget(which.id)); // its only question was not answered
    await store.keep({
      id: which.id,
      title: which.title ?? titleOf(which.turns),
      updated: Date.now(),
      turns: which.turns,
      pictures: its,
    });
  } catch (problem) {
    const why = problem.name === "QuotaExceededError" ? "it has no room left" : "it lets this page store nothing";
    say(byId("kept-error"), `This browser does not keep the conversation: ${why}. It is here until you leave the page.`);
  }
}

/** Keeps `which` before long; for an answer that grows. */
export function saveSoon(which) {
  timer ??= setTimeout(() => {
    timer = null;
    if (which === current) save(which);
  }, PERIOD_MS);
}

/** Puts a picture of this conversation on the stage. */
export function showPicture(id) {
  const found = pictures().find((picture) => picture.id === id);
  if (found) choose(found);
}
