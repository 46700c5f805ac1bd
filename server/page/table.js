// Table: rows that change several times a second. What stays the same is left alone, so that it can be
// selected and read while the rest moves.

import { element } from "/page/dom.js";

export class Table {
  // columns: [{ name, title, numeric, cell(row) => text, hint(row) => text }]; key(row): what a row is.
  constructor(place, columns, key) {
    this._columns = columns;
    this._key = key;
    this._rows = new Map();
    const heads = columns.map(({ name, title = "", numeric }) =>
      element("th", { scope: "col", title, class: numeric ? "numeric" : "" }, name),
    );
    this._body = element("tbody");
    place.replaceChildren(element("thead", {}, element("tr", {}, ...heads)), this._body);
  }

  show(rows) {
    const left = new Map(this._rows);
    let before = null;
    for (const row of rows) {
      const key = this._key(row);
      const line = left.get(key) ?? this._line(key);
      left.delete(key);
      this._fill(line, row);
      const next = before ? before.nextSibling : this._body.firstChild;
      if (line !== next) this._body.insertBefore(line, next);
      before = line;
    }
    for (const [key, line] of left) {
      line.remove();
      this._rows.delete(key);
    }
  }

  _line(key) {
    const cells = this._columns.map(({ numeric }) =>
      element("td", { class: numeric ? "numeric" : "" }),
    );
    const line = element("tr", {}, ...cells);
    this._rows.set(key, line);
    return line;
  }

  _fill(line, row) {
    this._columns.forEach(({ cell, hint }, index) => {
      const field = line.cells[index];
      const text = cell(row);
      if (field.textContent !== text) field.textContent = text;
      const title = hint ? hint(row) : "";
      if (field.title !== title) field.title = title;
    });
  }
}
