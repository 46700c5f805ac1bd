// Why one request waited, in each run: seconds by reason, and its life as a bar.

import { reason as words } from "/page/reasons.js";
import { duration, element, number, shape } from "/page/dom.js";

const WIDTH = 640;
const HEIGHT = 34;

export function requestView(runs, id) {
  const view = element("section", { class: "request", "aria-label": `Request ${id}` });
  view.append(element("h3", {}, `Request ${id}`));
  for (const run of runs) {
    const request = run.byId.get(id);
    view.append(element("h4", {}, element("span", { class: `swatch run-${run.index}` }), run.name));
    if (request) view.append(...oneRun(run, request));
    else view.append(element("p", {}, `Refused: ${run.refused[id] ?? "it is not in this run"}`));
  }
  return view;
}

function oneRun(run, request) {
  const waits = Object.entries(request.waited_s).sort((a, b) => b[1] - a[1]);
  const parts = [element("p", {}, life(run, request)), lifeChart(run, request)];
  if (!waits.length) return [...parts, element("p", {}, "It never waited.")];
  const rows = waits.map(([reason, seconds]) =>
    element(
      "tr",
      {},
      element("th", { scope: "row" }, element("span", { class: `swatch reason-${reason}` }), reason),
      element("td", {}, duration(seconds)),
      element("td", { class: "words" }, words(reason)),
    ),
  );
  const caption = element("caption", {}, "What it waited for");
  return [...parts, element("table", { class: "waits" }, caption, element("tbody", {}, ...rows))];
}

function life(run, request) {
  const { steps } = run;
  const words = [
    `${number(request.input_tokens)} prompt tokens` +
      (request.cached_tokens ? `, ${number(request.cached_tokens)} of them cached` : ""),
    `came at ${duration(request.arrival_s)}`,
  ];
  if (request.prefills.length) {
    const waited = steps.start_s[request.prefills[0][0]] - request.arrival_s;
    const parts = request.prefills.length;
    words.push(`computed after ${duration(waited)}${parts > 1 ? `, in ${parts} parts` : ""}`);
  }
  if (request.ttft_s !== null) words.push(`first token after ${duration(request.ttft_s)}`);
  if (request.gap_end_s !== null) {
    words.push(`largest gap ${duration(request.longest_gap_s)}, until ${duration(request.gap_end_s)}`);
  }
  if (request.retractions) words.push(`taken back ${request.retractions} times`);
  words.push(`${number(request.tokens)} tokens`, `ended by ${request.finish ?? "nothing"}`);
  return words.join(" · ");
}

// From its arrival to its last token: what held the queue while it waited, the parts of its prompt,
// its tokens, and the largest gap between two of them.
function lifeChart(run, request) {
  const { steps } = run;
  const from = request.arrival_s;
  const last = request.prefills.at(-1);
  const end = request.last_s ?? (last ? steps.start_s[last[0]] + steps.seconds[last[0]] : from);
  const x = (time) => (WIDTH * (time - from)) / Math.max(end - from, 1e-9);
  const bar = (start, stop, top, height, name) =>
    shape("rect", {
      x: x(start),
      y: top,
      width: Math.max(x(stop) - x(start), 0.5),
      height,
      class: name,
    });
  const chart = shape("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
    class: "chart life",
    role: "img",
    "aria-label": "Waiting, prompt and answer over time",
    preserveAspectRatio: "none",
  });
  const admitted = request.prefills.length ? steps.start_s[request.prefills[0][0]] : end;
  for (const [start, stop, reason] of queueReasons(run, from, admitted)) {
    chart.append(bar(start, stop, 2, 20, `reason-${reason || "next_pass"}`));
  }
  if (request.first_s !== null) chart.append(bar(request.first_s, end, 2, 20, "decode"));
  for (const [step] of request.prefills) {
    chart.append(bar(steps.start_s[step], steps.start_s[step] + steps.seconds[step], 2, 20, "prefill"));
  }
  if (request.gap_end_s !== null) {
    chart.append(bar(request.gap_end_s - request.longest_gap_s, request.gap_end_s, 25, 7, "gap"));
  }
  return chart;
}

// [start, end, reason] of what held the queue back in a time, by the steps planned in it.
function queueReasons(run, from, until) {
  const { steps, reasons } = run;
  const found = [];
  let at = firstAfter(steps.start_s, from);
  let start = from;
  let reason = reasons[steps.blocked[Math.max(at - 1, 0)]];
  for (; at < steps.start_s.length && steps.start_s[at] < until; at += 1) {
    const next = reasons[steps.blocked[at]];
    if (next === reason) continue;
    found.push([start, steps.start_s[at], reason]);
    start = steps.start_s[at];
    reason = next;
  }
  if (until > start) found.push([start, until, reason]);
  return found;
}

function firstAfter(times, time) {
  let low = 0;
  let high = times.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] <= time) low = middle + 1;
    else high = middle;
  }
  return low;
}
