// The server's API: keys, errors and event streams.

const STORE = "snugvl-key";

/** The server answered, and the answer is no. `message` is the server's own. */
export class ServerError extends Error {
  constructor(message, status = 0, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter; // seconds
  }
}

/** The server did not answer at all, or broke off. */
export class Unreachable extends Error {}

let key = sessionKey();
let asker = async () => null;
let asking = null;
let declined = false; // the user closed the dialog: do not nag

/** `ask(message)` lets the user enter a key: resolves to `{key, remember}`, or null when they would rather not. */
export function askForKeysWith(ask) {
  asker = ask;
}

export function useKey(entered) {
  key = entered.key;
  declined = false;
  try {
    if (entered.remember) sessionStorage.setItem(STORE, key);
    else sessionStorage.removeItem(STORE);
  } catch {
    // Storage is switched off: the key lives as long as this page.
  }
}

function sessionKey() {
  try {
    return sessionStorage.getItem(STORE);
  } catch {
    return null;
  }
}

/** Asks once, however many requests need the answer. */
function enterKey(message) {
  asking ??= asker(message)
    .then((entered) => {
      if (entered) useKey(entered);
      else declined = true;
      return entered !== null;
    })
    .finally(() => {
      asking = null;
    });
  return asking;
}

/**
 * A request to the server, relative to this page; asks for a key when one is needed (not again after a
 * "no", for what runs in the `background`). Options are those of `fetch`, and `timeoutMs`.
 * Throws ServerError, Unreachable, or AbortError when `options.signal` says so.
 */
export async function call(path, { background = false, ...options } = {}) {
  for (;;) {
    const used = key;
    const response = await send(path, options, used);
    if (response.ok) return response;
    const error = await failure(response);
    if (response.status !== 401) throw error;
    if (used !== key) continue; // a key was entered meanwhile
    if (background && declined) throw error;
    if (!(await enterKey(used === null ? "" : error.message))) throw error;
  }
}

async function send(path, { timeoutMs, ...options }, bearer) {
  const headers = new Headers(options.headers);
  if (timeoutMs) options.signal = AbortSignal.timeout(timeoutMs);
  if (bearer !== null) headers.set("Authorization", `Bearer ${bearer}`);
  try {
    return await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unreachable("The server doesn't answer.");
  }
}

async function failure(response) {
  let message = `The server answered ${response.status} ${response.statusText}`.trim() + ".";
  try {
    message = errorMessage(await response.json()) ?? message;
  } catch {
    // Not JSON: the status has to do.
  }
  const wait = Number.parseFloat(response.headers.get("Retry-After") ?? "");
  return new ServerError(message, response.status, Number.isFinite(wait) ? wait : null);
}

/** The message in an error's body, whichever form it has. */
function errorMessage(body) {
  const error = body?.error;
  if (typeof error === "string") return error;
  return error?.message ?? (typeof body?.detail === "string" ? body.detail : null);
}

/**
 * What the server says of an answer beforehand, a sentence each: that the model never learned such pictures.
 * `nameOf(place)`: a picture's name by its place in the request, which is undefined for the only one.
 */
export function warningsOf(response, nameOf) {
  const said = (response.headers.get("Snugvl-Warning") ?? "").split("; ").filter(Boolean);
  return said.map((text) => {
    const named = text.replace(/^the (?:image|video)(?: at (\S+))?(?= )/, (all, place) => nameOf(place) ?? all);
    return (named === text ? text[0].toUpperCase() + text.slice(1) : named).replace(/\.$/, "");
  });
}

/** The JSON of a request's answer. Throws as `call` and `bodyOf` do. */
export const json = async (path, options = {}) => bodyOf(await call(path, options));

/** The JSON of an answer; throws Unreachable where it broke off or took too long. */
export async function bodyOf(response) {
  try {
    return await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unreachable("The server's answer broke off.");
  }
}

/** The JSON of each server-sent event. Throws ServerError for an error event, Unreachable when the stream breaks. */
export async function* events(response) {
  for await (const data of dataOf(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    const message = errorMessage(event);
    if (message) throw new ServerError(message, event.error.code ?? 0);
    yield event;
  }
}

async function* dataOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await read(reader);
      if (done) break;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const ending of lines) {
        const line = ending.endsWith("\r") ? ending.slice(0, -1) : ending;
        if (line.startsWith("data:")) data.push(line.slice(line.startsWith("data: ") ? 6 : 5));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // nobody reads on
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unreachable("The connection to the server broke off before the answer was complete.");
  }
}
