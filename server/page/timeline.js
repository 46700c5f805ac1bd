// Timeline: the band of steps, on a canvas, from a plain array. It fetches nothing and knows no
// server, so that a live view and a simulation show steps alike.
//
//     import { Timeline } from "/page/timeline.js";
//     const timeline = new Timeline(element, { label: "Steps of the server" });
//     timeline.show(steps);
//
// `element` is an empty block element; its width is the timeline's. A step is an object:
//
//     step            its number; a selection follows it from one array to the next
//     prefill_tokens  tokens of prompts that it computes
//     prefill_rows    prompts they belong to
//     decode_rows     rows that get one token each
//     step_ms         how long it took
//     host_ms         of the host's own work for it, from planning to delivering (may be left out)
//     gap_ms          before it, while nothing was computed (may be left out)
//     note            a word more about it, shown as text (may be left out)
//     failed          true where it failed (may be left out)
//
// Options of the constructor: `label` names it for who cannot see it; `onSelect(step | null)` is
// called when a step is pointed at or chosen by keys; `height` in CSS pixels.
//
//     show(steps, { scales, marked })   draws an array, oldest first; the array is not changed.
//                  scales: { tokens, rows, ms }, tops of the three lanes; those left out fit the
//                  steps. Two timelines given the same scales can be compared.
//                  marked: step => boolean; the others are drawn faint.
//     select(number | null)             chooses a step by its number
//     selected                          the chosen step, or null
//     scales                            the tops in use, to be handed to another timeline
//     close()                           ends what it listens to
//
// Keys: arrows (with Shift ten steps), Page up and down, Home, End; + and - look closer and wider,
// 0 shows all, Escape chooses nothing. Where more steps than pixels are shown a column has the
// largest figures of its steps. 10,000 steps are drawn in a few milliseconds.
//
// Colours are custom properties of the element, with defaults here: --prefill --decode --time --host
// --gap --failed --ink --muted --line.

const DEFAULTS = {
  prefill: "#b4530a",
  decode: "#0b7285",
  time: "#8a93a0",
  host: "#5f3dc4",
  gap: "#c2255c",
  failed: "#e03131",
  ink: "#1b1f24",
  muted: "#5c6670",
  line: "#d5dae0",
};
const LANES = [
  { name: "prompt tokens", scale: "tokens", part: 0.32 },
  { name: "decode rows", scale: "rows", part: 0.26 },
  { name: "step, ms", scale: "ms", part: 0.42 },
];
const LABEL_HEIGHT = 15;
const WIDEST_COLUMN = 14;
const FEWEST_SHOWN = 8;

export class Timeline {
  constructor(element, { label = "Steps", onSelect = () => {}, height = 220 } = {}) {
    this.steps = [];
    this.scales = { tokens: 1, rows: 1, ms: 1 };
    this.selected = null;
    this._element = element;
    this._height = height;
    this._onSelect = onSelect;
    this._marked = null;
    this._view = null; // [first, last) while not all is shown
    this._frame = 0;
    this._build(label);
    this._listen();
  }

  show(steps, { scales = {}, marked = null } = {}) {
    this.steps = steps;
    this.scales = { ...fittingScales(steps), ...scales };
    this._marked = marked;
    if (this._view && this._view[1] > steps.length) this._view = null;
    if (this.selected) {
      const number = this.selected.step;
      this.selected = steps.find((step) => step.step === number) ?? null;
    }
    this._summary.textContent = summary(steps);
    this._tell();
    this._redraw();
  }

  select(number) {
    this._choose(this.steps.findIndex((step) => step.step === number));
  }

  close() {
    this._resizes.disconnect();
    this._dark.removeEventListener("change", this._redrawn);
    cancelAnimationFrame(this._frame);
    this._element.replaceChildren();
  }

  _build(label) {
    this._element.classList.add("timeline");
    const canvas = document.createElement("canvas");
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "slider");
    canvas.setAttribute("aria-label", label);
    canvas.style.width = "100%";
    canvas.style.height = `${this._height}px`;
    canvas.style.display = "block";
    canvas.style.touchAction = "pan-y";
    this._canvas = canvas;
    this._summary = document.createElement("p");
    this._summary.className = "timeline-summary";
    this._told = document.createElement("p");
    this._told.className = "timeline-figures";
    this._element.replaceChildren(canvas, this._told, this._summary);
  }

  _listen() {
    const canvas = this._canvas;
    this._redrawn = () => this._redraw();
    this._resizes = new ResizeObserver(this._redrawn);
    this._resizes.observe(this._element);
    this._dark = matchMedia("(prefers-color-scheme: dark)");
    this._dark.addEventListener("change", this._redrawn);
    canvas.addEventListener("pointermove", (event) => this._choose(this._indexAt(event.offsetX)));
    canvas.addEventListener("pointerdown", (event) => this._choose(this._indexAt(event.offsetX)));
    canvas.addEventListener("keydown", (event) => this._key(event));
  }

  // Choosing

  _key(event) {
    const count = this.steps.length;
    if (event.ctrlKey || event.metaKey || event.altKey || !count) return;
    const at = this.selected ? this.steps.indexOf(this.selected) : count;
    const stride = event.shiftKey ? 10 : 1;
    const page = Math.max(1, Math.round(this._shown()[1] - this._shown()[0]) >> 2);
    const moves = {
      ArrowLeft: at - stride,
      ArrowRight: at + stride,
      PageUp: at - page,
      PageDown: at + page,
      Home: 0,
      End: count - 1,
    };
    if (event.key in moves) this._choose(clamp(moves[event.key], 0, count - 1));
    else if (event.key === "Escape") this._choose(-1);
    else if (event.key === "+" || event.key === "=") this._zoom(0.5, at);
    else if (event.key === "-") this._zoom(2, at);
    else if (event.key === "0") this._view = null;
    else return;
    event.preventDefault();
    this._redraw();
  }

  _choose(index) {
    const step = this.steps[index] ?? null;
    if (step === this.selected) return;
    this.selected = step;
    if (step && this._view) this._bringInto(index);
    this._tell();
    this._redraw();
    this._onSelect(step);
  }

  _tell() {
    const text = this.selected ? figures(this.selected) : "";
    this._told.textContent = text || "Point at a step, or use the arrow keys, for its figures.";
    const canvas = this._canvas;
    canvas.setAttribute("aria-valuemin", this.steps[0]?.step ?? 0);
    canvas.setAttribute("aria-valuemax", this.steps.at(-1)?.step ?? 0);
    canvas.setAttribute("aria-valuenow", this.selected?.step ?? this.steps.at(-1)?.step ?? 0);
    canvas.setAttribute("aria-valuetext", text || "no step chosen");
  }

  _zoom(factor, at) {
    const count = this.steps.length;
    const [first, last] = this._shown();
    const width = Math.max(FEWEST_SHOWN, Math.round((last - first) * factor));
    if (width >= count) {
      this._view = null;
      return;
    }
    const begin = clamp(Math.round(at - width / 2), 0, count - width);
    this._view = [begin, begin + width];
  }

  _bringInto(index) {
    const [first, last] = this._view;
    const width = last - first;
    const begin = clamp(first, Math.max(0, index - width + 1), index);
    this._view = [begin, begin + width];
  }

  _shown() {
    return this._view ?? [0, this.steps.length];
  }

  _columnWidth(width) {
    const [first, last] = this._shown();
    return Math.min(WIDEST_COLUMN, width / Math.max(1, last - first));
  }

  _indexAt(x) {
    const [first, last] = this._shown();
    const width = this._canvas.clientWidth;
    return clamp(first + Math.floor(x / this._columnWidth(width)), first, last - 1);
  }

  // Drawing

  _redraw() {
    cancelAnimationFrame(this._frame);
    this._frame = requestAnimationFrame(() => this._draw());
  }

  _draw() {
    const canvas = this._canvas;
    const width = canvas.clientWidth;
    if (!width) return; // hidden
    const density = devicePixelRatio || 1;
    canvas.width = Math.round(width * density);
    canvas.height = Math.round(this._height * density);
    const context = canvas.getContext("2d");
    context.scale(density, density);
    context.clearRect(0, 0, width, this._height);
    const colours = coloursOf(this._element);
    const columns = this._columns(width);
    let top = 0;
    for (const lane of LANES) {
      const height = lane.part * this._height;
      this._drawLane(context, lane, top, height, width, columns, colours);
      top += height;
    }
    this._drawSelection(context, width, colours);
  }

  // What is drawn in each column: the figures of its step, or the largest of its steps.
  _columns(width) {
    const [first, last] = this._shown();
    const each = this._columnWidth(width);
    const perColumn = Math.max(1, Math.ceil(1 / each));
    const columns = [];
    for (let at = first; at < last; at += perColumn) {
      const x = Math.round((at - first) * each); // whole pixels: what is cut looks faint
      const column = { x, width: Math.round((at - first + perColumn) * each) - x, faint: true };
      column.tokens = column.rows = column.ms = column.host = column.gap = 0;
      for (const step of this.steps.slice(at, Math.min(at + perColumn, last))) {
        column.tokens = Math.max(column.tokens, step.prefill_tokens);
        column.rows = Math.max(column.rows, step.decode_rows);
        column.ms = Math.max(column.ms, step.step_ms);
        column.host = Math.max(column.host, step.host_ms ?? 0);
        column.gap = Math.max(column.gap, step.gap_ms ?? 0);
        column.failed ||= Boolean(step.failed);
        column.faint &&= this._marked !== null && !this._marked(step);
      }
      columns.push(column);
    }
    return columns;
  }

  _drawLane(context, lane, top, height, width, columns, colours) {
    const base = top + height - 1;
    const scale = this.scales[lane.scale];
    const room = height - LABEL_HEIGHT - 1;
    context.fillStyle = colours.line;
    context.fillRect(0, base, width, 1);
    const bar = (column, value, colour, narrow = 0) => {
      if (!value) return;
      const thin = column.width > 3 ? 1 : 0; // a line of ground between columns that have room
      const wide = column.width - thin;
      const tall = Math.max(1, Math.min(room, (room * value) / scale));
      context.globalAlpha = column.faint ? 0.25 : 1;
      context.fillStyle = colour;
      context.fillRect(column.x + narrow * wide, base - tall, wide * (1 - 2 * narrow), tall);
    };
    for (const column of columns) {
      if (lane.scale === "tokens") bar(column, column.tokens, colours.prefill);
      else if (lane.scale === "rows") bar(column, column.rows, colours.decode);
      else {
        bar(column, column.ms, column.failed ? colours.failed : colours.time);
        bar(column, column.gap, colours.gap, 0.3);
        bar(column, column.host, colours.host, 0.3);
      }
    }
    context.globalAlpha = 1;
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "top";
    context.fillStyle = colours.muted;
    context.textAlign = "left";
    context.fillText(lane.name, 0, top + 2);
    if (lane.scale === "ms") {
      let x = context.measureText(lane.name).width + 10;
      for (const [name, colour] of [["host", colours.host], ["gap before it", colours.gap]]) {
        context.fillStyle = colour;
        context.fillText(name, x, top + 2);
        x += context.measureText(name).width + 10;
      }
    }
    context.fillStyle = colours.muted;
    context.textAlign = "right";
    context.fillText(number(scale), width, top + 2);
  }

  _drawSelection(context, width, colours) {
    const [first, last] = this._shown();
    const index = this.selected ? this.steps.indexOf(this.selected) : -1;
    if (index < first || index >= last) return;
    const each = this._columnWidth(width);
    context.strokeStyle = colours.ink;
    context.lineWidth = 1;
    context.strokeRect((index - first) * each + 0.5, 0.5, Math.max(1, each - 1), this._height - 1);
  }
}

// The figures of a step in one line of text.
function figures(step) {
  const parts = [`Step ${step.step}: ${kind(step)}`];
  if (step.failed) parts[0] += ", failed";
  if (step.prefill_tokens) {
    parts.push(`${number(step.prefill_tokens)} prompt tokens of ${step.prefill_rows}`);
  }
  if (step.decode_rows) parts.push(`${step.decode_rows} decode rows`);
  parts.push(`${number(step.step_ms)} ms`);
  if (step.host_ms !== undefined) parts.push(`host ${number(step.host_ms)} ms`);
  if (step.gap_ms) parts.push(`gap before it ${number(step.gap_ms)} ms`);
  if (step.note) parts.push(step.note);
  return parts.join(" · ");
}

// "mixed" where prompts and decode rows share a step, else "prefill" or "decode".
function kind(step) {
  if (!step.prefill_tokens) return "decode";
  return step.decode_rows ? "mixed" : "prefill";
}

// The three tops that fit these steps.
export function fittingScales(steps) {
  const scales = { tokens: 1, rows: 1, ms: 0 };
  for (const step of steps) {
    scales.tokens = Math.max(scales.tokens, step.prefill_tokens);
    scales.rows = Math.max(scales.rows, step.decode_rows);
    scales.ms = Math.max(scales.ms, step.step_ms, step.host_ms ?? 0, step.gap_ms ?? 0);
  }
  if (!scales.ms) scales.ms = 1;
  return scales;
}

function summary(steps) {
  if (!steps.length) return "No steps yet.";
  const counts = { prefill: 0, decode: 0, mixed: 0 };
  let gap = 0;
  let longest = 0;
  for (const step of steps) {
    counts[kind(step)] += 1;
    gap = Math.max(gap, step.gap_ms ?? 0);
    longest = Math.max(longest, step.step_ms);
  }
  return (
    `${steps.length} steps: ${counts.prefill} prefill, ${counts.decode} decode, ` +
    `${counts.mixed} mixed; longest ${number(longest)} ms, largest gap ${number(gap)} ms`
  );
}

function number(value) {
  const digits = value >= 100 || Number.isInteger(value) ? 0 : value >= 10 ? 1 : 2;
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

function clamp(value, least, most) {
  return Math.min(Math.max(value, least), most);
}

function coloursOf(element) {
  const style = getComputedStyle(element);
  const own = (name) => style.getPropertyValue(`--${name}`).trim();
  return Object.fromEntries(
    Object.entries(DEFAULTS).map(([name, usual]) => [name, own(name) || usual]),
  );
}
