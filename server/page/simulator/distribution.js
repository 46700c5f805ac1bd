// How the gaps between tokens are distributed: one line per run, stretched towards the tail, where
// readers of a stream notice.

import { duration, element, shape } from "/page/dom.js";

const WIDTH = 640;
const HEIGHT = 220;
const LEFT = 62;
const BOTTOM = 24;
const TOP = 8;
const TAIL = 4.3; // powers of ten
const MARKS = [0.5, 0.9, 0.99, 0.999];

export function gapChart(runs) {
  const told = runs.filter((run) => run.gaps.count);
  const chart = shape("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
    class: "chart",
    role: "img",
    "aria-label": told.map(words).join(" ") || "No gaps.",
  });
  if (!told.length) return chart;
  const all = told.flatMap((run) => run.gaps.seconds).filter((seconds) => seconds > 0);
  const low = Math.log10(Math.min(...all)) - 0.05;
  const high = Math.log10(Math.max(...all)) + 0.05;
  const y = (seconds) => {
    const part = (Math.log10(Math.max(seconds, 10 ** low)) - low) / (high - low);
    return HEIGHT - BOTTOM - part * (HEIGHT - BOTTOM - TOP);
  };
  drawAxes(chart, low, high, y);
  told.forEach((run) => {
    const points = run.gaps.shares.map((part, at) => `${x(part)},${y(run.gaps.seconds[at])}`);
    const line = shape("polyline", { points: points.join(" "), class: `line run-${run.index}` });
    chart.append(line);
  });
  return chart;
}

// Every factor of ten by which fewer gaps are longer takes the same room: 90, 99, 99.9 of 100.
function x(part) {
  const nines = Math.min(-Math.log10(Math.max(1 - part, 5e-5)), TAIL);
  return LEFT + (nines / TAIL) * (WIDTH - LEFT - 8);
}

function drawAxes(chart, low, high, y) {
  for (let power = Math.floor(low); power <= high; power += 1) {
    for (const digit of [1, 2, 5]) {
      const seconds = digit * 10 ** power;
      if (Math.log10(seconds) < low || Math.log10(seconds) > high) continue;
      chart.append(
        shape("line", { x1: LEFT, x2: WIDTH, y1: y(seconds), y2: y(seconds), class: "grid" }),
        shape("text", { x: LEFT - 6, y: y(seconds) + 4, "text-anchor": "end" }, duration(seconds)),
      );
    }
  }
  for (const part of MARKS) {
    chart.append(
      shape("line", { x1: x(part), x2: x(part), y1: TOP, y2: HEIGHT - BOTTOM, class: "grid" }),
      shape("text", { x: x(part), y: HEIGHT - 6, "text-anchor": "middle" }, `${100 * part} %`),
    );
  }
  chart.append(shape("text", { x: WIDTH, y: HEIGHT - 6, "text-anchor": "end" }, "all"));
}

function words(run) {
  const at = (part) => duration(run.gaps.seconds[run.gaps.shares.indexOf(part)]);
  return `${run.name}: half of the gaps up to ${at(0.5)}, 99 of 100 up to ${at(0.99)}, all up to ${at(1)}.`;
}

// What the lines are, in words: a mark of each run's colour and its name.
export function legend(runs) {
  const items = runs.map((run) =>
    element("li", {}, element("span", { class: `swatch run-${run.index}` }), run.name),
  );
  return element("ul", { class: "legend" }, ...items);
}
