// Boxes that a model writes into its answer, such as {"bbox_2d": [x1, y1, x2, y2], "label": "cat"}, and of which
// picture they are. How the model counts, the server says: `grounding` of its card in /v1/models.

const MOST_BOXES = 200;
const OBJECT = /\{[^{}]*\}/g; // a box stands in an object of its own; one that breaks off has no end
const PICTURE_KEYS = ["image", "picture", "image_index", "picture_index", "image_id", "frame"];
const MENTION = /\b(?:(first|second|third|fourth|fifth|last) (?:picture|image|photo)|(?:picture|image|photo)\s*#?(\d{1,3}))\b/gi;
const ORDINALS = ["first", "second", "third", "fourth", "fifth"];

/**
 * The boxes in an answer: `[{picture, label, box: [x1, y1, x2, y2]}]`, in parts of the picture's width and height.
 * `pictures`: of the conversation, in the order in which the model saw them; `recent`: the first of those that the
 * last question with any brought, which is meant where nothing says otherwise; `grounding`: of the model, as the
 * server says it; null where it gives no boxes.
 */
export function boxesIn(answer, question, pictures, recent, grounding) {
  const found = [];
  if (!grounding) return found;
  const asked = mentioned(question, pictures);
  for (const match of answer.matchAll(OBJECT)) {
    const read = boxOf(match[0], grounding.keys);
    if (!read) continue;
    const said = ofKey(read.value, pictures) ?? mentioned(answer.slice(0, match.index), pictures);
    const picture = said ?? asked ?? recent;
    const box = inParts(read.corners, picture, grounding);
    if (!box) continue;
    const label = read.value.label ?? read.value.name ?? read.value.category ?? "";
    found.push({ picture: picture.id, label: String(label).slice(0, 200), box });
    if (found.length === MOST_BOXES) break;
  }
  return found;
}

/** `{value, corners}` of an object that holds one box; corners are x1, y1, x2, y2 as the model counts. */
function boxOf(text, keys) {
  if (!Object.keys(keys).some((each) => text.includes(each))) return null;
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    return null;
  }
  const key = Object.keys(keys).find((each) => isFour(value[each]));
  if (!key) return null;
  const [a, b, c, d] = value[key];
  return { value, corners: keys[key] === "x" ? [a, b, c, d] : [b, a, d, c] };
}

const isFour = (list) => Array.isArray(list) && list.length === 4 && list.every(Number.isFinite);

/** The picture that an object names: by number from 1, by "Picture 2", or by its file's name. */
function ofKey(value, pictures) {
  const said = PICTURE_KEYS.map((key) => value[key]).find((each) => each !== undefined);
  if (said === undefined) return null;
  if (Number.isInteger(said)) return pictures[said - 1] ?? null;
  return pictures.find(({ name }) => name === said) ?? mentioned(String(said), pictures) ?? null;
}

/** The picture that a text speaks of last: "Picture 2", "the second image"; null when it speaks of none. */
function mentioned(text, pictures) {
  const match = [...text.slice(-2000).matchAll(MENTION)].at(-1);
  if (!match) return null;
  if (match[2]) return pictures[Number(match[2]) - 1] ?? null;
  const word = match[1].toLowerCase();
  return (word === "last" ? pictures.at(-1) : pictures[ORDINALS.indexOf(word)]) ?? null;
}

function inParts([x1, y1, x2, y2], picture, grounding) {
  if (picture?.kind !== "picture") return null;
  const [width, height] = countsTo(picture, grounding);
  const part = (value, whole) => Math.min(Math.max(value / whole, 0), 1);
  const box = [part(x1, width), part(y1, height), part(x2, width), part(y2, height)];
  return box[2] > box[0] && box[3] > box[1] ? box : null;
}

/** What the model's numbers count to along a picture's width and height. */
function countsTo({ width, height }, { scale, resized }) {
  if (scale) return [scale, scale];
  const { factor, min_pixels: least, max_pixels: most } = resized;
  const fitted = (round, by) => [width, height].map((length) => Math.max(factor, round((length * by) / factor) * factor));
  const [columns, rows] = fitted(Math.round, 1);
  if (columns * rows > most) return fitted(Math.floor, Math.sqrt(most / (width * height)));
  if (columns * rows < least) return fitted(Math.ceil, Math.sqrt(least / (width * height)));
  return [columns, rows];
}
