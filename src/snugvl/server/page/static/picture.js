// The picture in question: dropped, pasted, chosen, photographed, or a sample.

import { byId, number, say } from "./dom.js";
import { Needed } from "./job.js";
import { takesPictures } from "./offer.js";

const image = byId("image");
const listeners = [];
let current = null;

/** Calls `listener(picture)` for every new picture: `{file, name, width, height}`, pixels upright. */
export function onPicture(listener) {
  listeners.push(listener);
}

/** The picture; throws `Needed` when there is none. */
export function requirePicture() {
  if (current) return current;
  byId("file").focus();
  throw new Needed("Choose a picture first: drop one anywhere on this page, paste it, or press “Choose a picture”.");
}

export const imageElement = () => image;

/** The picture as a data URL, as chat messages carry it. */
export function dataUrl(picture) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Needed(`${picture.name} can't be read any more. Choose it again.`));
    reader.readAsDataURL(picture.file);
  });
}

/** Takes a file, once the browser could decode it. */
export async function take(file) {
  if (!takesPictures()) return; // #offer says why
  say(byId("picture-error"), "");
  const name = file.name || "picture.png";
  const url = URL.createObjectURL(file);
  const probe = new Image();
  probe.src = url;
  try {
    await probe.decode();
  } catch {
    URL.revokeObjectURL(url);
    say(byId("picture-error"), `${name} is not a picture that this browser can show. PNG, JPEG and WebP work everywhere.`);
    return;
  }
  if (image.src) URL.revokeObjectURL(image.src);
  image.src = url;
  await image.decode();
  current = { file, name, width: image.naturalWidth, height: image.naturalHeight };
  show(current);
  for (const listener of listeners) listener(current);
}

function show({ name, width, height, file }) {
  image.alt = `Your picture, ${name}`;
  const frame = byId("frame");
  frame.style.setProperty("--ratio", String(width / height));
  frame.style.setProperty("--natural-width", `${width}px`);
  byId("stage").hidden = false;
  byId("empty").hidden = true;
  byId("samples").hidden = true;
  byId("file-label").textContent = "Choose another";
  byId("file-label").classList.remove("primary");
  byId("picture-facts").textContent = `${name} · ${number(width)} × ${number(height)} px · ${size(file.size)}`;
}

/** File sizes as file managers write them. */
function size(count) {
  return count < 1e6 ? `${Math.max(1, Math.round(count / 1e3))} kB` : `${(count / 1e6).toFixed(1)} MB`;
}

function firstImage(files) {
  return [...(files ?? [])].find((file) => file.type.startsWith("image/")) ?? files?.[0];
}

function wireInputs() {
  for (const id of ["file", "camera"]) {
    byId(id).addEventListener("change", (event) => {
      const [file] = event.target.files;
      event.target.value = ""; // so that the same file can be chosen again
      if (file) take(file);
    });
  }
  document.addEventListener("paste", (event) => {
    const file = firstImage(event.clipboardData?.files);
    if (!file) return; // text, for a text field
    event.preventDefault();
    take(file);
  });
}

function wireDrop() {
  const veil = byId("drop");
  let depth = 0; // dragenter and dragleave also come for every element on the way
  const carriesFiles = (event) => event.dataTransfer?.types.includes("Files");
  const leave = () => {
    depth = 0;
    veil.hidden = true;
  };
  document.addEventListener("dragenter", (event) => {
    if (!carriesFiles(event) || !takesPictures()) return;
    depth += 1;
    veil.hidden = false;
  });
  document.addEventListener("dragleave", (event) => {
    if (carriesFiles(event) && --depth <= 0) leave();
  });
  document.addEventListener("dragover", (event) => {
    if (carriesFiles(event)) event.preventDefault();
  });
  document.addEventListener("drop", (event) => {
    leave();
    const file = firstImage(event.dataTransfer?.files);
    if (!file) return;
    event.preventDefault();
    take(file);
  });
}

function wireSamples() {
  for (const button of document.querySelectorAll("[data-sample]")) {
    button.addEventListener("click", async () => {
      const name = button.dataset.sample;
      const response = await fetch(`page/${name}`).catch(() => null);
      if (!response?.ok) {
        say(byId("picture-error"), `The sample ${name} could not be loaded: the server doesn't answer.`);
        return;
      }
      await take(new File([await response.blob()], name, { type: "image/png" }));
      byId("work").focus();
    });
  }
}

export function wirePicture() {
  wireInputs();
  wireDrop();
  wireSamples();
}
