// Token probabilities: which tokens a piece of text came from, and what is told of them.

import { element } from "/page/dom.js";

// Lays the tokens of a stream (entries of `logprobs.content`) under its text, as both come. Text may
// come later than its tokens (what could have become a stop string), tokens may have no text (marks
// of tools); text whose tokens are not known is shown without. Where a text stands more than once
// among the tokens that have come it is the last: nothing is held back for long.
export class TokenRuns {
  constructor() {
    this._pending = [];
  }

  // The text in pieces { text, tokens }; tokens: those that made it, none where not known.
  read(text, entries) {
    this._pending.push(...entries);
    if (!text) return [];
    const from = lastIndexOf(this._pending, text);
    if (from < 0) {
      this.forget();
      return [{ text, tokens: [] }];
    }
    const end = from + encoder.encode(text).length;
    return this._cut(from, end);
  }

  // The tokens that have come belong to something else than text.
  forget() {
    this._pending = [];
  }

  _cut(from, end) {
    const pieces = [];
    let at = 0;
    let bytes = [];
    let tokens = [];
    while (this._pending.length && at < end) {
      const token = this._pending.shift();
      const next = at + token.bytes.length;
      if (next > from) {
        bytes.push(...token.bytes.slice(Math.max(0, from - at), end - at));
        tokens.push(token);
        const whole = decode(bytes);
        if (whole !== null) {
          pieces.push({ text: whole, tokens });
          bytes = [];
          tokens = [];
        }
      }
      if (next > end) this._pending.unshift({ ...token, bytes: token.bytes.slice(end - at) });
      at = next;
    }
    return pieces;
  }
}

const encoder = new TextEncoder();

function decode(bytes) {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(bytes));
  } catch {
    return null; // ends inside a character
  }
}

function lastIndexOf(tokens, text) {
  const bytes = tokens.flatMap((token) => token.bytes);
  const wanted = encoder.encode(text);
  for (let at = bytes.length - wanted.length; at >= 0; at -= 1) {
    if (wanted.every((byte, index) => bytes[at + index] === byte)) return at;
  }
  return -1;
}

// A piece of text whose tokens are known, as an element.
const known = new WeakMap();
export function tokenSpan(piece) {
  const chance = Math.min(...piece.tokens.map((token) => Math.exp(token.logprob)));
  const rare = chance < 0.1 ? "rare" : chance < 0.5 ? "open" : "sure";
  const span = element("span", { class: `token ${rare}` }, piece.text);
  known.set(span, piece.tokens);
  return span;
}

// Shows what is known of the token that is pointed at, or stepped to by arrow keys where `container`
// (what has the focus is in `.tokens`) holds it, in the element `tip`.
export function explainTokens(container, tip) {
  let current = null;
  const show = (span) => {
    current?.classList.remove("current");
    current = span;
    tip.hidden = span === null;
    if (span === null) return;
    span.classList.add("current");
    tip.replaceChildren(...known.get(span).map(explained));
    place(tip, span);
  };
  container.addEventListener("pointerover", (event) => {
    show(known.has(event.target) ? event.target : null);
  });
  container.addEventListener("pointerleave", () => show(null));
  container.addEventListener("focusout", () => show(null));
  container.addEventListener("keydown", (event) => {
    const spans = [...(event.target.querySelectorAll?.(":scope > .token") ?? [])];
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape" && current) show(null);
    else if (step && spans.length && event.target.classList.contains("tokens")) {
      const at = spans.indexOf(current) + step;
      show(spans[Math.min(Math.max(at, 0), spans.length - 1)]);
      event.preventDefault();
    }
  });
}

function explained(token) {
  const rows = token.top_logprobs.length ? token.top_logprobs : [token];
  const table = element("table");
  for (const row of rows) {
    const chosen = String(row.bytes) === String(token.bytes);
    const line = table.insertRow();
    line.className = chosen ? "chosen" : "";
    line.insertCell().textContent = JSON.stringify(row.token);
    line.insertCell().textContent = percent(row.logprob);
  }
  if (!rows.some((row) => String(row.bytes) === String(token.bytes))) {
    const line = table.insertRow();
    line.className = "chosen";
    line.insertCell().textContent = JSON.stringify(token.token);
    line.insertCell().textContent = percent(token.logprob);
  }
  return table;
}

function percent(logprob) {
  const value = 100 * Math.exp(logprob);
  return `${value >= 10 ? value.toFixed(0) : value >= 0.1 ? value.toFixed(1) : "<0.1"} %`;
}

function place(tip, span) {
  const box = span.getClientRects()[0];
  if (!box) return;
  const left = Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
  const below = box.bottom + tip.offsetHeight + 8 < innerHeight;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${below ? box.bottom + 4 : box.top - tip.offsetHeight - 4}px`;
}
