// Tabs, as the ARIA pattern has them: arrow keys move, only the chosen one is a tab stop.

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
  tabs.forEach((tab, index) => {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", (event) => {
      const end = { Home: 0, End: tabs.length - 1 }[event.key];
      const target = event.key in step ? (index + step[event.key] + tabs.length) % tabs.length : end;
      if (target === undefined) return;
      event.preventDefault();
      tabs[target].focus();
      choose(tabs[target]);
    });
  });
}
