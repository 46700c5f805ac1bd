// The live view: what /debug/live tells, drawn. Nothing is asked for while nobody can see it.

import { ask, events } from "/page/api.js";
import { byId, duration, element, number } from "/page/dom.js";
import { reason } from "/page/reasons.js";
import { Sparkline } from "/page/sparkline.js";
import { Table } from "/page/table.js";
import { Timeline } from "/page/timeline.js";

const STEPS_SHOWN = 400;
const AGAIN_MS = [500, 1000, 2000, 5000];

const POOL = [
  ["free", "free", "pages that nobody has"],
  ["cached", "cached", "prefixes in the radix tree, read or not"],
  ["private", "private", "of running requests, not shared"],
  ["reserved", "reserved", "the padding page, and pages that a step in flight still names"],
];
const COLUMNS = [
  { name: "request", cell: (one) => short(one.request_id), hint: (one) => one.request_id },
  { name: "state", cell: (one) => (one.position ? `queue ${one.position}` : one.state) },
  {
    name: "waits for",
    cell: (one) => one.blocked_by,
    hint: (one) => reason(one.blocked_by),
  },
  {
    name: "waited",
    numeric: true,
    cell: (one) => (one.waited_s >= 0.001 ? duration(one.waited_s) : ""),
    hint: (one) => (one.waited_for ? `most of it for ${reason(one.waited_for)}` : ""),
  },
  {
    name: "starts in",
    title: "Expected, if answers are as long as they were and the pace stays; under fcfs",
    numeric: true,
    cell: (one) => (one.expected_start_s == null ? "" : `~${duration(one.expected_start_s)}`),
  },
  { name: "prompt", title: "Prompt tokens", numeric: true, cell: (one) => number(one.input_tokens) },
  { name: "cached", title: "Of these, found in the cache", numeric: true,
    cell: (one) => (one.cached_tokens ? number(one.cached_tokens) : "") },
  { name: "output", title: "Output tokens so far, and at most", numeric: true,
    cell: (one) => `${number(one.output_tokens)} / ${number(one.max_new_tokens)}` },
  { name: "KV", title: "KV tokens that it holds", numeric: true,
    cell: (one) => (one.kv_tokens ? number(one.kv_tokens) : "") },
];

export class LiveView {
  constructor() {
    this._steps = [];
    this._reading = null;
    this._timeline = new Timeline(byId("timeline"), { label: "The last steps of the server" });
    this._timeline.show([]);
    this._requests = new Table(byId("requests"), COLUMNS, (one) => one.request_id);
    const latency = (value, top) => `${duration(value / 1000)} (top ${duration(top / 1000)})`;
    this._ttft = new Sparkline(byId("ttft"), "Time to first token", latency);
    this._itl = new Sparkline(byId("itl"), "Between two tokens", latency);
    this._rate = new Sparkline(byId("rate"), "Output tokens a second", (value, top) =>
      `${number(value)} (top ${number(top)})`);
    this._segments = POOL.map(([name, , title]) => element("div", { class: `pool-${name}`, title }));
    byId("pool").replaceChildren(...this._segments);
    document.addEventListener("visibilitychange", () => this.look());
  }

  // Reads while the view can be seen, and only then.
  look() {
    const seen = document.visibilityState === "visible" && byId("live").offsetParent !== null;
    if (seen && !this._reading) this._read();
    else if (!seen && this._reading) this._reading.abort();
  }

  async _read() {
    const reading = new AbortController();
    this._reading = reading;
    for (let tries = 0; !reading.signal.aborted; tries += 1) {
      try {
        const response = await ask("/debug/live", { signal: reading.signal });
        for await (const sample of events(response)) {
          tries = 0;
          this._show(sample);
        }
        this._status("The server has ended the view.", true);
      } catch (error) {
        if (reading.signal.aborted) break;
        this._status(error.message, true);
        if (error.status === 401) break; // the reader has no key
      }
      await pause(AGAIN_MS[Math.min(tries, AGAIN_MS.length - 1)], reading.signal);
    }
    this._reading = null;
  }

  _show(sample) {
    this._addSteps(sample);
    this._timeline.show(this._steps);
    this._requests.show(sample.requests);
    byId("requests-none").hidden = sample.requests.length > 0;
    this._showQueue(sample);
    this._showPool(sample.pool);
    this._showRuns(sample);
    this._ttft.add(sample.ttft.mean_ms);
    this._itl.add(sample.itl.mean_ms);
    this._rate.add(sample.rates.output_tokens_s);
  }

  // A sample may repeat steps that an earlier one has shown; a server that started anew counts anew.
  _addSteps(sample) {
    const last = this._steps.at(-1)?.step ?? -1;
    if (sample.steps_total <= last) this._steps = [];
    const news = sample.steps.filter((one) => one.step > last || !this._steps.length);
    this._steps = [...this._steps, ...news].slice(-STEPS_SHOWN);
  }

  _showQueue({ queue, rates, requests }) {
    const waiting = queue.waiting + queue.waiting_grammar;
    const parts = [`${queue.running + queue.prefilling} of ${queue.rows} running`];
    parts.push(waiting ? `${waiting} waiting` : "nobody waits");
    if (queue.blocked_by) parts.push(`for ${reason(queue.blocked_by)}`);
    if (queue.retractions) parts.push(`${number(queue.retractions)} retracted so far`);
    const left = waiting + queue.running + queue.prefilling - requests.length;
    if (left > 0) parts.push(`${left} not listed`);
    this._status(parts.join(" · "));
    const hits = rates.hit_rate;
    byId("hit-rate").textContent =
      hits === null ? "" : `${number(100 * hits)} % of prompt tokens were found in the cache.`;
  }

  _showPool(pool) {
    const shares = POOL.map(([name]) => pool[name] / Math.max(1, pool.capacity));
    shares.forEach((share, index) => (this._segments[index].style.flexGrow = share));
    byId("pool-figures").replaceChildren(
      ...POOL.map(([name, label, title], index) =>
        element("li", { title, class: `pool-${name}` },
          `${label} ${number(pool[name])} (${number(100 * shares[index])} %)`),
      ),
    );
  }

  _showRuns({ runs, all_runs: all }) {
    const longest = Math.max(1, ...runs.map((run) => run.end));
    byId("runs").replaceChildren(...runs.map((run) => {
      const before = element("div", { class: "before" });
      const own = element("div", { class: run.holders ? "own held" : "own" });
      const after = element("div");
      before.style.flexGrow = run.start / longest;
      own.style.flexGrow = (run.end - run.start) / longest;
      after.style.flexGrow = 1 - run.end / longest;
      const uses = run.uses === 1 ? "used once" : `used ${number(run.uses)} times`;
      const text = `${number(run.end - run.start)} tokens` +
        (run.start ? ` after ${number(run.start)}` : "") +
        ` · ${uses}` + (run.holders ? ` · held by ${run.holders}` : "") +
        (run.branches > 1 ? ` · ${run.branches} branches` : "");
      return element("li", {}, element("div", { class: "run" }, before, own, after), text);
    }));
    byId("runs-note").textContent = runs.length
      ? all ? "" : "The tree is larger than what was looked through."
      : "Nothing is cached.";
  }

  _status(text, trouble = false) {
    const status = byId("queue");
    status.textContent = text;
    status.classList.toggle("error", trouble);
  }
}

function short(id) {
  return id.length > 16 ? `${id.slice(0, 8)}…${id.slice(-4)}` : id;
}

function pause(milliseconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      resolve();
    });
  });
}
