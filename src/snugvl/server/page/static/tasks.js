// Caption, scene and detect: one picture in, a typed result out.

import { Unreachable, call, events, warningOf } from "./api.js";
import { clearBoxes, showBoxes } from "./boxes.js";
import { byId, download, make, number } from "./dom.js";
import { cocoOf, pngOf } from "./export.js";
import { jobForm } from "./job.js";
import { imageElement, onPicture, requirePicture } from "./picture.js";

const RESULTS = ["caption-result", "scene-result", "detect-result"];
let found = null; // the last detections: {picture, names, result}

export function wireTasks() {
  const jobs = [
    jobForm(byId("caption-form"), caption),
    jobForm(byId("scene-form"), scene),
    jobForm(byId("detect-form"), detect),
  ];
  onPicture(() => {
    for (const job of jobs) {
      job.stop();
      job.clear();
    }
    for (const id of RESULTS) byId(id).hidden = true;
    forgetBoxes();
  });
  byId("save-png").addEventListener("click", savePng);
  byId("save-coco").addEventListener("click", saveCoco);
  byId("clear-boxes").addEventListener("click", () => {
    byId("detect-result").hidden = true;
    forgetBoxes();
    byId("names").focus();
  });
}

function post(task, picture, fields, signal) {
  const form = new FormData();
  form.append("image", picture.file, picture.name);
  for (const [name, value] of Object.entries(fields)) form.append(name, value);
  return call(`v1/vision/${task}`, { method: "POST", body: form, signal });
}

function figures(usage, response) {
  const counts = usage ? `${number(usage.prompt_tokens)} tokens read, ${number(usage.completion_tokens)} written` : "";
  return [counts, warningOf(response)].filter(Boolean).join(". ");
}

async function caption(signal) {
  const picture = requirePicture();
  const detail = byId("caption-form").elements.detail.value;
  const target = byId("caption-result");
  target.replaceChildren();
  target.hidden = true;
  const response = await post("caption", picture, { detail, stream: "true" }, signal);
  for await (const event of events(response)) {
    target.hidden = false;
    if (event.delta) target.append(event.delta);
    if (!event.result) continue;
    if (target.textContent !== event.result.text) target.textContent = event.result.text; // spaces were trimmed
    if (event.result.truncated) target.append(make("p", { class: "muted small", text: "(cut at its token limit)" }));
    return figures(event.result.usage, response);
  }
  throw new Unreachable("The connection to the server broke off before the caption was complete.");
}

async function scene(signal) {
  const picture = requirePicture();
  byId("scene-result").hidden = true;
  const response = await post("scene", picture, {}, signal);
  const result = await response.json();
  byId("scene-result").replaceChildren(...sceneParts(result));
  byId("scene-result").hidden = false;
  return figures(result.usage, response);
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
    ...(result.truncated ? [make("p", { class: "muted small", text: "(cut at its token limit)" })] : []),
  ];
}

const part = (title, items) =>
  items.length ? [make("h3", { text: title }), make("ul", { class: "plain" }, ...items)] : [];

async function detect(signal) {
  const picture = requirePicture();
  const names = byId("names").value.split(",").map((name) => name.trim()).filter(Boolean);
  const fields = names.length ? { objects: names.join(",") } : {};
  const response = await post("detect", picture, fields, signal);
  const result = await response.json();
  found = { picture, names, result };
  showBoxes(result);
  byId("detect-result").hidden = false;
  byId("stage").scrollIntoView({ block: "nearest" }); // on a phone the picture may be out of sight
  return figures(result.usage, response);
}

function forgetBoxes() {
  found = null;
  clearBoxes();
}

const stem = (name) => name.replace(/\.[^.]*$/, "");

async function savePng() {
  download(await pngOf(imageElement(), found.result), `${stem(found.picture.name)}-boxes.png`);
}

function saveCoco() {
  const data = JSON.stringify(cocoOf(found.picture.name, found.result, found.names), null, 2);
  download(new Blob([data], { type: "application/json" }), `${stem(found.picture.name)}-coco.json`);
}
