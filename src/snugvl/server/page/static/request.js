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
  const { system, temperature, tokens } = settings();
  const body = { model, messages: messagesOf(turns, sent, system), stream: true, stream_options: { include_usage: true } };
  if (temperature !== null) body.temperature = temperature;
  if (tokens !== null) body.max_completion_tokens = tokens;
  const json = new Blob([JSON.stringify(body)], { type: "application/json" });
  await checkSize(sent, json.size);
  const form = new FormData();
  form.append("request", json, "request.json");
  for (const { id, file, name } of sent) form.append(id, file, name);
  return form;
}

function messagesOf(turns, sent, system) {
  const messages = turns.map(({ role, text, pictures = [] }) => {
    if (role === "assistant") return { role, content: text };
    const parts = pictures.flatMap((id) => sent.filter((picture) => picture.id === id).map(partOf));
    return { role, content: [...parts, { type: "text", text }] };
  });
  return system ? [{ role: "system", content: system }, ...messages] : messages;
}

function partOf({ id, kind, moves }) {
  const url = `attachment:${id}`;
  return kind === "video" || (moves && takesVideo()) ? { type: "video_url", video_url: { url } } : { type: "image_url", image_url: { url } };
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
