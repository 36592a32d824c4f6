// The control that says which run a view is about.

import { labelled, select } from "./dom.js";

export function runChoice(app, view) {
  const options = app.runs.map((run) => [run.name, run.name]);
  return labelled("Run", select(options, app.run().name, (name) => app.go(view, { run: name })));
}
