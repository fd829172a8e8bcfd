// A conversation as /v1/chat/completions takes it: JSON, and the pictures as files of the same form.

import { number, size } from "./dom.js";
import { Needed } from "./job.js";
import { limits } from "./limits.js";
import { takesVideo } from "./offer.js";
import { settings } from "./settings.js";

const PART_BYTES = 512; // that a file takes in a form beside its own bytes

/** The form to post. Throws `Needed` where the pictures are more than this server takes at once. */
export async function formOf(model, turns, pictures) {
  const asked = new Set(turns.flatMap((turn) => turn.pictures ?? []));
  const sent = pictures.filter(({ id }) => asked.has(id));
  const asStream = { stream: true, stream_options: { include_usage: true } };
  const body = { ...requestOf(model, turns, sent, ({ id }) => `attachment:${id}`), ...asStream };
  const json = new Blob([JSON.stringify(body)], { type: "application/json" });
  await checkSize(sent, json.size);
  const form = new FormData();
  form.append("request", json, "request.json");
  for (const { id, file, name } of sent) form.append(id, file, name);
  return form;
}

/** The name of the picture at a place in the request of `form`, as the server says it; undefined where none is. */
export async function namesIn(form) {
  const { messages } = JSON.parse(await form.get("request").text());
  return (place = "") => {
    const [message, part] = [...place.matchAll(/\[(\d+)\]/g)].map(([, index]) => Number(index));
    const sent = messages[message]?.content[part];
    return form.get(sent?.[sent.type]?.url?.replace("attachment:", ""))?.name;
  };
}

/** The JSON that asks for the next answer, with the settings of now. `urlOf(picture)`: what it calls one. */
export function requestOf(model, turns, pictures, urlOf) {
  const { system, temperature, tokens } = settings();
  const messages = turns.map(({ role, text, pictures: ids = [] }) => {
    if (role === "assistant") return { role, content: text };
    const shown = ids.flatMap((id) => pictures.filter((picture) => picture.id === id));
    return { role, content: [...shown.map((picture) => partOf(picture, urlOf(picture))), { type: "text", text }] };
  });
  return {
    model,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    ...(temperature !== null ? { temperature } : {}),
    ...(tokens !== null ? { max_completion_tokens: tokens } : {}),
  };
}

/** A film, or an animation where the model takes films, is a video; else of an animation the first frame is seen. */
function partOf({ kind, moves }, url) {
  const type = kind === "video" || (moves && takesVideo()) ? "video_url" : "image_url";
  return { type, [type]: { url } };
}

async function checkSize(sent, words) {
  const known = await limits();
  if (!known) return;
  const bytes = sent.reduce((sum, { file }) => sum + file.size, 0);
  const again = "Every question sends all pictures of its conversation: begin a new one, or use smaller pictures.";
  if (bytes + words + PART_BYTES * (sent.length + 1) > known.body_bytes) {
    throw new Needed(
      `The pictures of this conversation are ${size(bytes)} together, and this server takes ${size(known.body_bytes)} at once. ${again}`,
    );
  }
  if (sent.length > known.files) {
    throw new Needed(
      `This conversation has ${number(sent.length)} pictures, and this server takes ${number(known.files)} at once. ${again}`,
    );
  }
}
