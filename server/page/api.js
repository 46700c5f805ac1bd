// How pages talk to their server: fetch with the key that their reader gave, errors as the server
// words them, and streams of events. The key is kept for this tab alone.

import { element } from "/page/dom.js";

const KEY = "loomserve-key";

export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

// Asks the server; a JSON body makes it a POST. Returns the Response of a 2xx answer. Asks the
// reader for the key where the server wants one, and tries again with it.
//
// Throws ServerError, or what fetch does when it is aborted.
export async function ask(path, { body, signal } = {}) {
  for (;;) {
    const response = await send(path, body, signal);
    if (response.ok) return response;
    if (response.status === 401 && (await askForKey(await told(response)))) continue;
    throw new ServerError(await told(response), response.status);
  }
}

async function send(path, body, signal) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  const options = { headers, signal, cache: "no-store" };
  if (body !== undefined) {
    headers["Content-Type"] = "application/json";
    options.method = "POST";
    options.body = JSON.stringify(body);
  }
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached.");
  }
}

// What an error answer says. Its body is read once and remembered.
const said = new WeakMap();
async function told(response) {
  if (!said.has(response)) {
    const text = await response.text();
    let message = text.slice(0, 500);
    try {
      message = JSON.parse(text).error.message;
    } catch {
      // not the server's own form: a proxy's, perhaps
    }
    said.set(response, message || `${response.status} ${response.statusText}`);
  }
  return said.get(response);
}

// The data of every event of a stream, parsed, until it ends.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      const parts = rest.split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").find((line) => line.startsWith("data: "))?.slice(6);
        if (data === undefined) continue;
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // a stream that was aborted says so once more
  }
}

// A typographic quote or a blank of no width comes along easily when a key is pasted.
function fitsHeader(key) {
  try {
    return new Headers({ Authorization: `Bearer ${key}` }).has("Authorization");
  } catch {
    return false;
  }
}

// Whether the reader has given a key, so that the server may refuse what is asked without one.
export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

// Several may want the key at once; the reader is asked once.
let asking = null;
function askForKey(why) {
  asking ??= openKeyDialog(why).finally(() => (asking = null));
  return asking;
}

function makeKeyDialog() {
  const field = element("input", { type: "password", autocomplete: "off", required: true });
  const form = element(
    "form",
    {},
    element("h2", { id: "key-title" }, "This server asks for a key"),
    element("p", { class: "why" }),
    element("label", {}, "API key ", field),
    element("p", { class: "notes" }, "Kept in this tab until it is closed."),
    element("button", {}, "Use it"),
  );
  const dialog = element("dialog", { id: "key-dialog" }, form);
  dialog.setAttribute("aria-labelledby", "key-title");
  document.body.append(dialog);
  return dialog;
}

function openKeyDialog(why) {
  const dialog = document.getElementById("key-dialog") ?? makeKeyDialog();
  const field = dialog.querySelector("input");
  dialog.querySelector(".why").textContent = why;
  field.value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.querySelector("form").onsubmit = (event) => {
      event.preventDefault();
      const key = field.value.trim();
      if (!fitsHeader(key)) {
        dialog.querySelector(".why").textContent = "the API key is wrong: it has characters that none has";
        return;
      }
      sessionStorage.setItem(KEY, key);
      dialog.onclose = null;
      dialog.close();
      resolve(true);
    };
    dialog.onclose = () => resolve(false);
  });
}
