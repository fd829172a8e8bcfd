// Caption, scene and detect: a typed result of each picture, or of the one that is shown.

import { ServerError, Unreachable, bodyOf, call, events, warningsOf } from "./api.js";
import { drawPaired, frameOf, listOf, summary } from "./boxes.js";
import { byId, download, make, number, plural, say } from "./dom.js";
import { cocoOf, pngOf } from "./export.js";
import { explain, jobForm, Needed } from "./job.js";
import { takesVideo } from "./offer.js";
import { allTaken, holdStill, isDrawn, onPicture, onTray, pictures, requirePicture, shown } from "./picture.js";

const RESULTS = ["caption-result", "scene-result", "detect-result"];
const STILL = "Choose a still picture for Detect; questions, Caption and Scene take the video.";
let jobs = [];
let found = []; // of the last detection: {picture, result, items}
let asked = []; // names that it looked for
let seen = ""; // ids of the pictures that the results are about

export function wireTasks() {
  jobs = [
    jobForm(byId("caption-form"), caption),
    jobForm(byId("scene-form"), scene),
    jobForm(byId("detect-form"), detect),
  ];
  onPicture(drawStage);
  onTray(() => {
    showScope();
    const ids = pictures().map(({ id }) => id).join();
    if (ids !== seen) forget();
    seen = ids;
  });
  byId("scope").addEventListener("change", showScope);
  byId("save-coco").addEventListener("click", saveCoco);
  byId("clear-boxes").addEventListener("click", () => {
    forgetBoxes();
    byId("names").focus();
  });
}

/** The pictures are others: no result is about them. */
function forget() {
  for (const job of jobs) {
    job.stop();
    job.clear();
  }
  for (const id of RESULTS) byId(id).hidden = true;
  forgetBoxes();
}

/** Which pictures are meant is only asked where there are several. */
function showScope() {
  const many = pictures().length > 1;
  byId("scope").hidden = !many;
  const all = many && !byId("scope").elements.one.checked;
  byId("caption-button").textContent = all ? `Caption ${number(pictures().length)} pictures` : "Caption the picture";
  if (!many) return;
  byId("scope-all").textContent = `All ${number(pictures().length)}`;
  byId("scope-one").textContent = `Only ${shown().name}, which is shown`;
}

/** The pictures to work on; throws `Needed` where there are none. */
function chosen() {
  requirePicture();
  return byId("scope").elements.one.checked ? [shown()] : pictures();
}

/**
 * Runs `work(picture, place, signal)` for each picture: it shows a result in `place`, an element, and resolves to
 * figures of it, `{usage, warnings}`. One that fails says so in its place and the others go on.
 */
async function each(target, signal, work) {
  await allTaken();
  signal.throwIfAborted();
  const all = chosen();
  const several = pictures().length > 1; // then each result says of which picture it is
  const sum = { prompt_tokens: 0, completion_tokens: 0 };
  const said = new Set();
  target.replaceChildren();
  for (const picture of all) {
    const place = make("div", { class: "task-result" });
    const whole = several ? make("section", {}, headOf(picture), place) : place;
    target.append(whole);
    try {
      const { usage, warnings } = await work(picture, place, signal);
      for (const name of Object.keys(sum)) sum[name] += usage?.[name] ?? 0;
      for (const each of warnings) said.add(each);
    } catch (problem) {
      if (all.length > 1 && (problem instanceof ServerError || problem instanceof Needed)) {
        place.replaceChildren(make("p", { class: "error", text: explain(problem) }));
        continue;
      }
      if (!place.hasChildNodes()) whole.remove();
      throw problem;
    }
  }
  const counts = `${number(sum.prompt_tokens)} tokens read, ${number(sum.completion_tokens)} written`;
  return [all.length > 1 ? plural(all.length, "picture") : "", counts, ...said].filter(Boolean).join(". ");
}

const headOf = (picture) => make("h3", { text: `${pictures().indexOf(picture) + 1}: ${picture.name}` });

function post(task, picture, fields, signal) {
  const form = new FormData();
  form.append("image", picture.file, picture.name);
  for (const [name, value] of Object.entries(fields)) form.append(name, value);
  return call(`v1/vision/${task}`, { method: "POST", body: form, signal });
}

/** Caption and scene look at all of an animation where the model takes videos; without, at its first frame. */
const motionOf = ({ moves }) => (moves && takesVideo() ? { video: "true" } : {});

const cut = () => make("p", { class: "muted small", text: "(cut at its token limit)" });

function caption(signal) {
  const target = byId("caption-result");
  target.hidden = true;
  const detail = byId("caption-form").elements.detail.value;
  return each(target, signal, async (picture, place) => {
    const response = await post("caption", picture, { detail, stream: "true", ...motionOf(picture) }, signal);
    const text = place.appendChild(make("p", {}));
    for await (const event of events(response)) {
      target.hidden = false;
      if (event.delta) text.append(event.delta);
      if (!event.result) continue;
      if (text.textContent !== event.result.text) text.textContent = event.result.text; // spaces were trimmed
      if (event.result.truncated) place.append(cut());
      return { usage: event.result.usage, warnings: warningsOf(response, () => picture.name) };
    }
    throw new Unreachable("The connection to the server broke off before the caption was complete.");
  });
}

function scene(signal) {
  const target = byId("scene-result");
  target.hidden = true;
  return each(target, signal, async (picture, place) => {
    const response = await post("scene", picture, motionOf(picture), signal);
    const result = await bodyOf(response);
    place.append(...sceneParts(result));
    target.hidden = false;
    return { usage: result.usage, warnings: warningsOf(response, () => picture.name) };
  });
}

function sceneParts(result) {
  const objects = result.objects.map(({ name, count, positions }) =>
    make(
      "li",
      {},
      make("strong", { text: `${number(count)} × ${name}` }),
      positions.length ? make("span", { class: "muted", text: ` ${positions.join(", ")}` }) : null,
    ),
  );
  const lines = (texts) => texts.map((text) => make("li", { text }));
  return [
    make("p", { class: "prose", text: result.summary }),
    ...part("Setting", result.setting ? [make("li", { text: result.setting })] : []),
    ...part("Objects", objects),
    ...part("Written in the picture", lines(result.text)),
    ...part("Relations", lines(result.relations)),
    ...(result.truncated ? [cut()] : []),
  ];
}

const part = (title, items) =>
  items.length ? [make("h3", { text: title }), make("ul", { class: "plain" }, ...items)] : [];

async function detect(signal) {
  forgetBoxes();
  asked = byId("names").value.split(",").map((name) => name.trim()).filter(Boolean);
  const fields = asked.length ? { objects: asked.join(",") } : {};
  const several = pictures().length > 1;
  const figures = await each(byId("detect-blocks"), signal, async (picture, place) => {
    if (picture.kind === "video") throw new Needed(`${picture.name} is a video, and boxes belong to one picture. ${STILL}`);
    const response = await post("detect", picture, fields, signal);
    const result = await bodyOf(response);
    const { node, items } = listOf(result);
    found.push({ picture, result, items });
    place.append(...(several ? [boxed(picture, result, items)] : []), node, ...lackOf(result), ...saving(picture, result));
    drawStage();
    byId("detect-result").hidden = false;
    say(byId("detect-summary"), summary(found.map((each) => each.result)));
    return { usage: result.usage, warnings: warningsOf(response, () => picture.name) };
  });
  if (!several) byId("stage").scrollIntoView({ block: "nearest" }); // on a phone the picture may be out of sight
  return figures;
}

/** A line for each object that was asked for and isn't there; a label may say one more or less of it. */
function lackOf({ objects }) {
  const same = (name, label) => name.includes(label) || label.includes(name);
  const missing = asked.filter((name) => !objects.some(({ label }) => same(name.toLowerCase(), label.toLowerCase())));
  return missing.map((name) => make("p", { class: "muted", text: `${name} not found` }));
}

/** The picture with its boxes: of several, only one is on the stage. */
function boxed(picture, result, items) {
  const { frame, overlay } = frameOf(picture, result);
  drawPaired(overlay, result, items);
  return make("div", { class: "boxed" }, frame);
}

function saving(picture, result) {
  if (!isDrawn(picture)) return []; // there are no pixels here to draw on
  const button = make("button", { type: "button", text: "Download as PNG" });
  button.addEventListener("click", async () => {
    const image = make("img", { src: picture.url });
    await image.decode();
    download(await pngOf(image, result), `${stem(picture.name)}-boxes.png`);
  });
  return [button];
}

/** The boxes of the picture on the stage. */
function drawStage() {
  const { result, items } = found.find(({ picture }) => picture === shown()) ?? {};
  byId("overlay").replaceChildren();
  holdStill(Boolean(result));
  if (result) drawPaired(byId("overlay"), result, items);
}

function forgetBoxes() {
  found = [];
  byId("detect-result").hidden = true;
  drawStage();
}

const stem = (name) => name.replace(/\.[^.]*$/, "");

function saveCoco() {
  const named = found.map(({ picture, result }) => ({ name: picture.name, result }));
  const data = JSON.stringify(cocoOf(named, asked), null, 2);
  download(new Blob([data], { type: "application/json" }), `${stem(named[0].name)}-coco.json`);
}
