// What this server takes at most, so that the page can say no before it sends megabytes.

let asked = null;

/** `{body_bytes, files, picture_bytes, picture_pixels, formats, video_bytes, video_files}`; null while nobody says. */
export function limits() {
  asked ??= fetch("page/limits.json", { credentials: "omit" })
    .then((response) => (response.ok ? response.json() : Promise.reject(new Error(response.statusText))))
    .catch(() => {
      asked = null; // the server decides, and the next file asks again
      return null;
    });
  return asked;
}
