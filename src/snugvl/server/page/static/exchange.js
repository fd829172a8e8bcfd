// Conversations to take away: Markdown for people, JSON for programs, which /v1/chat/completions takes.

import { requestOf } from "./request.js";

/** A conversation of store.js as Markdown; pictures are named. */
export function markdownOf({ title, turns, pictures }) {
  const names = new Map(pictures.map(({ id, name }) => [id, name]));
  const parts = turns.map((turn) => {
    const head = `## ${turn.role === "user" ? "You" : turn.model}`;
    const seen = (turn.pictures ?? []).map((id) => `*Picture: ${names.get(id) ?? "deleted"}*`);
    const note = turn.note ? `*(${turn.note})*` : "";
    return [head, ...seen, turn.text, note].filter(Boolean).join("\n\n");
  });
  return `${[`# ${title}`, ...parts].join("\n\n")}\n`;
}

/** The same as JSON, its pictures in it: the body of a request, to whose `messages` a question may be added. */
export async function jsonOf({ title, updated, turns, pictures }) {
  const urls = new Map();
  for (const { id, file } of pictures) urls.set(id, await dataUrl(file));
  const model = turns.findLast(({ role }) => role === "assistant")?.model;
  const body = requestOf(model, turns, pictures, ({ id }) => urls.get(id));
  const shown = pictures.map(({ id, name, kind, width, height }) => ({ id, name, kind, width, height }));
  return JSON.stringify({ title, updated: new Date(updated).toISOString(), ...body, pictures: shown }, null, 2);
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

/** A file's name for a conversation. */
export const fileName = (title) =>
  title.normalize("NFKC").replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 60) || "conversation";
