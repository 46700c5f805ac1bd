// The requests of runs in a table, with the difference between two of them; one can be chosen.

import { change, duration, element, number } from "/page/dom.js";

const SHOWN = 50;
const FIGURES = [
  ["first token", (request) => request.ttft_s],
  ["largest gap", (request) => request.longest_gap_s || null],
];

export class RequestsTable {
  // onChoose(id) is called with the request that is chosen.
  constructor(onChoose) {
    this.element = element("div", { class: "requests" });
    this._onChoose = onChoose;
    this._sort = "gap";
    this._shown = SHOWN;
    this.chosen = null;
  }

  show(runs) {
    this._runs = runs.length > 1 ? [runs[0], runs.at(-1)] : runs;
    if (runs.length < 2 && this._sort.startsWith("change")) this._sort = "gap";
    this._draw();
  }

  _choose(id) {
    this.chosen = id;
    this._draw();
    this._onChoose(id);
  }

  _draw() {
    const ids = this._sorted();
    const rows = ids.slice(0, this._shown).map((id) => this._row(id));
    const table = element("table", {}, this._head(), element("tbody", {}, ...rows));
    this.element.replaceChildren(
      this._sortControl(),
      element("p", { class: "notes" }, this._words(ids.length)),
      element("div", { class: "scrolled" }, table),
    );
    if (ids.length > this._shown) {
      this.element.append(
        element("button", { type: "button", click: () => this._more() }, `Show ${SHOWN} more`),
      );
    }
  }

  _words(count) {
    const names = this._runs.map((run) => run.name);
    const compared = names.length > 1 ? `; changes are from “${names[0]}” to “${names[1]}”` : "";
    return `${number(count)} requests${compared}. Choose one to see what it waited for.`;
  }

  _head() {
    const row = element("tr", {});
    for (const name of ["request", "prompt", "answer"]) row.append(element("th", { scope: "col" }, name));
    for (const [name] of FIGURES) {
      for (const run of this._runs) {
        const swatch = element("span", { class: `swatch run-${run.index}`, title: run.name });
        row.append(element("th", { scope: "col" }, swatch, name));
      }
      if (this._runs.length > 1) row.append(element("th", { scope: "col" }, "change"));
    }
    row.append(element("th", { scope: "col" }, "waited most for"));
    return element("thead", {}, row);
  }

  _row(id) {
    const known = this._runs.map((run) => run.byId.get(id));
    const any = known.find(Boolean);
    const button = element(
      "button",
      { type: "button", "aria-pressed": String(id === this.chosen), click: () => this._choose(id) },
      id,
    );
    const row = element("tr", {}, element("th", { scope: "row" }, button));
    row.append(element("td", {}, number(any.input_tokens)), element("td", {}, number(any.tokens)));
    for (const [, figure] of FIGURES) {
      const values = known.map((request) => (request ? figure(request) : null));
      for (const value of values) row.append(element("td", {}, duration(value)));
      if (values.length > 1) row.append(element("td", {}, signed(values[0], values[1])));
    }
    row.append(element("td", { class: "words" }, known.map(mostWaitedFor).join(" → ")));
    return row;
  }

  _sortControl() {
    const orders = { gap: "largest gap", ttft: "slowest first token", arrival: "arrival" };
    if (this._runs.length > 1) {
      orders.changeGap = "change of the largest gap";
      orders.changeTtft = "change of the first token";
    }
    const select = element("select", {
      change: (event) => {
        this._sort = event.target.value;
        this._draw();
        this.element.querySelector("select").focus();
      },
    });
    for (const [value, name] of Object.entries(orders)) {
      select.append(element("option", { value, selected: value === this._sort }, name));
    }
    return element("label", {}, "Requests by ", select);
  }

  _sorted() {
    const [first, last] = [this._runs[0], this._runs.at(-1)];
    const ids = [...new Set(this._runs.flatMap((run) => run.requests.map((request) => request.id)))];
    const of = (run, id, name) => run.byId.get(id)?.[name] ?? 0;
    const difference = (id, name) => Math.abs(of(last, id, name) - of(first, id, name));
    const keys = {
      gap: (id) => Math.max(...this._runs.map((run) => of(run, id, "longest_gap_s"))),
      ttft: (id) => Math.max(...this._runs.map((run) => of(run, id, "ttft_s"))),
      changeGap: (id) => difference(id, "longest_gap_s"),
      changeTtft: (id) => difference(id, "ttft_s"),
    };
    const key = keys[this._sort];
    if (!key) return ids;
    const values = new Map(ids.map((id) => [id, key(id)]));
    return ids.sort((a, b) => values.get(b) - values.get(a));
  }

  _more() {
    this._shown += SHOWN;
    this._draw();
  }
}

function signed(from, to) {
  if (from === null || to === null) return "–";
  const difference = to - from;
  const sign = difference < 0 ? "−" : "+";
  return `${sign}${duration(Math.abs(difference))} ${change(from, to) && `(${change(from, to)})`}`.trim();
}

function mostWaitedFor(request) {
  const waits = Object.entries(request?.waited_s ?? {});
  return waits.length ? waits.reduce((most, one) => (one[1] > most[1] ? one : most))[0] : "nothing";
}
