// Loaded before the page is drawn, so that a chosen theme never flashes the other one, nor a folded panel.
"use strict";
{
  const themes = ["auto", "light", "dark"];
  const root = document.documentElement;

  const stored = () => {
    try {
      return localStorage.getItem("snugvl-theme");
    } catch {
      return null; // storage is switched off
    }
  };
  const apply = (theme) => {
    root.dataset.theme = theme;
    const button = document.getElementById("theme-button");
    if (button) button.textContent = `Theme: ${theme}`;
  };

  try {
    root.dataset.memory = localStorage.getItem("snugvl-memory") === "folded" ? "folded" : "open"; // panel.js sets it
  } catch {
    root.dataset.memory = "open";
  }
  const first = stored();
  apply(themes.includes(first) ? first : "auto");
  document.addEventListener("DOMContentLoaded", () => {
    apply(root.dataset.theme);
    document.getElementById("theme-button").addEventListener("click", () => {
      const next = themes[(themes.indexOf(root.dataset.theme) + 1) % themes.length];
      apply(next);
      try {
        localStorage.setItem("snugvl-theme", next);
      } catch {
        // The choice holds for this visit.
      }
    });
  });
}
