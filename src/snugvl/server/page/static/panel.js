// The memory panel, folded on demand; this browser remembers it.

import { byId } from "./dom.js";

const STORE = "snugvl-memory";
const root = document.documentElement; // theme.js says there, before anything is drawn, how the panel was left

export function wirePanel() {
  const button = byId("memory-button");
  const fold = (folded) => {
    root.dataset.memory = folded ? "folded" : "open";
    button.setAttribute("aria-expanded", String(!folded));
    button.textContent = folded ? "Show" : "Fold";
    button.setAttribute("aria-label", `${button.textContent} the memory panel`);
  };
  const choose = (folded) => {
    fold(folded);
    try {
      if (folded) localStorage.setItem(STORE, "folded");
      else localStorage.removeItem(STORE);
    } catch {
      // It holds for this visit.
    }
  };
  fold(root.dataset.memory === "folded");
  button.addEventListener("click", () => choose(root.dataset.memory !== "folded"));
  byId("meter").addEventListener("click", () => choose(false)); // who follows the link wants to see it
}
