// Elements and figures. Text only ever becomes a text node: nothing here parses HTML.

export const byId = (id) => {
  const node = document.getElementById(id);
  if (!node) throw new Error(`the page has no #${id}`);
  return node;
};

/** An element with properties (`class`, `text`, `dataset` or any of its own) and children. */
export function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") node.className = value;
    else if (name === "text") node.textContent = value;
    else if (name === "dataset") Object.assign(node.dataset, value);
    else node[name] = value;
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

/** Shows `text` in `node`, or hides the node when there is none. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
  node.hidden = !text;
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** Bytes for people: 1536 → "1.50 KiB". */
export function bytes(count) {
  let unit = 0;
  let value = count;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  const digits = unit === 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return `${value.toFixed(digits)} ${UNITS[unit]}`;
}

export const number = (value) => value.toLocaleString("en-US");

export const plural = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;

/** Hands a file to the browser's downloads. */
export function download(blob, name) {
  const url = URL.createObjectURL(blob);
  const link = make("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** File sizes as file managers write them. */
export function size(count) {
  return count < 1e6 ? `${number(Math.max(1, Math.round(count / 1e3)))} kB` : `${number(Number((count / 1e6).toFixed(1)))} MB`;
}
