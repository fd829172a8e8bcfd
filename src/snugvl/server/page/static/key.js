// The dialog for API keys.

import { askForKeysWith, useKey } from "./api.js";
import { byId, say } from "./dom.js";

const dialog = byId("key-dialog");
const input = byId("key");
const error = byId("key-error");
let settle = null;

/** Opens the dialog; resolves to `{key, remember}`, or null when it was closed. `message`: why the last key failed. */
function ask(message) {
  say(error, message);
  input.setAttribute("aria-invalid", String(Boolean(message)));
  if (!dialog.open) dialog.showModal();
  input.select();
  input.focus();
  return new Promise((resolve) => {
    settle = resolve;
  });
}

function close(entered) {
  dialog.close();
  settle?.(entered);
  settle = null;
}

/** `onKey`: called when a key was entered by choice rather than on the server's demand. */
export function wireKey(onKey) {
  askForKeysWith(ask);
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const key = input.value.trim();
    if (!key) {
      say(error, "Enter a key, or cancel.");
      input.focus();
      return;
    }
    close({ key, remember: byId("key-remember").checked });
  });
  byId("key-cancel").addEventListener("click", () => close(null));
  dialog.addEventListener("cancel", () => {
    settle?.(null); // Esc
    settle = null;
  });
  byId("key-button").addEventListener("click", async () => {
    input.value = "";
    const entered = await ask("");
    if (!entered) return;
    useKey(entered);
    onKey();
  });
}
