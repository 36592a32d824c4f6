// Control that selects the run of a view.

import { labeled, select } from "./dom.js";

export function runChoice(app, view) {
  const options = app.runs.map((run) => [run.name, run.name]);
  return labeled("Run", select(options, app.run().name, (name) => app.go(view, { run: name })));
}
