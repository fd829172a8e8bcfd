// What a file is, before anything is sent: every refusal says in plain words what is wrong and what to do.

import { number, size } from "./dom.js";
import { Needed } from "./job.js";
import { limits } from "./limits.js";
import { takesVideo } from "./offer.js";

const HEAD_BYTES = 1 << 16;

// By how files begin. `format` is what the server calls it; without one it reads none of them.
const KINDS = [
  [/^\x89PNG/, { format: "PNG" }],
  [/^\xff\xd8\xff/, { format: "JPEG" }],
  [/^GIF8/, { format: "GIF" }],
  [/^RIFF[^]{4}WEBP/, { format: "WEBP" }],
  [/^BM[^]{4}\0\0\0\0/, { format: "BMP" }],
  [/^(II\*\0|MM\0\*)/, { format: "TIFF" }],
  [/^[^]{4}ftypavi[fs]/, { format: "AVIF" }],
  [/^[^]{4}ftyp(hei|mif|msf)/, { format: "HEIF", name: "a HEIC photo", then: "On an iPhone choose Settings › Camera › Formats › Most Compatible, or save it as JPEG." }],
  [/^([^]{4}ftyp|\x1aE\xdf\xa3|RIFF[^]{4}AVI |OggS)/, { video: true }],
  [/^%PDF/, { name: "a PDF", then: "Save the page that you need as PNG." }],
  [/^(\0\0\0\x0cJXL |\xff\n)/, { name: "a JPEG XL picture", then: "Save it as PNG or JPEG." }],
  [/^PK\x03\x04/, { name: "a ZIP archive or an office document", then: "Take the picture out of it first." }],
  [/^8BPS/, { name: "a Photoshop file", then: "Save it as PNG." }],
  [/^\0\0\x01\0/, { name: "a Windows icon", then: "Save it as PNG." }],
];
const SVG = { name: "an SVG drawing", then: "A model sees pixels: open the drawing and save it as PNG." };
const TEXT = { name: "not a picture but a text file", then: "Put the text into your question instead." };
const UNKNOWN = { name: "not a picture", then: "PNG, JPEG and WebP work everywhere." };

/**
 * What `file` is: `{kind: "picture", width, height}`, pixels upright, or `{kind: "video"}`.
 * Throws Needed where the server or this browser can't take it.
 */
export async function check(file, name) {
  if (file.size === 0) throw new Needed(`${name} is empty: it holds no bytes. Save or download it again.`);
  const head = await latin1(file);
  const found = kindOf(head);
  const known = await limits();
  if (found.video) return checkVideo(file, name, known);
  if (found.name && !known?.formats.includes(found.format)) {
    throw new Needed(`${name} is ${found.name}${found.name.startsWith("not") ? "" : ", which can't be read here"}. ${found.then}`);
  }
  if (known && file.size > known.picture_bytes) {
    throw new Needed(
      `${name} is too large: ${size(file.size)}. This server takes pictures of up to ${size(known.picture_bytes)}. Save it smaller, as JPEG for example.`,
    );
  }
  if (moves(head, found.format)) return checkAnimation(name);
  return checkPixels(file, name, found, known);
}

async function latin1(file) {
  const bytes = new Uint8Array(await file.slice(0, HEAD_BYTES).arrayBuffer());
  let text = "";
  for (let at = 0; at < bytes.length; at += 8192) text += String.fromCharCode(...bytes.subarray(at, at + 8192));
  return text;
}

function kindOf(head) {
  const [, kind] = KINDS.find(([begins]) => begins.test(head)) ?? [];
  if (kind) return kind;
  if (/<svg[\s>]/i.test(head.slice(0, 4096))) return SVG;
  return /[\0-\x08\x0e-\x1a]/.test(head) ? UNKNOWN : TEXT;
}

function checkVideo(file, name, known) {
  if (!takesVideo()) {
    throw new Needed(`${name} is a video, and this model takes no video. Take a still picture out of it instead.`);
  }
  if (known && !known.video_files) {
    throw new Needed(
      `${name} is a video, and this server can't read video files: whoever runs it has to install snugvl[video]. An animated GIF or WebP works.`,
    );
  }
  if (known && file.size > known.video_bytes) {
    throw new Needed(
      `${name} is too large: ${size(file.size)}. This server takes videos of up to ${size(known.video_bytes)}. Cut it, or save it smaller.`,
    );
  }
  return { kind: "video" };
}

/** Whether a picture is an animation; looks at the file's beginning. */
function moves(head, format) {
  if (format === "PNG") return /acTL[^]*IDAT/.test(head);
  if (format === "WEBP") return head.slice(12, 16) === "VP8X" && (head.charCodeAt(20) & 2) !== 0;
  return format === "GIF" && head.includes("NETSCAPE2.0"); // a GIF that says how often it repeats
}

function checkAnimation(name) {
  if (takesVideo()) return { kind: "video" };
  throw new Needed(`${name} is an animation, and this model takes no video. Save one frame of it as PNG.`);
}

async function checkPixels(file, name, found, known) {
  const url = URL.createObjectURL(file);
  try {
    const { width, height } = await sizeOf(url, name, found);
    if (known && width * height > known.picture_pixels) {
      throw new Needed(
        `${name} has too many pixels: ${number(width)} × ${number(height)} are ${millions(width * height)}. This server takes up to ${millions(known.picture_pixels)}. Save it smaller: a quarter of the width is plenty.`,
      );
    }
    await whole(file, name);
    return { kind: "picture", width, height };
  } finally {
    URL.revokeObjectURL(url);
  }
}

const millions = (pixels) => `${number(Math.round(pixels / 1e6))} million`;

/** Width and height, which the browser knows before it decodes anything. */
function sizeOf(url, name, found) {
  const probe = new Image();
  return new Promise((resolve, reject) => {
    probe.onload = () => resolve({ width: probe.naturalWidth, height: probe.naturalHeight });
    probe.onerror = () => {
      const what = found.format === "TIFF" ? "a TIFF picture, which this browser can't show" : "damaged";
      reject(new Needed(`${name} is ${what}. Save it again, as PNG or JPEG.`));
    };
    probe.src = url;
  });
}

/** An img shows what there is of a torn file; a bitmap needs all of it. */
async function whole(file, name) {
  try {
    (await createImageBitmap(file)).close();
  } catch {
    throw new Needed(`${name} is torn: a part of the file is missing. Copy or download it again.`);
  }
}
