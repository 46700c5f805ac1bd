// Elements, without markup: what a model or a client wrote is always the text of a node.

export function byId(id) {
  return document.getElementById(id);
}

// make("button", { className, type, onclick, ... }, ...children); strings become text nodes.
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export function button(label, onclick, more = {}) {
  return make("button", { type: "button", onclick, ...more }, label);
}

// A number as people read it; "" for what is not known.
export function figure(value, digits = 0) {
  if (value === null || value === undefined) return "";
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

// Seconds as people read them: 34 ms, 1.2 s, 3 min.
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds >= 120) return `${figure(seconds / 60)} min`;
  if (seconds >= 1) return `${figure(seconds, seconds < 10 ? 1 : 0)} s`;
  return `${figure(1000 * seconds, seconds < 0.01 ? 1 : 0)} ms`;
}
