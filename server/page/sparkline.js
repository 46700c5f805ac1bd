// Sparkline: the last figures of something, as a line, with the newest one in words.

import { element, shape } from "/page/dom.js";

const KEPT = 240;
const HEIGHT = 36;

export class Sparkline {
  // words(value): the newest figure as text. The line leaves out what is null.
  constructor(place, label, words) {
    this._values = [];
    this._words = words;
    this._line = shape("polyline");
    this._svg = shape("svg", {
      viewBox: `0 0 ${KEPT} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true",
    }, this._line);
    this._figure = element("strong");
    place.replaceChildren(element("span", {}, label), this._figure, this._svg);
  }

  add(value) {
    this._values.push(value ?? null);
    if (this._values.length > KEPT) this._values.shift();
    const known = this._values.filter((one) => one !== null);
    const top = Math.max(...known, 1e-9);
    const points = [];
    this._values.forEach((one, index) => {
      if (one === null) return;
      const x = KEPT - this._values.length + index + 0.5;
      points.push(`${x},${(HEIGHT - 2 - (HEIGHT - 4) * (one / top)).toFixed(1)}`);
    });
    this._line.setAttribute("points", points.join(" "));
    this._figure.textContent = known.length ? this._words(known.at(-1), top) : "–";
  }
}
