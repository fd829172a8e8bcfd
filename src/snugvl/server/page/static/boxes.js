// Boxes over the picture, and the list that says the same. One of a pair is lit with the other.

import { make, plural } from "./dom.js";
import { hold, isDrawn, sign } from "./picture.js";

// White letters have a contrast of at least 4.5 on each of these.
const COLOURS = ["#c2185b", "#1565c0", "#2e7d32", "#6a1b9a", "#b23c00", "#00697a", "#7a4f00", "#37474f"];
const CROWD = 12; // more labels than this would hide the picture: then only the lit one is shown

/** A colour for each label, in order of appearance. */
export function colours(objects) {
  const labels = [...new Set(objects.map((object) => object.label))];
  return new Map(labels.map((label, index) => [label, COLOURS[index % COLOURS.length]]));
}

/** Draws the boxes of `found` ({width, height, objects}) over a picture; returns them in the order of the objects. */
export function drawOver(overlay, found) {
  const colour = colours(found.objects);
  const boxes = found.objects.map((object) => boxOf(object, found, colour.get(object.label)));
  // Large boxes first, so that a small one inside them can still be pointed at.
  const order = [...boxes.keys()].sort((a, b) => area(found.objects[b].box) - area(found.objects[a].box));
  overlay.classList.toggle("crowded", boxes.length > CROWD);
  overlay.replaceChildren(...order.map((index) => boxes[index]));
  return boxes;
}

/** The list of the objects of `found`, and its items in their order. */
export function listOf(found) {
  const colour = colours(found.objects);
  const items = found.objects.map((object) => itemOf(object, colour.get(object.label)));
  return { items, node: make("ol", { class: "detections" }, ...items) };
}

/** Draws the boxes of `found` over a picture; each is lit with its item of the list. */
export function drawPaired(overlay, found, items) {
  drawOver(overlay, found).forEach((box, index) => pair(box, items[index]));
}

const area = (box) => (box.x2 - box.x1) * (box.y2 - box.y1);

/** What was found, in words, of one picture or of several. */
export function summary(all) {
  const count = all.reduce((sum, { objects }) => sum + objects.length, 0);
  const where = all.length > 1 ? ` in ${plural(all.length, "picture")}` : "";
  const cut = all.some(({ truncated }) => truncated) ? " An answer was cut at its token limit, so there may be more." : "";
  return `${count ? `${plural(count, "object")} found` : "Nothing found"}${where}.${cut}`;
}

function boxOf({ label, box }, { width, height }, colour) {
  const tag = make("span", { class: "box-label", text: label });
  const node = make("div", { class: "box" }, tag);
  // In percent of the picture, so boxes follow it at any size.
  node.style.left = `${(100 * box.x1) / width}%`;
  node.style.top = `${(100 * box.y1) / height}%`;
  node.style.width = `${(100 * (box.x2 - box.x1)) / width}%`;
  node.style.height = `${(100 * (box.y2 - box.y1)) / height}%`;
  node.style.setProperty("--colour", colour);
  if (box.y1 < 0.08 * height) tag.classList.add("inside");
  const right = box.x1 > 0.4 * width && box.x2 > width - box.x1; // there is more room on its left
  if (right) tag.classList.add("right");
  const room = (right ? box.x2 : width - box.x1) / (box.x2 - box.x1); // in widths of the box, up to the edge
  tag.style.maxWidth = `min(14rem, ${100 * room}%)`;
  return node;
}

function itemOf({ label, box }, colour) {
  const swatch = make("span", { class: "swatch" });
  swatch.style.setProperty("--colour", colour);
  const place = [box.x1, box.y1, box.x2, box.y2].map((value) => Math.round(value));
  return make(
    "li",
    {},
    make(
      "button",
      { type: "button", class: "detection" },
      swatch,
      make("span", { class: "detection-label", text: label }),
      make("span", { class: "muted figures", text: `${place[0]}, ${place[1]} – ${place[2]}, ${place[3]} px` }),
    ),
  );
}

function pair(box, item) {
  const button = item.firstElementChild;
  const lit = (on) => {
    box.classList.toggle("lit", on);
    button.classList.toggle("lit", on);
  };
  for (const node of [box, button]) {
    node.addEventListener("pointerenter", () => lit(true));
    node.addEventListener("pointerleave", () => lit(document.activeElement === button));
  }
  button.addEventListener("focus", () => lit(true));
  button.addEventListener("blur", () => lit(false));
  box.addEventListener("click", () => button.focus());
  button.addEventListener("click", () => box.scrollIntoView({ block: "nearest" }));
}

/** A picture, or its sign, with boxes to come over it: `{frame, overlay}`. `width` and `height`: of the picture. */
export function frameOf(picture, { width, height }) {
  const overlay = make("div", { class: "overlay" });
  overlay.setAttribute("aria-hidden", "true");
  const image = isDrawn(picture) ? make("img", { src: picture.url, alt: picture.name }) : sign(picture);
  if (picture.moves && isDrawn(picture)) hold(image, picture);
  const frame = make("div", { class: "frame" }, image, overlay);
  frame.style.setProperty("--ratio", String(width / height));
  frame.style.setProperty("--natural-width", `${width}px`);
  return { frame, overlay };
}
