// The server's side of the page: which model, in which state, and whether anyone is there at all.

import { json, ServerError, Unreachable } from "./api.js";
import { byId, number, plural, say } from "./dom.js";
import { offer } from "./offer.js";

const PERIOD_MS = 1000;
const SLOWEST_MS = 5000;
const IN_BACKGROUND = { background: true, timeoutMs: 5000 };

let model = null;
let factsKnown = false; // the server knows them once the model is loaded
let nudge = () => {};

/** The name to ask for. `options`: of the request that finds it out. */
export async function modelName(options = {}) {
  model ??= await readModel(options);
  return model;
}

async function readModel(options) {
  const { data } = await json("v1/models", options);
  const [first] = data;
  byId("model-name").textContent = first.id;
  factsKnown = Boolean(first.max_model_len);
  byId("model-facts").textContent = factsKnown ? `${number(first.max_model_len)} tokens of context` : "";
  byId("pocket-note").hidden = !first.training?.drawings;
  offer(first);
  return first.id;
}

/** Asks now rather than at the next turn. */
export const lookNow = () => nudge();

/** Reads /memory about every second for as long as the page is seen, and hands each answer to `show`. */
export async function watch(show) {
  let wait = PERIOD_MS;
  let lost = false;
  for (;;) {
    try {
      const memory = await json("memory", IN_BACKGROUND);
      if (lost || !factsKnown) model = null; // it may have come back with another one
      await modelName(IN_BACKGROUND).catch(() => {}); // not ready: its state says so
      showHealth(memory.health, lost, memory.ledger === null);
      show(memory);
      lost = false;
      wait = PERIOD_MS;
    } catch (error) {
      lost = showAbsence(error) || lost;
      wait = Math.min(wait * 1.5, SLOWEST_MS);
    }
    await pause(wait);
  }
}

function pause(milliseconds) {
  return new Promise((resolve) => {
    const timer = setTimeout(done, milliseconds);
    function done() {
      clearTimeout(timer);
      if (document.hidden) document.addEventListener("visibilitychange", done, { once: true });
      else resolve();
    }
    nudge = done;
  });
}

function showState(state, name, stale) {
  byId("state").dataset.state = state;
  if (byId("state-name").textContent !== name) byId("state-name").textContent = name;
  byId("memory").classList.toggle("stale", stale);
  byId("memory-title").textContent = stale && byId("device").textContent ? "Memory, as last known" : "Memory";
}

function banner(text, kind, progress = null) {
  say(byId("banner-text"), text);
  byId("banner").hidden = !text;
  byId("banner").dataset.kind = kind;
  byId("banner-progress").hidden = progress === null;
  if (progress !== null) byId("banner-progress").value = progress;
}

function showHealth(health, wasLost, stale) {
  showState(health.state, health.state, stale);
  byId("engine-detail").textContent = health.restarts
    ? `The engine came back ${plural(health.restarts, "time")} since the server started.`
    : "";
  if (health.state !== "ready") {
    banner(health.detail, health.state === "failed" ? "bad" : "wait", health.progress ?? null);
  } else if (wasLost) {
    banner("The server is back.", "good");
    setTimeout(() => {
      if (byId("banner").dataset.kind === "good") banner("", "good");
    }, 4000);
  } else if (byId("banner").dataset.kind !== "good") banner("", "");
}

/** Says why there is no answer. Whether nobody is there. */
function showAbsence(error) {
  if (error instanceof ServerError && error.status === 401) {
    showState("locked", "key needed", true);
    banner("This server wants an API key. Press “API key” to enter one.", "wait");
    return false;
  }
  if (error instanceof ServerError) {
    showState("restarting", "not ready", true);
    banner(error.message, "wait");
    return false;
  }
  if (!(error instanceof Unreachable)) console.error(error); // a bug of this page
  showState("gone", "no answer", true);
  banner("The server doesn't answer. This page goes on trying.", "bad");
  return true;
}
