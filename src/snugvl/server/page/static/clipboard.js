// Copying text. A page that is not on this machine and not behind HTTPS has no navigator.clipboard.

import { make } from "./dom.js";

/** A button that copies what `text()` gives. */
export function copyButton(text, name = "Copy") {
  const button = make("button", { type: "button", class: "quiet small copy", text: name });
  button.addEventListener("click", async () => {
    button.textContent = (await copy(text())) ? "Copied" : "Could not copy: select it and press Ctrl + C";
    button.focus(); // Safari doesn't by itself
  });
  button.addEventListener("blur", () => {
    button.textContent = name;
  });
  return button;
}

/** Whether `text` is in the clipboard now. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text);
  }
}

function copyBySelection(text) {
  const focused = document.activeElement;
  const area = make("textarea", { class: "visually-hidden", value: text, readOnly: true });
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  focused?.focus({ preventScroll: true });
  return done;
}
