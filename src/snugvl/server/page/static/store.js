// Conversations and their pictures, kept in this browser (IndexedDB) and nowhere else.

export const MOST_KEPT = 100; // conversations; older ones go
export const MOST_BYTES = 512 * 1024 * 1024; // of pictures and text together

const TALKS = "conversations";
const FILES = "files"; // by "CONVERSATION/PICTURE"

let opening = null;

function database() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("snugvl", 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore(TALKS, { keyPath: "id" });
      request.result.createObjectStore(FILES);
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  opening.catch(() => {
    opening = null;
  });
  return opening;
}

/** Runs `work(talks, files)` in one transaction; resolves to the result of the request that it returns, once all is done. */
async function transaction(mode, work) {
  const base = await database();
  return new Promise((resolve, reject) => {
    const all = base.transaction([TALKS, FILES], mode);
    const request = work(all.objectStore(TALKS), all.objectStore(FILES));
    all.oncomplete = () => resolve(request?.result);
    all.onabort = () => reject(all.error ?? new Error("the browser gave no reason"));
  });
}

const filesOf = (id) => IDBKeyRange.bound(`${id}/`, `${id}/\uffff`);

/**
 * Keeps a conversation: `{id, title, updated, turns, pictures}`, the pictures with their files. The oldest others
 * go where there are too many. Throws what the browser throws, such as QuotaExceededError.
 */
export async function keep({ pictures, ...talk }) {
  const described = pictures.map(({ file: _file, url: _url, ...facts }) => facts);
  const text = talk.turns.reduce((sum, turn) => sum + turn.text.length + (turn.reasoning?.length ?? 0), 0);
  const bytes = pictures.reduce((sum, { file }) => sum + file.size, 2 * text);
  let grown = false;
  await transaction("readwrite", (talks, files) => {
    const before = talks.getKey(talk.id);
    before.onsuccess = () => {
      grown ||= before.result === undefined;
    };
    talks.put({ ...talk, pictures: described, bytes });
    const there = files.getAllKeys(filesOf(talk.id)); // another tab may have deleted them
    there.onsuccess = () => {
      const fresh = pictures.filter(({ id }) => !there.result.includes(`${talk.id}/${id}`));
      for (const { id, file } of fresh) files.put(file, `${talk.id}/${id}`);
      grown ||= fresh.length > 0;
    };
  });
  if (grown) await makeRoom(talk.id);
}

/** Gives a conversation another title. */
export async function rename(id, title) {
  await transaction("readwrite", (talks) => {
    const before = talks.get(id);
    before.onsuccess = () => before.result && talks.put({ ...before.result, title });
  });
}

/** Everything kept but the files, newest first. */
export async function kept() {
  const talks = await transaction("readonly", (all) => all.getAll());
  return talks.sort((one, other) => other.updated - one.updated);
}

async function makeRoom(current) {
  const talks = await kept();
  let bytes = 0;
  let count = 0;
  for (const talk of [...talks.filter(({ id }) => id === current), ...talks.filter(({ id }) => id !== current)]) {
    bytes += talk.bytes;
    count += 1;
    if (talk.id !== current && (bytes > MOST_BYTES || count > MOST_KEPT)) await forget(talk.id);
  }
}

/** A conversation with its pictures' files; null when it is not there. */
export async function find(id) {
  const talk = await transaction("readonly", (talks) => talks.get(id));
  if (!talk) return null;
  const [keys, files] = await Promise.all([
    transaction("readonly", (_, all) => all.getAllKeys(filesOf(id))),
    transaction("readonly", (_, all) => all.getAll(filesOf(id))),
  ]);
  const byKey = new Map(keys.map((key, index) => [key, files[index]]));
  const pictures = talk.pictures.map((facts) => ({ ...facts, file: byKey.get(`${id}/${facts.id}`) }));
  return { ...talk, pictures: pictures.filter(({ file }) => file) };
}

export async function forget(id) {
  await transaction("readwrite", (talks, files) => {
    talks.delete(id);
    files.delete(filesOf(id));
  });
}

export async function forgetAll() {
  await transaction("readwrite", (talks, files) => {
    talks.clear();
    files.clear();
  });
}
