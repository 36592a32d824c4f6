// Resolved configuration and final results of a run, or the differences between several runs.

import { compareConfigs, readConfig } from "./api.js";
import { element, fill, labeled } from "./dom.js";
import { number } from "./format.js";

export class ConfigView {
  constructor(app) {
    this.app = app;
    this.wanted = "";
  }

  async show() {
    const chosen = this.app.chosen();
    fill(this.app.main, element("h1", {}, "Configuration"), element("p.soft", {}, "Loading …"));
    try {
      if (chosen.length > 1) await this.showDifferences(chosen);
      else await this.showRun(chosen[0]);
    } catch (error) {
      fill(this.app.main, element("h1", {}, "Configuration"), element("p.finding.bad", {}, error.message));
    }
  }

  async showRun(run) {
    const { config, summary } = await readConfig(run.name);
    const figures = Object.entries(summary).filter(([, value]) => typeof value !== "object");
    fill(
      this.app.main,
      element("h1", {}, `Configuration of ${run.name}`),
      element("p.soft.hint", {}, "Choose several runs in the list to see how their configurations differ."),
      figures.length > 0
        ? element(
            "dl.figures",
            {},
            figures.map(([name, value]) =>
              element("div.card", {}, element("dt", {}, name.replaceAll("_", " ")), element("dd", {}, number(value))),
            ),
          )
        : null,
      element("pre.card", { tabIndex: 0 }, config || "config.yaml is missing"),
    );
  }

  async showDifferences(chosen) {
    const { runs, rows, equal } = await compareConfigs(chosen.map((run) => run.name));
    const body = element("tbody");
    const draw = () => {
      const found = rows.filter((row) => row.key.toLowerCase().includes(this.wanted));
      fill(body, found.map(differenceRow));
    };
    const search = element("input", {
      type: "search",
      placeholder: "filter keys by name",
      oninput: (event) => {
        this.wanted = event.target.value.trim().toLowerCase();
        draw();
      },
    });
    const heading = (name) => {
      const swatch = element("span.swatch");
      swatch.style.setProperty("--curve", `var(${this.app.colorOf({ name })})`);
      return element("th", { scope: "col" }, swatch, " ", name);
    };
    fill(
      this.app.main,
      element("h1", {}, `Differences between ${runs.length} runs`),
      element("p.soft", { role: "status" }, `${number(rows.length)} keys differ, ${number(equal)} are equal`),
      element("div.controls", {}, labeled("Key", search)),
      element(
        "div.scroll",
        { tabIndex: 0, role: "region", "aria-label": "Differences between configurations" },
        element(
          "table.differences",
          {},
          element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "Key"), runs.map(heading))),
          body,
        ),
      ),
    );
    draw();
  }
}

/** Row of a key. Values that differ from the first run's are marked. */
function differenceRow({ key, values }) {
  const cells = values.map((value) => {
    const text = value === null ? element("span.soft", {}, "not set") : value;
    return element("td", { className: value === values[0] ? "" : "other" }, text);
  });
  return element("tr", {}, element("th.code", { scope: "row" }, key), cells);
}
