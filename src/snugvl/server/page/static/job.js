// One form that starts something: busy state, stop, status line and error line.

import { ServerError, Unreachable } from "./api.js";
import { say } from "./dom.js";

/** An error of ours that the user can put right, such as a missing picture. */
export class Needed extends Error {}

export function jobForm(form, work) {
  const submit = form.querySelector("[type=submit]");
  const stop = form.querySelector(".stop");
  const status = form.querySelector(".job-status");
  const error = form.querySelector(".error");
  let controller = null;

  async function run(task = work) {
    if (controller) return;
    controller = new AbortController();
    busy(true);
    say(error, "");
    const started = performance.now();
    const elapsed = () => `${((performance.now() - started) / 1000).toFixed(1)} s`;
    const ticking = setInterval(() => say(status, `Working … ${elapsed()}`), 500);
    say(status, "Working …");
    try {
      const done = await task(controller.signal);
      say(status, [done, elapsed()].filter(Boolean).join(" · "));
    } catch (problem) {
      say(status, problem.name === "AbortError" ? "Stopped." : "");
      if (problem.name !== "AbortError") say(error, explain(problem));
    } finally {
      clearInterval(ticking);
      controller = null;
      busy(false);
    }
  }

  function busy(yes) {
    form.setAttribute("aria-busy", String(yes));
    const focused = document.activeElement;
    submit.setAttribute("aria-disabled", String(yes)); // not `disabled`: that would lose the focus
    stop.hidden = !yes;
    if (!yes && focused === stop) submit.focus();
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  stop.addEventListener("click", () => controller?.abort());
  form.closest("[role=tabpanel]").addEventListener("keydown", (event) => {
    if (event.key === "Escape") controller?.abort();
  });
  return {
    run,
    stop: () => controller?.abort(),
    clear: () => {
      say(error, "");
      say(status, "");
    },
    fail: (problem) => say(error, explain(problem)),
  };
}

/** An error in words for people; the server's own words where it has some. */
export function explain(problem) {
  if (problem instanceof Needed || problem instanceof Unreachable) return problem.message;
  if (problem instanceof ServerError) {
    if (problem.retryAfter === null) return problem.message;
    const end = /[.!?]$/.test(problem.message) ? "" : ".";
    return `${problem.message}${end} Try again in ${Math.ceil(problem.retryAfter)} s.`;
  }
  console.error(problem); // a bug of this page
  return `Something in this page went wrong: ${problem.message}`;
}
