// Elements without markup, and figures as people read them. What a model or a client wrote is always
// the text of a node.

const SVG = "http://www.w3.org/2000/svg";

export function byId(id) {
  return document.getElementById(id);
}

// element("td", { class: "figure" }, "text", child, …); attributes that are functions listen to the
// event of their name.
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

// The same of an SVG element.
export function shape(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

export function button(label, click, attributes = {}) {
  return element("button", { type: "button", click, ...attributes }, label);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) {
      node.setAttribute(name, value);
    }
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

// 12,345.6; "" for what is not known.
export function number(value, digits = 0) {
  if (value === null || value === undefined) return "";
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

// Seconds: 12.3 ms, 1.46 s, 95 s; "–" for what is not known.
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const ms = 1e3 * Math.abs(seconds);
  if (ms < 999.5) return `${number(1e3 * seconds, ms < 99.5 ? 1 : 0)} ms`;
  return `${number(seconds, Math.abs(seconds) < 9.995 ? 2 : 1)} s`;
}

// The change from one figure to another, as "+12 %"; "" where there is nothing to say.
export function change(from, to) {
  if (!from || to === null || to === undefined || from === to) return "";
  const share = (100 * (to - from)) / from;
  const digits = Math.abs(share) < 9.95 ? 1 : 0;
  const text = number(Math.abs(share), digits);
  return text === "0" ? "" : `${share < 0 ? "−" : "+"}${text} %`;
}
