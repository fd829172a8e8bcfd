// The page offers what the model can, and says why the rest is missing.

import { byId, say } from "./dom.js";

const NAMES = { ask: "Ask", caption: "Caption", scene: "Scene", detect: "Detect" };
const listeners = [];
let tasks = Object.keys(NAMES); // until the model is loaded nobody knows
let card = {};

/** Calls `listener(tasks)` whenever what the model can do with pictures changes; [] for a model of text alone. */
export function onOffer(listener) {
  listeners.push(listener);
}

/** Whether the model takes pictures at all. */
export const takesPictures = () => tasks.length > 0;

/** Whether it takes videos and has learned them; until the model is loaded nobody knows, and the server decides. */
export const takesVideo = () => card.video !== false && card.training?.videos !== false;

/** What the server says of its model in /v1/models. */
export const modelCard = () => card;

/** Takes what the server said of its model in /v1/models. */
export function offer(said) {
  const [couldVideo, could] = [takesVideo(), tasks.join()];
  card = said;
  tasks = card.tasks ?? tasks;
  if (tasks.join() === could && takesVideo() === couldVideo) return;
  document.body.dataset.sight = takesPictures() ? "pictures" : "text";
  say(byId("offer"), lack());
  for (const listener of listeners) listener(tasks);
}

function lack() {
  if (!takesPictures()) return "This model reads text alone. To ask about pictures, serve a model that sees.";
  const missing = Object.keys(NAMES).filter((name) => !tasks.includes(name)).map((name) => NAMES[name]);
  return missing.length ? `Not offered, because this model was not trained for it: ${missing.join(", ")}.` : "";
}
