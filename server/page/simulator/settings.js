// One setting: controls for the options that one wants to change most, and a line for all others.

import { element, number } from "/page/dom.js";

const CHUNKS = [32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384];
const UNCUT = 0;

// [option, its label, kind of control]
const CONTROLS = [
  ["chunked_prefill_size", "prompt tokens of a step", "chunk"],
  ["disable_mixed_chunk", "prompts and running requests share steps", "inverted"],
  ["schedule_policy", "order of the queue", "choice"],
  ["prefill_share", "share of a step for short prompts beside a long one", "share"],
  ["tpot_slo_ms", "a step takes at most, ms (0: whatever it takes)", "number"],
  ["capacity_tokens", "tokens of the KV pool", "number"],
  ["max_running_requests", "requests that run at once", "number"],
];

export class Setting {
  // described: Session.describe's options by name; base: the values of the load.
  constructor(name, described, base, onChange) {
    this.name = name;
    this._base = base;
    this._described = described;
    this._read = new Map(); // option to a function that gives its value as text
    const fields = CONTROLS.map(([option, label, kind]) => this._control(option, label, kind));
    this.element = element(
      "fieldset",
      { class: "fields setting", change: onChange },
      element("legend", {}, name),
      ...fields,
      this._others(),
    );
  }

  // What differs from the load's own options, as texts.
  get options() {
    const changed = {};
    for (const [option, read] of this._read) {
      const value = read();
      if (value !== String(this._base[option])) changed[option] = value;
    }
    for (const pair of this._more.value.trim().split(/\s+/).filter(Boolean)) {
      const at = pair.indexOf("=");
      changed[at < 0 ? pair : pair.slice(0, at).replaceAll("-", "_")] = at < 0 ? "" : pair.slice(at + 1);
    }
    return changed;
  }

  // Its name and what it changes, to stand over a run.
  get title() {
    const parts = Object.entries(this.options).map(([option, value]) => `${option}=${value}`);
    return `${this.name}: ${parts.join(" ") || "as it is"}`;
  }

  _control(option, label, kind) {
    const { help, at_least: min, at_most: max, choices } = this._described.get(option);
    const value = this._base[option];
    if (kind === "chunk") return this._chunk(option, label, value, help);
    if (kind === "share") return this._share(option, label, value, help);
    let input;
    if (kind === "inverted") {
      input = element("input", { type: "checkbox", checked: !value });
      this._read.set(option, () => String(!input.checked));
      return element("label", { class: "switch", title: help }, input, ` ${label}`);
    }
    if (kind === "choice") {
      input = element("select", {});
      for (const one of choices) input.append(element("option", { selected: one === value }, one));
    } else {
      input = element("input", { type: "number", min, max, step: "any", value });
    }
    // An emptied field is the load's own value.
    this._read.set(option, () => (input.value || String(value)));
    return element("label", { title: help }, `${label} `, input);
  }

  // A slider over sizes, the last of which is a whole prompt at once.
  _chunk(option, label, value, help) {
    const sizes = [...new Set([...CHUNKS, ...(value > 0 ? [value] : [])])].sort((a, b) => a - b);
    sizes.push(UNCUT);
    const words = (at) => (sizes[at] === UNCUT ? "whole prompts" : number(sizes[at]));
    const first = value > 0 ? sizes.indexOf(value) : sizes.length - 1;
    const { field, input } = slider(label, help, sizes.length - 1, first, words);
    this._read.set(option, () => {
      const size = sizes[input.value];
      return size === UNCUT && value <= 0 ? String(value) : String(size);
    });
    return field;
  }

  _share(option, label, value, help) {
    const { field, input } = slider(label, help, 18, Math.round(20 * value), (at) => `${5 * at} %`);
    const first = input.value;
    this._read.set(option, () => (input.value === first ? String(value) : String(input.value / 20)));
    return field;
  }

  _others() {
    const known = [...this._described.keys()].filter((name) => !this._read.has(name));
    this._more = element("input", {
      type: "text",
      spellcheck: "false",
      autocomplete: "off",
      placeholder: "max_prefill_tokens=4096 …",
      title: `of ${known.join(", ")}`,
    });
    return element("label", { class: "wide" }, "other options, as name=value ", this._more);
  }
}

function slider(label, help, max, value, words) {
  const input = element("input", { type: "range", min: 0, max, step: 1, value });
  const told = element("output", {}, words(value));
  input.setAttribute("aria-valuetext", words(value));
  input.addEventListener("input", () => {
    told.textContent = words(input.value);
    input.setAttribute("aria-valuetext", words(input.value));
  });
  const field = element("label", { title: help }, `${label} `, told, input);
  return { field, input };
}
