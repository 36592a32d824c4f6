// View of the resolved configuration of a run and of its final results.

import { readConfig } from "./api.js";
import { element, fill } from "./dom.js";
import { number } from "./format.js";
import { runChoice } from "./run_choice.js";

export class ConfigView {
  constructor(app) {
    this.app = app;
  }

  async show() {
    const run = this.app.run();
    const figures = Object.entries(run.summary).filter(([, value]) => typeof value !== "object");
    const text = element("pre.card", { tabIndex: 0 }, "Loading …");
    fill(
      this.app.main,
      element("h1", {}, "Configuration"),
      runChoice(this.app, "config"),
      figures.length > 0 &&
        element(
          "dl.figures",
          {},
          figures.map(([name, value]) =>
            element("div.card", {}, element("dt", {}, name.replaceAll("_", " ")), element("dd", {}, number(value))),
          ),
        ) || "",
      text,
    );
    text.textContent = (await readConfig(run.name)) || "config.yaml is missing";
  }
}
