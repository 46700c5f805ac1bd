// The page: what is served, one setting or two, and the report of their runs.

import { ServerError, ask } from "/page/api.js";
import { Python, PythonError } from "/page/simulator/python.js";
import { Report } from "/page/simulator/report.js";
import { Setting } from "/page/simulator/settings.js";
import { element, number } from "/page/dom.js";

const LARGEST_TRACE = 256 * 2 ** 20;
const KEPT_RUNS = 20;
const PAUSE_MS = 200; // after a change, in which another may follow

const by = (id) => document.getElementById(id);
const report = new Report(by("report"));
const runs = new Map(); // reports of this load, by their options as text
let python;
let described; // options by name
let loaded; // the record that was loaded, for the runs' decisions
let settings = [];
let current = null; // the run going on
let wanted = 0; // counts changes: an older one's run shows nothing
let pause;

start();

async function start() {
  const setup = await (await fetch("/simulator/setup")).json();
  if (!setup.pyodide) {
    by("loaded").append(
      "This page runs Python in the browser, which must be fetched once: run ",
      element("code", {}, setup.command),
      " on the server (with its --cache-dir, if it has one), then reload.",
    );
    return;
  }
  by("loaded").textContent = "Starting Python …";
  python = new Python();
  try {
    const { machines, options } = await python.ask("describe");
    described = new Map(options.map((option) => [option.name, option]));
    by("machine").append(...machines.map((name) => element("option", {}, name)));
  } catch (error) {
    complain(error);
    return;
  }
  by("loaded").textContent = "";
  by("load-button").disabled = false;
  listen(setup);
}

function listen(setup) {
  by("load").addEventListener("submit", (event) => {
    event.preventDefault();
    load();
  });
  for (const radio of document.querySelectorAll("[name=source]")) {
    radio.addEventListener("change", showSource);
  }
  by("trace").addEventListener("change", () => load());
  by("own-trace").hidden = !setup.records;
  by("own-trace").addEventListener("click", () => load(ownTrace));
  by("compare").addEventListener("change", () => {
    settings[1].element.hidden = !by("compare").checked;
    runSoon();
  });
  by("options").addEventListener("submit", (event) => event.preventDefault());
  by("stop").addEventListener("click", () => {
    wanted += 1;
    current?.stop();
  });
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    if (!event.dataTransfer.files.length) return;
    by("trace").files = event.dataTransfer.files;
    by("served").open = true;
    document.querySelector("[name=source][value=trace]").checked = true;
    showSource();
    load();
  });
}

function source() {
  return document.querySelector("[name=source]:checked").value;
}

function showSource() {
  for (const part of document.querySelectorAll("[data-source]")) {
    part.hidden = part.disabled = part.dataset.source !== source();
  }
  const fitted = by("machine").querySelector("[value='']");
  if (source() === "trace" && !fitted) {
    by("machine").prepend(element("option", { value: "", selected: true }, "the trace, fitted"));
  } else if (source() === "synthetic") fitted?.remove();
}

// What is served

// traceFile: gives the trace to load, where one is wanted.
async function load(traceFile = chosenTrace) {
  const mine = (wanted += 1);
  complain(null);
  try {
    current?.stop();
    await current?.done;
    const record = await wantedLoad(traceFile);
    by("loaded").textContent = "Loading …";
    const told = await python.ask("load", record);
    if (mine !== wanted) return;
    loaded = record;
    runs.clear();
    by("loaded").textContent =
      `${number(told.requests)} requests within ${number(told.seconds, 1)} s, ` +
      `${number(told.input_tokens)} prompt tokens; ${told.note}.`;
    by("served").open = false;
    makeSettings(told.options);
    await run();
  } catch (error) {
    by("loaded").textContent = "";
    complain(error);
  }
}

async function wantedLoad(traceFile) {
  const machine = by("machine").value || null;
  if (source() === "synthetic") {
    const workloads = [...document.querySelectorAll("[data-workload]")].map(workload);
    return { machine, workloads: workloads.filter((one) => one.requests) };
  }
  const file = await traceFile();
  if (file.size > LARGEST_TRACE) {
    throw new PythonError(
      `The trace has ${number(file.size / 2 ** 20)} MiB, and a browser's Python has room for ` +
        `${LARGEST_TRACE / 2 ** 20}: scripts/simulate.py --live FILE --html OUT has no bound.`,
    );
  }
  return { machine, trace: await python.read(file) };
}

function chosenTrace() {
  const [file] = by("trace").files;
  if (file) return file;
  by("trace").focus();
  throw new PythonError("Choose a trace first.");
}

async function ownTrace() {
  by("loaded").textContent = "Fetching what this server has recorded …";
  return (await ask("/debug/recorded_trace")).blob();
}

function workload(fields) {
  const value = (name) => Number(fields.querySelector(`[name=${name}]`)?.value ?? 0);
  return {
    name: fields.dataset.workload,
    requests: value("requests"),
    rate: value("rate"),
    input_tokens: [value("input_from"), value("input_to")],
    output_tokens: [value("output_from"), value("output_to")],
    prefix_groups: value("prefix_groups"),
    prefix_tokens: value("prefix_tokens"),
    seed: fields.dataset.workload === "long" ? 1 : 0,
  };
}

function makeSettings(base) {
  settings = ["A", "B"].map((name) => new Setting(name, described, base, runSoon));
  settings[1].element.hidden = !by("compare").checked;
  by("columns").replaceChildren(...settings.map((setting) => column(setting)));
  by("options").hidden = false;
}

function column(setting) {
  const save = element("button", { type: "button", click: () => saveDecisions(setting) });
  save.textContent = "Save its decisions as a trace";
  setting.element.append(save);
  return setting.element;
}

// Runs

function runSoon() {
  clearTimeout(pause);
  pause = setTimeout(() => run().catch(complain), PAUSE_MS);
}

async function run() {
  const mine = (wanted += 1);
  complain(null);
  current?.stop();
  await current?.done.catch(() => {});
  const shown = by("compare").checked ? settings : settings.slice(0, 1);
  const reports = [];
  try {
    for (const setting of shown) {
      if (mine !== wanted) return;
      const found = await reportOf(setting);
      if (!found) return;
      reports.push({ ...found, name: setting.title });
    }
  } finally {
    by("progress").hidden = true;
  }
  if (mine === wanted) report.show(reports);
}

// The report of a run under this setting, made before or now; null where it was stopped.
async function reportOf(setting) {
  const { options } = setting;
  const key = JSON.stringify(options);
  if (runs.has(key)) return runs.get(key);
  by("progress").hidden = false;
  tell({ steps: 0, ended: 0, simulated_s: 0 }, setting, 1);
  current = python.run({ options }, (told) => tell(told, setting, told.requests));
  const found = await current.done;
  if (!found) return null;
  runs.set(key, found);
  if (runs.size > KEPT_RUNS) runs.delete(runs.keys().next().value);
  return found;
}

function tell({ steps, ended, simulated_s: seconds }, setting, requests) {
  by("bar").value = ended / Math.max(requests, 1);
  by("done").textContent =
    `${setting.name}: ${number(steps)} steps, ${number(ended)} requests ended, ` +
    `${number(seconds, 1)} s simulated`;
}

async function saveDecisions(setting) {
  try {
    const text = await python.decisions({ ...loaded, options: setting.options });
    const link = element("a", {
      href: URL.createObjectURL(new Blob([text], { type: "application/jsonl" })),
      download: "trace.jsonl",
    });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  } catch (error) {
    complain(error);
  }
}

// Tells what went wrong, or with null that nothing does; what nobody expects goes to the console too.
function complain(error) {
  by("trouble").textContent = error ? error.message : "";
  if (error && !(error instanceof PythonError || error instanceof ServerError)) throw error;
}
