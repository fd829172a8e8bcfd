// Tabs, as the ARIA pattern has them: arrow keys move, only the chosen one is a tab stop.

/** Returns `show(names)`: only the tabs of these names ("ask" for #tab-ask) are there; the first of all if none is. */
export function wireTabs(list) {
  const tabs = [...list.querySelectorAll("[role=tab]")];
  const choose = (chosen) => {
    for (const tab of tabs) {
      const on = tab === chosen;
      tab.setAttribute("aria-selected", String(on));
      tab.tabIndex = on ? 0 : -1;
      document.getElementById(tab.getAttribute("aria-controls")).hidden = !on;
    }
  };
  const step = { ArrowRight: 1, ArrowLeft: -1 };
  for (const tab of tabs) {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", (event) => {
      const there = tabs.filter((other) => !other.hidden);
      const end = { Home: 0, End: there.length - 1 }[event.key];
      const next = (there.indexOf(tab) + step[event.key] + there.length) % there.length;
      const target = event.key in step ? next : end;
      if (target === undefined) return;
      event.preventDefault();
      there[target].focus();
      choose(there[target]);
    });
  }
  return (names) => {
    for (const tab of tabs) tab.hidden = !names.includes(tab.id.replace("tab-", ""));
    const chosen = tabs.find((tab) => tab.getAttribute("aria-selected") === "true");
    if (chosen.hidden) choose(tabs.find((tab) => !tab.hidden) ?? tabs[0]);
  };
}
