// What the user set for conversations; kept in this browser.

import { byId, say } from "./dom.js";
import { modelCard } from "./offer.js";

const STORE = "snugvl-settings";
const DEFAULTS = { system: "", temperature: null, tokens: null, keep: true };
const MOST_SYSTEM = 20_000; // characters
const HOTTEST = 2;

const dialog = byId("settings-dialog");
const fields = { system: byId("system"), temperature: byId("temperature"), tokens: byId("tokens"), keep: byId("keep") };
let current = stored();

/** `{system, temperature, tokens, keep}`; null stands for the server's own. */
export const settings = () => current;

function stored() {
  try {
    return valid({ ...DEFAULTS, ...JSON.parse(localStorage.getItem(STORE) ?? "{}") });
  } catch {
    return DEFAULTS; // switched off, or not ours
  }
}

/** The same, with the default for what can't be used. */
function valid({ system, temperature, tokens, keep }) {
  const warm = Number.isFinite(temperature) && temperature >= 0 && temperature <= HOTTEST;
  return {
    system: typeof system === "string" ? system.slice(0, MOST_SYSTEM) : "",
    temperature: warm ? temperature : null,
    tokens: Number.isSafeInteger(tokens) && tokens >= 1 ? tokens : null,
    keep: keep !== false,
  };
}

function store(entered) {
  current = entered;
  try {
    if (JSON.stringify(entered) === JSON.stringify(DEFAULTS)) localStorage.removeItem(STORE);
    else localStorage.setItem(STORE, JSON.stringify(entered));
  } catch {
    // They hold for this visit.
  }
  showChanged();
}

function showChanged() {
  const changed = JSON.stringify(current) !== JSON.stringify(DEFAULTS);
  byId("settings-button").textContent = changed ? "Settings (changed)" : "Settings";
}

function fill(values) {
  fields.system.value = values.system;
  fields.temperature.value = values.temperature ?? "";
  fields.tokens.value = values.tokens ?? "";
  fields.keep.checked = values.keep;
  fail(null, "");
}

function fail(field, message) {
  say(byId("settings-error"), message);
  for (const each of Object.values(fields)) each.removeAttribute("aria-invalid");
  field?.setAttribute("aria-invalid", "true");
  field?.focus();
}

/** What was entered; null, and a sentence about it, when it can't be used. */
function entered() {
  const temperature = numberIn(fields.temperature);
  if (temperature !== null && !(temperature >= 0 && temperature <= HOTTEST)) {
    fail(fields.temperature, `The temperature is a number from 0 to ${HOTTEST}, such as 0.7. Leave it empty for the server's own.`);
    return null;
  }
  const tokens = numberIn(fields.tokens);
  const most = modelCard().max_model_len ?? Number.MAX_SAFE_INTEGER;
  if (tokens !== null && !(Number.isSafeInteger(tokens) && tokens >= 1 && tokens <= most)) {
    const limit = most === Number.MAX_SAFE_INTEGER ? "" : ` up to ${most}, this model's context`;
    fail(fields.tokens, `The number of tokens is a whole number from 1${limit}. Leave it empty for no limit of your own.`);
    return null;
  }
  return { system: fields.system.value.trim(), temperature, tokens, keep: fields.keep.checked };
}

/** The number in a field: null when it is empty, NaN when it is none. */
function numberIn(field) {
  if (field.validity.badInput) return Number.NaN;
  return field.value.trim() === "" ? null : Number(field.value);
}

/** `onKeep(keep)`: called when the user chose whether conversations are kept; the dialog closes when it has ended. */
export function wireSettings(onKeep) {
  showChanged();
  fields.system.maxLength = MOST_SYSTEM;
  byId("settings-button").addEventListener("click", () => {
    fill(current);
    dialog.showModal();
    fields.system.focus();
  });
  byId("settings-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const values = entered();
    if (!values) return;
    const kept = current.keep;
    store(values);
    if (kept !== values.keep) await onKeep(values.keep);
    dialog.close(); // only now: who leaves the page then loses nothing
  });
  byId("settings-defaults").addEventListener("click", () => fill(DEFAULTS));
  byId("settings-cancel").addEventListener("click", () => dialog.close());
}
