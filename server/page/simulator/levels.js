// Queue and pool over the steps of a run: the pool's private and cached tokens as areas, waiting
// requests as a line.

import { number, shape } from "/page/dom.js";

const WIDTH = 640;
const HEIGHT = 96;
const COLUMNS = 640;

export function levelsChart(run) {
  const { steps, capacity_tokens: capacity } = run;
  const columns = columnsOf(steps);
  const mostWaiting = Math.max(1, ...columns.map((column) => column.waiting));
  const mostUsed = Math.max(0, ...columns.map((column) => column.private)) / capacity;
  const x = (at) => (at * WIDTH) / Math.max(columns.length - 1, 1);
  const y = (part) => HEIGHT - part * (HEIGHT - 2);
  const area = (top) =>
    `M0,${HEIGHT} ` + columns.map((c, at) => `L${x(at)},${y(top(c))}`).join(" ") + ` L${WIDTH},${HEIGHT} Z`;
  const told =
    `Pool of ${number(capacity)} tokens, at most ${number(100 * mostUsed)} % held by requests; ` +
    `at most ${mostWaiting} waiting.`;
  return shape(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "chart levels", role: "img", "aria-label": told,
      preserveAspectRatio: "none" },
    shape("path", { d: area((c) => (c.private + c.cached) / capacity), class: "cached" }),
    shape("path", { d: area((c) => c.private / capacity), class: "private" }),
    shape("polyline", {
      points: columns.map((c, at) => `${x(at)},${y(c.waiting / mostWaiting)}`).join(" "),
      class: "waiting",
    }),
    shape("title", {}, told),
  );
}

// The words beside it: what is drawn, and the tops.
export function levelsLegend(run) {
  const waiting = run.steps.waiting.reduce((most, one) => Math.max(most, one), 0);
  return [
    ["private", `held by requests alone (pool: ${number(run.capacity_tokens)} tokens)`],
    ["cached", "in the prefix cache"],
    ["waiting", `waiting requests (at most ${number(waiting)})`],
  ];
}

// At most COLUMNS of them; each has the largest figures of its steps.
function columnsOf(steps) {
  const count = steps.kind.length;
  const each = Math.max(1, Math.ceil(count / COLUMNS));
  const columns = [];
  for (let first = 0; first < count; first += each) {
    const column = { private: 0, cached: 0, waiting: 0 };
    for (let at = first; at < Math.min(first + each, count); at += 1) {
      column.private = Math.max(column.private, steps.private_tokens[at]);
      column.cached = Math.max(column.cached, steps.cached_tokens[at]);
      column.waiting = Math.max(column.waiting, steps.waiting[at]);
    }
    columns.push(column);
  }
  return columns;
}
