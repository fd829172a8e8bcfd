// What a file is, by its bytes: a picture of a format, a video, or something that no model takes.

// By how files begin. `format` is what the server calls it; without one it reads none of them. `unseen`: many browsers
// can't draw it, and the server reads it all the same.
const KINDS = [
  [/^\x89PNG/, { format: "PNG" }],
  [/^\xff\xd8\xff/, { format: "JPEG" }],
  [/^GIF8/, { format: "GIF" }],
  [/^RIFF[^]{4}WEBP/, { format: "WEBP" }],
  [/^BM[^]{4}\0\0\0\0/, { format: "BMP" }],
  [/^(II\*\0|MM\0\*)/, { format: "TIFF", unseen: "TIFF" }],
  [/^(\x1aE\xdf\xa3|RIFF[^]{4}AVI |OggS)/, { video: true }],
  [/^%PDF/, { name: "a PDF", then: "Save the page that you need as PNG." }],
  [/^(\0\0\0\x0cJXL |\xff\n)/, { name: "a JPEG XL picture", then: "Save it as PNG or JPEG." }],
  [/^PK\x03\x04/, { name: "a ZIP archive or an office document", then: "Take the picture out of it first." }],
  [/^8BPS/, { name: "a Photoshop file", then: "Save it as PNG." }],
  [/^\0\0\x01\0/, { name: "a Windows icon", then: "Save it as PNG." }],
];
const AVIF = { format: "AVIF", unseen: "AVIF" };
const HEIC = { format: "HEIF", unseen: "HEIC", name: "a HEIC photo", then: "On an iPhone choose Settings › Camera › Formats › Most Compatible, or save it as JPEG." };
const SVG = { name: "an SVG drawing", then: "A model sees pixels: open the drawing and save it as PNG." };
const TEXT = { name: "not a picture but a text file", then: "Put the text into your question instead." };
const UNKNOWN = { name: "not a picture", then: "PNG, JPEG and WebP work everywhere." };

/** The kind of a file that begins with `head`, a character a byte: `{format, video, unseen, name, then}`. */
export function kindOf(head) {
  const brands = brandsOf(head);
  if (brands.some((brand) => /^avi[fs]$/.test(brand))) return AVIF;
  if (brands.some((brand) => /^(he[iv][cmsx]|mif[12]|msf1|miaf)$/.test(brand))) return HEIC;
  if (brands.length) return { video: true };
  const [, kind] = KINDS.find(([begins]) => begins.test(head)) ?? [];
  if (kind) return kind;
  if (/<svg[\s>]/i.test(head.slice(0, 4096))) return SVG;
  return /[\0-\x08\x0e-\x1a]/.test(head) ? UNKNOWN : TEXT;
}

/** What an ISO media file says that it is, and may be read as: HEIC and AVIF are such files, as MP4 is. */
function brandsOf(head) {
  if (head.slice(4, 8) !== "ftyp") return [];
  const end = Math.min(numberIn(head.slice(0, 4)), 1024);
  const places = Array.from({ length: Math.max(0, Math.floor((end - 16) / 4)) }, (_, index) => 16 + 4 * index);
  return [8, ...places].map((at) => head.slice(at, at + 4));
}

/** Bytes as a number, the largest first. */
const numberIn = (bytes) => [...bytes].reduce((sum, byte) => 256 * sum + byte.charCodeAt(0), 0);

/** Whether a picture has several frames. `head`: its beginning. */
export async function moves(file, head, format) {
  if (format === "PNG") return numberIn(/acTL([^]{4})[^]*IDAT/.exec(head)?.[1] ?? "") > 1;
  if (format === "AVIF") return brandsOf(head).includes("avis");
  if (format === "GIF") return gifMoves(new Uint8Array(await file.arrayBuffer()));
  return format === "WEBP" && /^[^]{12}VP8X/.test(head) && webpMoves(new DataView(await file.arrayBuffer()));
}

/** Whether a GIF has a second frame: only its blocks tell, since not every animation says how often it repeats. */
function gifMoves(bytes) {
  const table = (flags) => (flags & 0x80 ? 3 << ((flags & 7) + 1) : 0);
  const afterBlocks = (from) => {
    let at = from;
    while (bytes[at]) at += bytes[at] + 1;
    return at + 1;
  };
  let frames = 0;
  let at = 13 + table(bytes[10]);
  while (at < bytes.length && frames < 2) {
    if (bytes[at] === 0x21) at = afterBlocks(at + 2);
    else if (bytes[at] === 0x2c) {
      frames += 1;
      at = afterBlocks(at + 11 + table(bytes[at + 9]));
    } else break;
  }
  return frames > 1;
}

/** Whether a WebP has a second frame. */
function webpMoves(view) {
  let frames = 0;
  for (let at = 12; at + 8 <= view.byteLength && frames < 2; at += 8 + view.getUint32(at + 4, true) + (view.getUint8(at + 4) & 1)) {
    if (view.getUint32(at) === 0x414e4d46) frames += 1; // "ANMF"
  }
  return frames > 1;
}
