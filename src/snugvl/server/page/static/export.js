// Detections to take away: the picture with its boxes, and COCO (https://cocodataset.org/#format-data).

import { colours } from "./boxes.js";

const SMALLEST_SIDE = 480; // no label is readable on a picture of 64 pixels, so small ones are enlarged

/** A PNG of `image` (an img element) with the boxes and labels of `found` on it. */
export function pngOf(image, found) {
  const factor = Math.max(1, Math.ceil(SMALLEST_SIDE / Math.max(found.width, found.height)));
  const canvas = document.createElement("canvas");
  canvas.width = found.width * factor;
  canvas.height = found.height * factor;
  const pen = canvas.getContext("2d");
  pen.imageSmoothingEnabled = factor === 1;
  pen.drawImage(image, 0, 0, canvas.width, canvas.height);
  const line = Math.max(2, Math.round(Math.sqrt(canvas.width * canvas.height) / 260));
  const colour = colours(found.objects);
  const things = found.objects.map(({ label, box }) => ({
    label,
    colour: colour.get(label),
    x: box.x1 * factor,
    y: box.y1 * factor,
    width: (box.x2 - box.x1) * factor,
    height: (box.y2 - box.y1) * factor,
  }));
  for (const thing of things) outline(pen, thing, line);
  for (const thing of things) tag(pen, thing, line, canvas.width); // labels last, over every line
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

function outline(pen, { x, y, width, height, colour }, line) {
  for (const [style, extra] of [["#ffffff", 2], [colour, 0]]) {
    pen.strokeStyle = style;
    pen.lineWidth = line + extra;
    pen.strokeRect(x, y, width, height);
  }
}

function tag(pen, { label, x, y, colour }, line, right) {
  const size = line * 6;
  pen.font = `600 ${size}px system-ui, sans-serif`;
  pen.textBaseline = "middle";
  const width = pen.measureText(label).width + size * 0.8;
  const height = size * 1.5;
  const left = Math.max(0, Math.min(x - line / 2, right - width));
  const top = y >= height ? y - height : y;
  pen.fillStyle = colour;
  pen.fillRect(left, top, width, height);
  pen.fillStyle = "#ffffff";
  pen.fillText(label, left + size * 0.4, top + height / 2);
}

/** Detections of pictures, `[{name, result}]`, as a COCO data set; what was asked for comes first, as the server has it. */
export function cocoOf(found, asked) {
  const labels = [...new Set([...asked, ...found.flatMap(({ result }) => result.objects.map(({ label }) => label))])];
  const round = (value) => Math.round(value * 100) / 100;
  const boxes = found.flatMap(({ result }, place) => result.objects.map((object) => ({ ...object, image: place + 1 })));
  return {
    images: found.map(({ name, result }, place) => ({
      id: place + 1,
      file_name: name,
      width: result.width,
      height: result.height,
    })),
    annotations: boxes.map(({ label, box, image }, index) => {
      const [width, height] = [box.x2 - box.x1, box.y2 - box.y1];
      return {
        id: index + 1,
        image_id: image,
        category_id: labels.indexOf(label) + 1,
        bbox: [box.x1, box.y1, round(width), round(height)],
        area: round(width * height),
        segmentation: [],
        iscrowd: 0,
      };
    }),
    categories: labels.map((label, index) => ({ id: index + 1, name: label, supercategory: "" })),
  };
}
