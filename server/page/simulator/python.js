// Python: the page's side of worker.js. Questions are promises; a run tells its progress.

export class PythonError extends Error {}

export class Python {
  constructor() {
    this._worker = new Worker("/page/simulator/worker.js", { type: "module" });
    this._worker.onmessage = ({ data }) => this._receive(data);
    this._worker.onerror = (event) => this._fail(event.message || "the worker could not be loaded");
    this._waiting = new Map();
    this._next = 1;
    this._broken = null;
  }

  // A method of Session: an object in, an object out. Throws PythonError with what is wrong.
  async ask(call, argument) {
    const text = argument === undefined ? undefined : JSON.stringify(argument);
    return parsed(await this._send({ call, argument: text }));
  }

  // Makes a recorded trace readable; its path there.
  read(file) {
    return this._send({ file });
  }

  // Begins a run. `stop()` ends it; `done` is its report, or null where it was stopped.
  run(start, onProgress) {
    const id = this._next;
    const done = this._send({ run: JSON.stringify(start) }, onProgress).then((text) => {
      const told = parsed(text);
      return told.stopped ? null : told.report;
    });
    return { done, stop: () => this._worker.postMessage({ stop: id }) };
  }

  // The decisions of a run as the text of a trace.
  async decisions(record) {
    return this._send({ decisions: JSON.stringify(record) });
  }

  _send(message, onProgress) {
    if (this._broken) return Promise.reject(new PythonError(this._broken));
    const id = this._next++;
    return new Promise((resolve, reject) => {
      this._waiting.set(id, { resolve, reject, onProgress });
      this._worker.postMessage({ id, ...message });
    });
  }

  _receive({ id, answer, error, progress }) {
    const waiting = this._waiting.get(id);
    if (progress) {
      waiting.onProgress?.(progress);
      return;
    }
    this._waiting.delete(id);
    if (error === undefined) waiting.resolve(answer);
    else waiting.reject(new PythonError(error));
  }

  _fail(message) {
    this._broken = message;
    for (const { reject } of this._waiting.values()) reject(new PythonError(message));
    this._waiting.clear();
  }
}

function parsed(text) {
  const answer = JSON.parse(text);
  if (answer.error !== undefined) throw new PythonError(answer.error);
  return answer;
}
