// Runs Python, and in it the scheduler and its simulation (runtime/simulation/what_if.py), away from
// the page. Every message is answered by one of the same `id`: { id, answer } or { id, error }.
//
//     { id, call, argument }      a method of Session; JSON text in, JSON text out
//     { id, file }                reads a recorded trace (a File) before it is loaded; its path
//     { id, run }                 runs from `run` (Session.start's argument) to the end, with
//                                 { id, progress } on the way; { stop: id } ends it early
//     { id, decisions }           every decision of such a run, as a trace

import { loadPyodide } from "/simulator/pyodide/pyodide.mjs";

const SLICE_MS = 80; // between two looks at what the page has to say
const TRACE = "/trace.jsonl";

let stopped = null; // the run that is to end

const python = loadPyodide({ indexURL: "/simulator/pyodide/" }).then(async (pyodide) => {
  const answer = await fetch("/simulator/sources.zip");
  if (!answer.ok) throw new Error(`the scheduler's sources: status ${answer.status}`);
  pyodide.unpackArchive(await answer.arrayBuffer(), "zip", { extractDir: "/sources" });
  pyodide.runPython("import sys; sys.path.insert(0, '/sources')");
  const whatIf = pyodide.pyimport("runtime.simulation.what_if");
  return { pyodide, session: whatIf.Session(), decisions: whatIf.decisions };
});

onmessage = async ({ data }) => {
  if ("stop" in data) {
    stopped = data.stop;
    return;
  }
  try {
    postMessage({ id: data.id, answer: await act(data) });
  } catch (error) {
    postMessage({ id: data.id, error: lastLine(error) });
  }
};

async function act(message) {
  const { pyodide, session, decisions } = await python;
  if (message.file) {
    pyodide.FS.writeFile(TRACE, new Uint8Array(await message.file.arrayBuffer()));
    return TRACE;
  }
  if (message.run) return run(session, message.id, message.run);
  if (message.decisions) return decisions(message.decisions);
  return session[message.call](...(message.argument === undefined ? [] : [message.argument]));
}

// In slices of a similar time, since Python keeps this thread from hearing of a stop.
async function run(session, id, start) {
  let answer = session.start(start);
  let steps = 20;
  while (!JSON.parse(answer).error) {
    const began = performance.now();
    answer = session.advance(steps);
    const told = JSON.parse(answer);
    if (told.done || told.error) break;
    postMessage({ id, progress: told });
    const tookMs = Math.max(performance.now() - began, 1);
    steps = Math.max(1, Math.min(2 * steps, Math.round((steps * SLICE_MS) / tookMs)));
    await new Promise((resume) => setTimeout(resume));
    if (stopped === id) return JSON.stringify({ stopped: true });
  }
  return answer;
}

// Of a Python error the message alone: what is above it are files of the page.
function lastLine(error) {
  const lines = String(error.message ?? error).trim().split("\n");
  return lines.at(-1);
}
