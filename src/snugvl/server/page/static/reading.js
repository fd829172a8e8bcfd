// Where the reader is in the conversation. A new answer comes into sight until its question stands at the top: a long
// one is read from its beginning. Only who is at the end is kept there.

import { byId } from "./dom.js";

const NEAR_END_PX = 40;

const transcript = byId("transcript");
const button = byId("to-end");
let top = null; // the element that a new answer may scroll up to the top
let atEnd = false; // the reader went to the end, and stays there
let placed = 0; // where the page itself scrolled to last

const left = () => transcript.scrollHeight - transcript.scrollTop - transcript.clientHeight;

/** Shows `node`, a turn, and what follows it; as that grows, `node` rises to the top and stays there. */
export function readFrom(node) {
  top = node ?? null;
  atEnd = false;
  keepPlace();
}

/** The conversation, or its frame, has another size: the reader stays, or is taken along. */
function keepPlace() {
  const end = transcript.scrollHeight - transcript.clientHeight;
  if (atEnd) scrollTo(end);
  else if (top) scrollTo(Math.min(end, top.offsetTop - transcript.offsetTop));
  button.hidden = left() < NEAR_END_PX;
}

function scrollTo(place) {
  transcript.scrollTop = place;
  placed = transcript.scrollTop;
}

function toEnd() {
  atEnd = true;
  top = null;
  keepPlace();
}

export function wireReading() {
  transcript.addEventListener("scroll", () => {
    if (Math.abs(transcript.scrollTop - placed) > 1) {
      placed = transcript.scrollTop; // the reader moved, and decides from now on
      top = null;
      atEnd = left() < NEAR_END_PX;
    }
    button.hidden = left() < NEAR_END_PX;
  });
  button.addEventListener("click", () => {
    toEnd();
    transcript.focus({ preventScroll: true }); // the button is gone
  });
  const sizes = new ResizeObserver(keepPlace);
  sizes.observe(transcript); // the window may become another one
  new MutationObserver((changes) => {
    for (const { addedNodes } of changes) for (const node of addedNodes) sizes.observe(node);
  }).observe(transcript, { childList: true });
}
