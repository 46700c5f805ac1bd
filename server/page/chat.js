// The chat: a conversation held in this tab, streamed from /v1/chat/completions.

import { Answer, spoken } from "/page/answer.js";
import { ServerError, ask, events } from "/page/api.js";
import { byId } from "/page/dom.js";
import { explainTokens } from "/page/tokens.js";

const MOST_TOP = 5; // alternatives shown for a token

export class Chat {
  constructor() {
    this._messages = [];
    this._elements = []; // of the messages, one each
    this._running = null; // AbortController of the answer that comes
    this._top = MOST_TOP;
    this._log = byId("log");
    this._field = byId("message");
    this._send = byId("send");
    explainTokens(this._log, byId("token-tip"));
    byId("composer").onsubmit = (event) => {
      event.preventDefault();
      if (this._running) this._running.abort();
      else this._submit();
    };
    this._field.onkeydown = (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        if (!this._running) this._submit();
      }
    };
    addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !event.defaultPrevented) this._running?.abort();
    });
    byId("clear").onclick = () => {
      this._running?.abort();
      this._cut(0);
      this._field.focus();
    };
    byId("again").onclick = () => this._again();
  }

  // Placeholders tell what an empty field means: the server's own defaults.
  heed({ sampling_defaults: defaults, options }) {
    this._top = Math.min(MOST_TOP, options.max_logprobs ?? MOST_TOP);
    for (const field of document.querySelectorAll("#settings [data-default]")) {
      const value = defaults[field.dataset.default];
      if (value !== null && value !== undefined) field.placeholder = String(value);
    }
  }

  _submit() {
    const text = this._field.value;
    if (!text.trim()) return;
    this._field.value = "";
    this._say(text);
  }

  _say(text) {
    const message = { role: "user", content: text };
    const place = this._messages.length;
    this._add(message, spoken(message, (edited) => this._edit(place, edited)));
    this._answer();
  }

  _edit(place, text) {
    this._running?.abort();
    this._cut(place);
    this._say(text);
  }

  // The last answer once more.
  _again() {
    if (this._running) return;
    const last = this._messages.findLastIndex((message) => message.role !== "assistant");
    if (last < 0) return;
    this._cut(last + 1);
    this._answer();
  }

  _result(call, text) {
    const message = { role: "tool", tool_call_id: call.id, content: text };
    this._add(message, spoken(message));
    const answered = new Set(this._messages.map((one) => one.tool_call_id));
    const calls = this._messages.findLast((one) => one.tool_calls)?.tool_calls ?? [];
    if (calls.every((one) => answered.has(one.id))) this._answer();
  }

  _add(message, element) {
    this._messages.push(message);
    this._elements.push(element);
    this._log.append(element);
    element.scrollIntoView({ block: "end" });
  }

  _cut(place) {
    this._messages.length = Math.min(place, this._messages.length);
    for (const element of this._elements.splice(place)) element.remove();
  }

  async _answer() {
    const running = new AbortController();
    this._setRunning(running);
    let answer;
    try {
      const body = this._body();
      answer = new Answer((call, text) => this._result(call, text));
      this._add(answer.message, answer.element);
      await this._stream(answer, body, running.signal);
    } catch (error) {
      if (!answer) {
        answer = new Answer(() => {});
        this._add(answer.message, answer.element);
      }
      if (error.name !== "AbortError") answer.fail(error.message);
      if (!(error instanceof ServerError) && error.name !== "AbortError") console.error(error);
    }
    answer.end(running.signal.aborted);
    if (!answer.message.content && !answer.message.tool_calls) {
      answer.message.failed = true; // shown, but never sent
    }
    if (this._running === running) this._setRunning(null);
  }

  async _stream(answer, body, signal) {
    const response = await ask("/v1/chat/completions", { body, signal });
    for await (const event of events(response)) {
      if (event.error) throw new ServerError(event.error.message);
      const follow = this._log.scrollHeight - this._log.scrollTop - this._log.clientHeight < 40;
      answer.read(event);
      if (follow) this._log.scrollTop = this._log.scrollHeight;
    }
    if (!answer.finish) throw new ServerError("The answer broke off: the connection was lost.");
  }

  _setRunning(running) {
    this._running = running;
    this._send.textContent = running ? "Stop" : "Send";
    this._log.setAttribute("aria-busy", String(Boolean(running)));
  }

  _body() {
    const messages = this._messages.filter((message) => !message.failed);
    const system = byId("system").value.trim();
    if (system) messages.unshift({ role: "system", content: system });
    const more = { include_usage: true, include_timings: true };
    const body = { messages, stream: true, stream_options: more };
    for (const field of document.querySelectorAll("#settings [data-field]")) {
      if (field.value.trim()) body[field.dataset.field] = Number(field.value);
    }
    if (byId("probabilities").checked) Object.assign(body, { logprobs: true, top_logprobs: this._top });
    const tools = byId("tools").value.trim();
    if (tools) body.tools = parsedTools(tools);
    return body;
  }
}

function parsedTools(text) {
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new ServerError(`The tools are no JSON: ${error.message}`);
  }
  const list = Array.isArray(tools) ? tools : [tools];
  return list.map((one) => (one.type === "function" ? one : { type: "function", function: one }));
}
