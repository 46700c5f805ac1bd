// One answer of the model as it comes: reasoning folded, tool calls, text with its tokens, figures.

import { button, duration, element, number } from "/page/dom.js";
import { TokenRuns, tokenSpan } from "/page/tokens.js";

export class Answer {
  // onResult(call, text): the reader gives the result of a tool call.
  constructor(onResult) {
    this.message = { role: "assistant", content: "" };
    this.element = element("div", { class: "answer" });
    this._onResult = onResult;
    this._runs = new TokenRuns();
    this._text = element("div", { class: "text" });
    this._notes = element("p", { class: "notes" });
    this._begin = performance.now();
    this._first = null;
    this.element.append(this._text, this._notes);
  }

  // Takes an event of the stream.
  read(event) {
    if (event.usage) this._usage = event.usage;
    if (event.timings) this._timings = event.timings;
    const choice = event.choices?.[0];
    if (!choice) return;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
    if (content || reasoning || calls) this._first ??= performance.now();
    if (reasoning) this._reason(reasoning);
    for (const call of calls ?? []) this._call(call);
    const entries = choice.logprobs?.content ?? [];
    for (const piece of this._runs.read(content ?? "", entries)) this._append(piece);
    if (reasoning) this._runs.forget();
    if (choice.finish_reason) this.finish = choice.finish_reason;
  }

  // Shows what an error says, as the server says it.
  fail(text) {
    this.failed = true;
    this.element.append(element("p", { class: "error", role: "alert" }, text));
  }

  // The answer is over, in whatever way.
  end(stopped) {
    for (const box of this.element.querySelectorAll(".call")) box.querySelector("form").hidden = false;
    const notes = [];
    if (stopped) notes.push("stopped");
    else if (this.finish && this.finish !== "stop") notes.push(`ended by ${this.finish}`);
    const usage = this._usage;
    if (usage) {
      const cached = usage.prompt_tokens_details?.cached_tokens;
      notes.push(`${number(usage.prompt_tokens)} prompt tokens${cached ? ` (${number(cached)} cached)` : ""}`);
      notes.push(`${number(usage.completion_tokens)} tokens`);
    }
    const { queued_s: queued, waited_s: waited = {} } = this._timings ?? {};
    if (queued >= 0.001) {
      notes.push(`queued ${duration(queued)} for ${Object.keys(waited).join(", ")}`);
    }
    if (this._first !== null) {
      notes.push(`first after ${duration((this._first - this._begin) / 1000)}`);
      const seconds = (performance.now() - this._first) / 1000;
      if (usage?.completion_tokens > 1 && seconds > 0) {
        notes.push(`${number((usage.completion_tokens - 1) / seconds, 1)} a second`);
      }
    }
    this._notes.textContent = notes.join(" · ");
  }

  _append(piece) {
    this.message.content += piece.text;
    if (!piece.tokens.length) {
      this._text.append(piece.text);
      return;
    }
    if (!this._text.classList.contains("tokens")) {
      this._text.classList.add("tokens");
      this._text.tabIndex = 0;
      this._text.title = "Left and right arrow: probabilities of the tokens";
    }
    this._text.append(tokenSpan(piece));
  }

  _reason(text) {
    this.message.reasoning_content = (this.message.reasoning_content ?? "") + text;
    if (!this._reasoning) {
      this._reasoning = element("div", { class: "text" });
      this.element.prepend(
        element("details", { class: "reasoning" }, element("summary", {}, "Reasoning"), this._reasoning),
      );
    }
    this._reasoning.append(text);
  }

  _call(delta) {
    this.message.tool_calls ??= [];
    const calls = this.message.tool_calls;
    calls[delta.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } };
    const call = calls[delta.index];
    if (delta.id) call.id = delta.id;
    call.function.name += delta.function?.name ?? "";
    call.function.arguments += delta.function?.arguments ?? "";
    this._boxes ??= [];
    this._boxes[delta.index] ??= this._box(call);
    this._boxes[delta.index](call);
  }

  // An element for a call; returns what shows its present state.
  _box(call) {
    const name = element("code");
    const given = element("pre");
    const result = element("input", { type: "text", placeholder: "its result", "aria-label": "Result" });
    const form = element("form", { hidden: true }, result, element("button", {}, "Send result"));
    form.onsubmit = (event) => {
      event.preventDefault();
      form.hidden = true;
      this._onResult(call, result.value);
    };
    this.element.insertBefore(
      element("div", { class: "call" }, "Calls ", name, given, form),
      this._notes,
    );
    return (now) => {
      name.textContent = now.function.name;
      given.textContent = pretty(now.function.arguments);
    };
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // still coming
  }
}

// A message of the user (or the result of a tool), which can be edited.
export function spoken(message, onEdit) {
  const text = element("div", { class: "text" }, message.content);
  const box = element("div", { class: `spoken ${message.role}` }, text);
  if (message.role === "tool") {
    text.prepend("Result: ");
    return box;
  }
  const edit = button("Edit", () => {
    const field = element("textarea", { rows: 3, "aria-label": "Edited message" }, message.content);
    const back = () => box.replaceChildren(text, edit);
    const send = button("Send again", () => onEdit(field.value));
    field.onkeydown = (event) => {
      if (event.key === "Escape") back();
    };
    box.replaceChildren(field, send, button("Cancel", back));
    field.focus();
  }, { class: "quiet" });
  box.append(edit);
  return box;
}
