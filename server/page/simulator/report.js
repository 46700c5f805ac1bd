// Everything about one run or several, drawn into an element: figures, steps, gaps, requests. It
// needs no server and no Python: `scripts/simulate.py --html` writes it into a file of its own.
//
//     const report = new Report(element);
//     report.show(runs);            // records of runtime/simulation/run_report.py
//
// Each redraw is a performance measure named "redraw".

import { Timeline, fittingScales } from "/page/timeline.js";
import { gapChart, legend } from "/page/simulator/distribution.js";
import { element } from "/page/dom.js";
import { levelsChart, levelsLegend } from "/page/simulator/levels.js";
import { RequestsTable } from "/page/simulator/requests.js";
import { summaryTable } from "/page/simulator/summary.js";
import { requestView } from "/page/simulator/waits.js";

export class Report {
  constructor(root) {
    this._figures = element("div", { class: "scrolled" });
    this._steps = element("div");
    this._gaps = element("div");
    this._requests = new RequestsTable((id) => this._choose(id));
    this._request = element("div", { "aria-live": "polite" });
    this._timelines = [];
    this._runs = [];
    root.replaceChildren(
      element(
        "div",
        { class: "overview" },
        section("Figures", this._figures),
        section("Gaps between tokens", this._gaps),
      ),
      section("Steps", this._steps),
      section(
        "Requests",
        element("div", { class: "chosen" }, this._requests.element, this._request),
      ),
    );
  }

  show(runs) {
    performance.mark("redraw");
    this._runs = runs.map((run, index) => ({
      ...run,
      index,
      byId: new Map(run.requests.map((request) => [request.id, request])),
    }));
    this._figures.replaceChildren(summaryTable(this._runs), ...this._runs.flatMap(refusals));
    this._gaps.replaceChildren(legend(this._runs), gapChart(this._runs));
    this._drawSteps();
    this._requests.show(this._runs);
    this._drawRequest();
    requestAnimationFrame(() => setTimeout(() => performance.measure("redraw", "redraw")));
  }

  _drawSteps() {
    for (const timeline of this._timelines) timeline.close();
    const steps = this._runs.map(timelineSteps);
    const scales = fittingScales(steps.flat());
    this._steps.replaceChildren();
    this._timelines = this._runs.map((run, at) => {
      const band = element("div");
      const words = levelsLegend(run).map(([name, text]) =>
        element("li", {}, element("span", { class: `swatch ${name}` }), text),
      );
      this._steps.append(
        element("h3", {}, element("span", { class: `swatch run-${run.index}` }), run.name),
        band,
        levelsChart(run),
        element("ul", { class: "legend" }, ...words),
      );
      const timeline = new Timeline(band, { label: `Steps of ${run.name}` });
      timeline.show(steps[at], { scales });
      return timeline;
    });
    this._scales = scales;
  }

  _choose(id) {
    this._runs.forEach((run, at) => {
      const request = run.byId.get(id);
      const until = request?.last_s ?? Infinity;
      const { start_s: starts } = run.steps;
      const lived = (step) => starts[step.step] >= request.arrival_s && starts[step.step] <= until;
      const timeline = this._timelines[at];
      timeline.show(timeline.steps, { scales: this._scales, marked: request ? lived : null });
    });
    this._drawRequest();
    this._request.scrollIntoView({ block: "nearest" });
  }

  _drawRequest() {
    const { chosen } = this._requests;
    const known = this._runs.some((run) => run.byId.has(chosen) || chosen in run.refused);
    this._request.replaceChildren(known ? requestView(this._runs, chosen) : "");
  }
}

// Why requests of a run were refused; of many the first says it for all.
function refusals(run) {
  const [first, ...others] = Object.entries(run.refused);
  if (!first) return [];
  const more = others.length ? `, and ${others.length} more` : "";
  return [element("p", { class: "error" }, `${run.name} refused ${first[0]}${more}: ${first[1]}`)];
}

function section(title, ...children) {
  return element("section", { "aria-label": title }, element("h2", {}, title), ...children);
}

// The steps of a run as the timeline wants them. A gap is time in which streams waited and nothing
// was computed; without streams there is nobody to notice.
function timelineSteps(run) {
  const { steps, reasons } = run;
  let end = 0;
  return steps.start_s.map((start, at) => {
    const idle = steps.decode_rows[at] ? Math.max(0, start - end) : 0;
    end = start + steps.seconds[at];
    const waiting = steps.waiting[at];
    const reason = reasons[steps.blocked[at]];
    return {
      step: at,
      prefill_tokens: steps.prefill_tokens[at],
      prefill_rows: steps.prefill_rows[at],
      decode_rows: steps.decode_rows[at],
      step_ms: 1e3 * steps.seconds[at],
      gap_ms: 1e3 * idle,
      note: waiting ? `${waiting} waiting${reason && ` for ${reason}`}` : "",
    };
  });
}
