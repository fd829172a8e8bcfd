// The pictures of the conversation: dropped, pasted, chosen, photographed, or a sample. One of them is on the stage.

import { check, explainRefusals, Refused } from "./check.js";
import { byId, make, number, plural, say, size } from "./dom.js";
import { explain, Needed } from "./job.js";
import { modelCard, onOffer, takesPictures, takesVideo } from "./offer.js";

const MOST_AT_ONCE = 16; // pictures that go with one question

const image = byId("image");
const onStage = [];
const onChange = [];
let tray = []; // {id, file, name, kind, width, height, moves, unseen, url, sent}: see check.js
let current = null; // on the stage
let taking = Promise.resolve(true); // one file after the other, in the order they came
let unchecked = 0; // files that came and are not known yet

/** Calls `listener(picture)` when another one is on the stage (null: none), pixels upright. */
export const onPicture = (listener) => onStage.push(listener);

/** Calls `listener()` whenever the pictures of the conversation are others. */
export const onTray = (listener) => onChange.push(listener);

/** All pictures of the conversation, oldest first. */
export const pictures = () => tray;

/** Those that go with the next question. */
export const waiting = () => tray.filter((picture) => !picture.sent);

/** Throws `Needed` when there is no picture to work on. */
export function requirePicture() {
  if (tray.length) return;
  byId("file").focus();
  throw new Needed("Choose a picture first: press “Choose a picture”, or try one of the samples.");
}

/** The picture or video on the stage; null when there is none. */
export const shown = () => current;

/** A picture as it is kept, ready to be shown. */
export const revived = (kept) => ({ ...kept, url: URL.createObjectURL(kept.file) });

/** Shows these pictures and no others, `chosen` on the stage. */
export function showPictures(all, chosen = all.at(-1) ?? null) {
  const shown = new Set(all.map(({ url }) => url));
  for (const { url } of tray) if (!shown.has(url)) URL.revokeObjectURL(url);
  tray = all;
  say(byId("picture-error"), "");
  choose(chosen);
}

/** Says which pictures belong to questions of the conversation: a set of ids. */
export function markSent(ids) {
  for (const picture of tray) picture.sent = ids.has(picture.id);
  drawTray();
}

/** Resolves once all files that came are taken or refused; throws `Needed` when one was refused meanwhile. */
export async function allTaken() {
  if (unchecked > 0 && !(await taking)) {
    throw new Needed("The question was not sent, because a file was refused: the reason stands under the picture.");
  }
}

/** Takes files, those of them that the server and this browser can use. Resolves to whether it took all. */
export function take(files) {
  if (!takesPictures()) return taking; // #offer says why
  say(byId("picture-error"), "");
  unchecked += files.length;
  taking = taking.then(async () => {
    const refused = [];
    for (const file of files) {
      try {
        await add(file);
      } catch (problem) {
        refused.push(problem instanceof Refused ? problem : new Refused(file.name, `can't be taken: ${explain(problem)}`));
      }
      unchecked -= 1;
    }
    if (refused.length) say(byId("picture-error"), explainRefusals(refused, files.length));
    return refused.length === 0;
  });
  return taking;
}

async function add(file) {
  const name = file.name || "picture.png";
  checkNumber(name);
  const found = await check(file, name);
  const picture = { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), file, name, sent: false, ...found };
  tray = [...tray, revived(picture)];
  choose(tray.at(-1));
}

/** Throws Refused where a picture is one too many: for a question, or for what the model can tell apart. */
function checkNumber(name) {
  const most = modelCard().training?.max_images ?? Infinity;
  if (tray.length >= most) {
    const limit = `this model can't tell more than ${most} pictures of one conversation apart.`;
    throw new Refused(name, `is one too many: ${limit}`, `are too many: ${limit}`);
  }
  if (waiting().length >= MOST_AT_ONCE) {
    const limit = `at most ${MOST_AT_ONCE} pictures go with one question.`;
    throw new Refused(name, `is one too many: ${limit}`, `are too many: ${limit}`);
  }
}

function remove(picture) {
  const place = tray.indexOf(picture);
  tray = tray.filter((other) => other !== picture);
  URL.revokeObjectURL(picture.url);
  choose(picture === current ? (tray[place] ?? tray.at(-1) ?? null) : current);
  (byId("tray").querySelector(".thumb[aria-pressed=true]") ?? byId("file")).focus();
}

/** Puts a picture on the stage. */
export function choose(picture) {
  const another = picture !== current;
  current = picture;
  if (another) drawStage();
  drawTray();
  if (another) for (const listener of onStage) listener(current);
}

function drawStage() {
  const any = current !== null;
  byId("stage").hidden = !any;
  byId("empty").hidden = any;
  byId("samples").hidden = any;
  byId("file-label").textContent = any ? "Add another" : "Choose a picture";
  byId("file-label").classList.toggle("primary", !any);
  byId("picture-facts").textContent = any ? facts(current) : "";
  const drawn = any && isDrawn(current);
  byId("frame").hidden = !drawn;
  byId("film").hidden = !any || drawn;
  sayMotion();
  if (!drawn) {
    image.removeAttribute("src");
    if (any) byId("film").replaceChildren(sign(current), make("span", { text: ` ${withoutImage(current)}` }));
    return;
  }
  image.alt = `Your picture, ${current.name}`;
  image.src = current.url;
  byId("frame").style.setProperty("--ratio", String(current.width / current.height));
  byId("frame").style.setProperty("--natural-width", `${current.width}px`);
}

/** Whether the stage holds an animation still, at the frame that boxes belong to. */
export function holdStill(still) {
  if (!current?.moves) return;
  image.src = current.url;
  if (still) hold(image, current);
}

/** Puts the first frame of an animation into an img that shows it. */
export async function hold(node, { file, url }) {
  const frame = await createImageBitmap(file);
  const canvas = make("canvas", { width: frame.width, height: frame.height });
  canvas.getContext("2d").drawImage(frame, 0, 0);
  frame.close();
  if (node.src === url) node.src = canvas.toDataURL(); // another picture may be shown meanwhile
}

/** Says below an animation which of its frames are sent. */
function sayMotion() {
  const sent = takesVideo()
    ? "An animation: questions, Caption and Scene send its frames, Detect looks at its first one."
    : "An animation: its first frame is sent, because this model does not understand videos.";
  say(byId("motion"), current?.moves ? sent : "");
}

/** What stands in place of an image that this page can't show. */
function withoutImage({ unseen, name }) {
  if (!unseen) return "A video: questions, Caption and Scene send its frames; Detect needs a still picture. This page doesn't play it.";
  return `${name} can't be shown by this browser. It goes to the server as it is, which can read it.`;
}

function facts({ name, kind, width, height, unseen, file }) {
  const pixels = kind === "video" ? "video" : (unseen ?? `${number(width)} × ${number(height)} px`);
  return `${name} · ${pixels} · ${size(file.size)}`;
}

function drawTray() {
  byId("tray").hidden = tray.length === 0;
  byId("tray").replaceChildren(...tray.map(thumbOf));
  const count = waiting().length;
  say(byId("tray-facts"), count > 0 && tray.length > 1 ? `${plural(count, "picture")} will go with the next question.` : "");
  for (const listener of onChange) listener();
}

function thumbOf(picture, index) {
  const name = `${index + 1}: ${picture.name}`;
  const button = make("button", { type: "button", class: "thumb" }, miniature(picture));
  button.dataset.number = String(index + 1);
  button.setAttribute("aria-label", `Show picture ${name}${picture.sent ? "" : ", not sent yet"}`);
  button.setAttribute("aria-pressed", String(picture === current));
  button.addEventListener("click", () => {
    choose(picture);
    byId("tray").children[index]?.firstElementChild.focus(); // the list was drawn anew
  });
  const item = make("li", { class: picture.sent ? "sent" : "" }, button);
  if (picture.sent) return item; // it belongs to a question
  const cross = make("button", { type: "button", class: "remove", text: "×" });
  cross.setAttribute("aria-label", `Remove ${picture.name}`);
  cross.addEventListener("click", () => remove(picture));
  item.append(cross);
  return item;
}

/** Whether this browser draws it. The page's policy lets it play no video. */
export const isDrawn = ({ kind, unseen }) => kind === "picture" && !unseen;

/** A sign in place of what isn't drawn. */
export function sign({ unseen }) {
  const node = make("span", { class: "film-sign", text: unseen ?? "▶" });
  node.setAttribute("aria-hidden", "true");
  return node;
}

/** A small image of a picture, or a sign. */
export const miniature = (picture) =>
  isDrawn(picture) ? make("img", { src: picture.url, alt: "", decoding: "async" }) : sign(picture);

export function wirePicture() {
  onOffer(sayMotion); // a file may be chosen before the server has said what its model can
  for (const id of ["file", "camera"]) {
    byId(id).addEventListener("change", (event) => {
      const files = [...event.target.files];
      event.target.value = ""; // so that the same file can be chosen again
      take(files);
    });
  }
  document.addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (!files.length) return; // text, for a text field
    event.preventDefault();
    take(files);
  });
  wireDrop();
  wireSamples();
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
    const files = [...(event.dataTransfer?.files ?? [])];
    if (!files.length) return;
    event.preventDefault();
    take(files);
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
      await take([new File([await response.blob()], name, { type: "image/png" })]);
      byId("work").focus();
    });
  }
}
