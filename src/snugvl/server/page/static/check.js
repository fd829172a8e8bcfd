// What a file is, before anything is sent: every refusal says in plain words what is wrong and what to do.

import { number, size } from "./dom.js";
import { Needed } from "./job.js";
import { kindOf, moves } from "./kinds.js";
import { limits } from "./limits.js";
import { takesVideo } from "./offer.js";

const HEAD_BYTES = 1 << 16;

/** A file that can't be taken. `text` says why, after its name; `together`, after the names of several such files. */
export class Refused extends Needed {
  constructor(name, text, together = null) {
    super(`${name} ${text}`);
    this.file = name;
    this.text = text;
    this.together = together;
  }
}

/**
 * What `file` is: `{kind: "picture", width, height, moves}`, pixels upright; `{kind: "picture", unseen}` where this
 * browser can't draw it, by the name of its format; or `{kind: "video"}`.
 * Throws Refused where the server can't take it.
 */
export async function check(file, name) {
  if (file.size === 0) throw new Refused(name, "is empty: it holds no bytes. Save or download it again.");
  const head = await latin1(file);
  const found = kindOf(head);
  const known = await limits();
  if (found.video) return checkVideo(file, name, known);
  if (found.name && !(found.format && (known?.formats.includes(found.format) ?? true))) {
    throw new Refused(name, `is ${found.name}${found.name.startsWith("not") ? "" : ", which can't be read here"}. ${found.then}`);
  }
  if (known && file.size > known.picture_bytes) {
    throw new Refused(name, `is too large: ${size(file.size)}. This server takes pictures of up to ${size(known.picture_bytes)}. Save it smaller, as JPEG for example.`);
  }
  const seen = await checkPixels(file, name, found, known);
  return { kind: "picture", ...seen, moves: !seen.unseen && (await moves(file, head, found.format)) };
}

async function latin1(file) {
  const bytes = new Uint8Array(await file.slice(0, HEAD_BYTES).arrayBuffer());
  let text = "";
  for (let at = 0; at < bytes.length; at += 8192) text += String.fromCharCode(...bytes.subarray(at, at + 8192));
  return text;
}

function checkVideo(file, name, known) {
  if (!takesVideo()) {
    throw new Refused(name, "is a video, and this model does not understand videos. Take a still picture out of it instead.");
  }
  if (known && !known.video_files) {
    throw new Refused(name, "is a video, and this server can't read video files: whoever runs it has to install snugvl[video].");
  }
  if (known && file.size > known.video_bytes) {
    throw new Refused(name, `is too large: ${size(file.size)}. This server takes videos of up to ${size(known.video_bytes)}. Cut it, or save it smaller.`);
  }
  return { kind: "video" };
}

async function checkPixels(file, name, found, known) {
  const url = URL.createObjectURL(file);
  try {
    const pixels = await sizeOf(url);
    if (!pixels && found.unseen) return { unseen: found.unseen }; // the server can, and looks at it
    if (!pixels) throw new Refused(name, "is damaged. Save it again, as PNG or JPEG.");
    const { width, height } = pixels;
    if (known && width * height > known.picture_pixels) {
      throw new Refused(name, `has too many pixels: ${number(width)} × ${number(height)} are ${millions(width * height)}. This server takes up to ${millions(known.picture_pixels)}. Save it smaller: a quarter of the width is plenty.`);
    }
    await whole(file, name);
    return { width, height };
  } finally {
    URL.revokeObjectURL(url);
  }
}

const millions = (pixels) => `${number(Math.round(pixels / 1e6))} million`;

/** Width and height, which the browser knows before it decodes anything; null where it can't draw the file. */
function sizeOf(url) {
  const probe = new Image();
  return new Promise((resolve) => {
    probe.onload = () => resolve({ width: probe.naturalWidth, height: probe.naturalHeight });
    probe.onerror = () => resolve(null);
    probe.src = url;
  });
}

/** An img shows what there is of a torn file; a bitmap needs all of it. */
async function whole(file, name) {
  try {
    (await createImageBitmap(file)).close();
  } catch {
    throw new Refused(name, "is torn: a part of the file is missing. Copy or download it again.");
  }
}

const LISTED = 3; // names of files with the same fault

/** Why files were refused, as one text: those with the same fault in one sentence. `all`: how many came with them. */
export function explainRefusals(refused, all) {
  const kinds = Map.groupBy(refused, ({ together, text }) => together ?? text);
  const sentences = [...kinds.values()].map((same) => {
    const [first] = same;
    if (same.length === 1) return first.message;
    const more = same.length > LISTED ? ` and ${number(same.length - LISTED)} more` : "";
    return `${same.slice(0, LISTED).map(({ file }) => file).join(", ")}${more}${first.together ? ` ${first.together}` : `: each ${first.text}`}`;
  });
  if (refused.length > 1) sentences.unshift(`${number(refused.length)} of ${number(all)} files were not taken.`);
  return sentences.join("\n\n");
}
