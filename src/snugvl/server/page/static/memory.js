// The memory ledger as a picture: the device, this server's part of it, and what was planned.

import { byId, bytes, make, number, say } from "./dom.js";

const SPAN_S = 3; // tokens per second are measured over about this long
const HISTORY = 60; // points of the sparkline
const OVER = 1.02; // times the plan, below which nobody wonders

const ORDER = ["weights", "vision-weights", "kv", "workspace", "context", "other", "rest"];

let samples = [];
const speeds = [];

export function showMemory({ at, ledger, load, plan }) {
  byId("speed").title = plan?.speed ? `Planned for one request: ${plan.speed}` : "";
  if (load) showSpeed(at, load.generated_tokens);
  else byId("speed").textContent = "–"; // no engine yet
  byId("running").textContent = load ? number(load.running) : "–";
  byId("waiting").textContent = load ? number(load.waiting) : "–";
  byId("kv-use").textContent = load ? kvUse(load) : "–";
  showDrafts(load);
  if (!ledger) return;
  byId("device").textContent = ledger.device;
  const parts = partsOf(ledger, load);
  showDevice(ledger);
  showProcess(ledger, parts);
  showTable(ledger, parts);
  byId("meter").textContent = `Memory ${bytes(ledger.process_bytes)} of ${bytes(ledger.total_bytes)}`;
}

function showSpeed(at, tokens) {
  const last = samples.at(-1);
  if (last && tokens < last.tokens) samples = []; // another engine counts from zero
  if (!last || at > last.at) samples.push({ at, tokens });
  while (samples.length > 2 && samples[1].at <= at - SPAN_S) samples.shift();
  const [first] = samples;
  const speed = at > first.at ? (tokens - first.tokens) / (at - first.at) : 0;
  byId("speed").textContent = speed >= 100 ? number(Math.round(speed)) : speed.toFixed(1);
  speeds.push(speed);
  if (speeds.length > HISTORY) speeds.shift();
  const top = Math.max(...speeds, 1);
  const points = speeds.map((value, index) => `${index + HISTORY - speeds.length},${(19 - (18 * value) / top).toFixed(2)}`);
  byId("sparkline").firstElementChild.setAttribute("points", points.join(" "));
}

function showDrafts(load) {
  const drafted = load?.drafted_tokens ?? 0; // with --speculation alone
  byId("drafts").hidden = !drafted;
  if (drafted) byId("drafts-accepted").textContent = `${Math.round((100 * load.accepted_tokens) / drafted)} % (${load.draft_method})`;
}

function kvUse({ free_blocks: free, num_blocks: all }) {
  return all ? `${((100 * (all - free)) / all).toFixed(all - free && all - free < all / 10 ? 1 : 0)} %` : "–";
}

const KINDS = {
  "weights": "weights", "text weights": "weights", "weights in host memory": "weights", "vision weights": "vision-weights",
  "KV cache": "kv", "CUDA context and libraries": "context", "Python and libraries": "context", "CUDA graphs": "other",
};

/** The rows of the ledger with a kind each, which decides colour and place; what belongs to no row becomes one of its own. */
function partsOf(ledger, load) {
  const parts = ledger.rows.map((row) => ({ ...row, kind: KINDS[row.kind] ?? "workspace", used: usedOf(row, load) }));
  const known = parts.reduce((sum, part) => sum + (part.measured_bytes ?? 0), 0);
  const rest = ledger.process_bytes - known;
  if (rest > 0) {
    parts.push({ name: "everything else", planned_bytes: null, measured_bytes: rest, kind: "rest", used: null });
  }
  return parts.sort((a, b) => ORDER.indexOf(a.kind) - ORDER.indexOf(b.kind)); // the same place for each, always
}

function usedOf(row, load) {
  if (row.used_bytes !== null && row.used_bytes !== undefined) return row.used_bytes;
  if (row.kind !== "KV cache" || !load?.num_blocks || row.measured_bytes === null) return null;
  return Math.round((row.measured_bytes * (load.num_blocks - load.free_blocks)) / load.num_blocks);
}

function segment(kind, share) {
  const node = make("div", { class: `segment ${kind}` });
  node.style.width = `${(100 * share).toFixed(3)}%`;
  return node;
}

function showDevice({ total_bytes: total, free_bytes: free, process_bytes: own, others_bytes: others, cap_bytes: cap }) {
  const shares = [["own", "This server", own], ["others", "Others", others], ["free", "Free", free]];
  const bar = byId("device-bar");
  const marks = cap ? [capMark(cap / total)] : [];
  bar.replaceChildren(...shares.map(([kind, , held]) => segment(kind, held / total)), ...marks);
  bar.setAttribute("aria-label", `Of ${bytes(total)}: ${shares.map(([, name, held]) => `${name} ${bytes(held)}`).join(", ")}`);
  byId("device-sum").textContent = bytes(total);
  const entries = shares.map(([kind, name, held]) => entry(kind, `${name} ${bytes(held)}`));
  if (cap) entries.push(entry("cap", `Never more than ${bytes(cap)}`));
  byId("device-legend").replaceChildren(...entries);
}

const entry = (kind, text) => make("li", {}, make("span", { class: `swatch ${kind}` }), text);

function capMark(share) {
  const mark = make("div", { class: "cap-mark" });
  mark.style.left = `${(100 * Math.min(share, 1)).toFixed(3)}%`;
  return mark;
}

function showProcess(ledger, parts) {
  const measured = parts.filter((part) => part.measured_bytes > 0);
  const whole = Math.max(ledger.process_bytes, measured.reduce((sum, part) => sum + part.measured_bytes, 0));
  const bar = byId("process-bar");
  bar.replaceChildren(...measured.flatMap((part) => segmentsOf(part, whole)));
  bar.setAttribute("aria-label", `This server: ${measured.map(sentence).join(", ")}`);
  byId("process-sum").textContent = bytes(ledger.process_bytes);
}

/** One segment, or two for what is partly in use. */
function segmentsOf({ kind, measured_bytes: held, used }, whole) {
  if (used === null) return [segment(kind, held / whole)];
  return [segment(kind, used / whole), segment(`${kind} unused`, (held - used) / whole)];
}

function sentence({ name, measured_bytes: held, used }) {
  return used === null ? `${name} ${bytes(held)}` : `${name} ${bytes(held)} with ${bytes(used)} in use`;
}

function showTable(ledger, parts) {
  byId("ledger").replaceChildren(...parts.map(rowOf));
  const inPlan = parts.filter((part) => part.planned_bytes);
  const sum = (name) => inPlan.reduce((total, part) => total + (part[name] ?? 0), 0);
  const feet = [{ name: "Whole process", measured_bytes: ledger.process_bytes }];
  if (inPlan.length) {
    const [planned, measured] = [sum("planned_bytes"), sum("measured_bytes")];
    feet.unshift({ name: "All in the plan", planned_bytes: planned, measured_bytes: measured });
  }
  byId("ledger-foot").replaceChildren(...feet.map(rowOf));
  say(byId("beyond"), beyond(parts));
}

/** Why something takes more than was planned for it, where something does. */
function beyond(parts) {
  const over = parts.filter(({ planned_bytes: planned, measured_bytes: measured }) => planned && measured > OVER * planned);
  if (!over.length) return "";
  const names = over.map(({ name, planned_bytes: planned, measured_bytes: measured }) => `${name}: ${bytes(measured - planned)}`);
  return (
    `More than planned (${names.join(", ")}). A plan counts what the model computes with at once; a process also keeps ` +
    "what it used before, such as for many requests at the same time, for the next ones."
  );
}

function rowOf({ name, kind, planned_bytes: planned, measured_bytes: measured, used }) {
  const cell = (value) => make("td", { text: value === null || value === undefined ? "–" : bytes(value) });
  const head = make("th", { scope: "row" }, kind ? make("span", { class: `swatch ${kind}` }) : null, name.replaceAll("_", " "));
  return make("tr", {}, head, cell(planned), cell(measured), cell(used));
}
