// The figures of runs in a table: a column per run, each with its change from the first.

import { change, duration, element, number } from "/page/dom.js";

const share = (value) => (value === null ? "–" : `${number(100 * value, 1)} %`);
const count = (value) => number(value);

// [name, figure of a summary, how it is written, whether less (-1), more (1) or neither is better]
const ROWS = [
  ["Largest gap between tokens", (s) => s.itl.max, duration, -1],
  ["Gap, 99 of 100", (s) => s.itl.p99, duration, -1],
  ["Gap, median", (s) => s.itl.p50, duration, -1],
  ["First token, median", (s) => s.ttft.p50, duration, -1],
  ["First token, 99 of 100", (s) => s.ttft.p99, duration, -1],
  ["First token, slowest", (s) => s.ttft.max, duration, -1],
  ["Time per token, median", (s) => s.tpot.p50, duration, -1],
  ["Time per token, 99 of 100", (s) => s.tpot.p99, duration, -1],
  ["Output tokens a second", (s) => s.output_tokens_per_s, count, 1],
  ["All tokens a second", (s) => s.total_tokens_per_s, count, 1],
  ["Time from first to last", (s) => s.elapsed_s, duration, -1],
  ["Device busy", (s) => s.device_share, share, 0],
  ["Prompt tokens from the cache", (s) => s.cached_share, share, 1],
  ["Requests", (s) => s.requests, count, 0],
  ["Refused", (s) => s.refused, count, -1],
  ["Ended without an answer", (s) => s.failed, count, -1],
  ["Retractions", (s) => s.retractions, count, -1],
  ["Preemptions", (s) => s.preemptions, count, -1],
];

export function summaryTable(runs) {
  const head = element("tr", {}, element("td"));
  for (const run of runs) head.append(element("th", { scope: "col" }, run.name));
  const body = element("tbody");
  for (const [name, figure, written, better] of ROWS) {
    const values = runs.map((run) => figure(run.summary));
    if (!better && values.every((value) => value === 0)) continue;
    const row = element("tr", {}, element("th", { scope: "row" }, name));
    values.forEach((value, at) => {
      const text = value === null ? "–" : written(value);
      const changed = at ? change(values[0], value) : "";
      const good = Math.sign(value - values[0]) === better;
      row.append(
        element(
          "td",
          {},
          text,
          changed && element("span", { class: better ? (good ? "better" : "worse") : "" }, ` ${changed}`),
        ),
      );
    });
    body.append(row);
  }
  return element("table", { class: "figures" }, element("thead", {}, head), body);
}
