// Curves of the chosen runs, below the state and the checks of each.

import { Chart, Zoom, runColor } from "./chart.js";
import { element, fill, labeled } from "./dom.js";
import { runCard } from "./run_card.js";

/** First charts of every run: [title, metrics, on a log scale]. */
const CHARTS = [
  ["reward", ["reward"]],
  ["accuracy", ["accuracy", "held_out/accuracy"]],
  ["|Δlogp|: engine-trainer mismatch (nats)", ["mismatch/log_prob_gap_mean", "mismatch/kl_k3"], true],
  ["importance ratio: largest deviation from 1", ["ratio/deviation_max"]],
  ["entropy (nats)", ["entropy"]],
  ["grad norm", ["grad_norm"]],
  ["loss", ["loss", "validation/loss"]],
  ["staleness (weight versions)", ["rollout/staleness_max"]],
  ["tasks with zero advantage", ["rollout/zero_advantage_fraction"]],
  ["sampled tokens per episode", ["response_tokens"]],
  ["tool calls", ["tool_call_rate", "held_out/tool_call_rate"]],
  ["turns", ["turns", "held_out/turns"]],
  ["tokens/s", ["tokens_per_second"]],
  ["shared prefixes (share of tokens)", ["prefixes/saved_tokens", "prefixes/route_conflicts"]],
];

/** Charts of all metrics with a prefix. */
const FAMILIES = [
  ["seconds of a step by phase", "seconds/"],
  ["seconds of the update", "trainer/seconds_"],
  ["memory (GB)", "memory/"],
  ["reward parts", "reward/"],
  ["episode endings", "finish/"],
];

export class CurvesView {
  constructor(app) {
    this.app = app;
    this.charts = new Map();
    this.zoom = new Zoom(() => this.draw());
    this.wanted = "";
    this.reach = Number(localStorage.getItem("smoothing") ?? 4);
  }

  show() {
    this.cards = element("section.runs", { "aria-label": "Shown runs" });
    this.hint = element("p.soft.hint", {}, "Click a point to open the episodes of its step. Drag to zoom.");
    this.grid = element("section.charts", { "aria-label": "Curves" });
    this.from = element("input", { type: "number", min: 0, placeholder: "first", onchange: () => this.typeZoom() });
    this.to = element("input", { type: "number", min: 0, placeholder: "last", onchange: () => this.typeZoom() });
    this.search = element("input", {
      type: "search",
      placeholder: "filter metrics by name",
      oninput: (event) => {
        this.wanted = event.target.value.trim().toLowerCase();
        this.draw();
      },
    });
    const smoothing = element("input", {
      type: "range",
      min: 0,
      max: 30,
      value: this.reach,
      oninput: (event) => {
        this.reach = Number(event.target.value);
        localStorage.setItem("smoothing", this.reach);
        this.draw();
      },
    });
    fill(
      this.app.main,
      element("h1.hidden-title", {}, "Curves"),
      this.cards,
      element(
        "div.controls.of-charts",
        {},
        labeled("Smoothing", smoothing),
        labeled("From step", this.from),
        labeled("to step", this.to),
        element("button", { type: "button", onclick: () => this.zoom.reset() }, "Whole run"),
        labeled("Metric", this.search),
      ),
      this.hint,
      this.grid,
    );
    this.update();
  }

  async update() {
    this.showCards();
    const chosen = this.app.chosen();
    const changes = await Promise.all(chosen.map((run) => this.app.curves.refresh(run)));
    const names = chosen.map((run) => run.name).join();
    if (changes.some(Boolean) || names !== this.drawn) this.draw();
    this.drawn = names;
  }

  showCards() {
    const chosen = this.app.chosen();
    const signature = JSON.stringify(chosen);
    // Keep an unchanged card, because the user may be reading it.
    if (signature === this.shown) return;
    this.shown = signature;
    const open = [...this.cards.querySelectorAll("details[open]")].map((node) => node.dataset.run);
    fill(this.cards, chosen.map((run) => runCard(this.app, run, open.includes(run.name), chosen.length > 1)));
  }

  /** Open the episodes of a point. */
  open(curve, step) {
    const run = this.app.runs.find((each) => each.name === curve.run);
    if (!run?.has_episodes) return;
    const split = curve.metric.startsWith("held_out/") ? "held_out" : "";
    this.app.go("episodes", { run: run.name, step_from: step, step_to: step, split });
  }

  typeZoom() {
    this.zoom.from = this.from.value === "" ? null : Number(this.from.value);
    this.zoom.to = this.to.value === "" ? null : Number(this.to.value);
    this.draw();
  }

  draw() {
    this.from.value = this.zoom.from ?? "";
    this.to.value = this.zoom.to ?? "";
    const runs = this.app.chosen().filter((run) => this.app.curves.of(run.name));
    const wanted = this.layout(runs);

    for (const [title, chart] of this.charts) {
      if (wanted.has(title)) continue;
      chart.close();
      chart.node.remove();
      this.charts.delete(title);
    }
    for (const [title, { metrics, log }] of wanted) {
      if (!this.charts.has(title)) this.charts.set(title, this.newChart(title, log));
      const chart = this.charts.get(title);
      this.grid.append(chart.node);
      chart.show(this.curves(runs, metrics), this.reach);
    }
  }

  newChart(title, log) {
    return new Chart(title, { log, zoom: this.zoom, open: (curve, step) => this.open(curve, step) });
  }

  /** Charts to show: title -> metrics. A search selects the metrics whose name contains its text. */
  layout(runs) {
    const names = new Set(runs.flatMap((run) => Object.keys(this.app.curves.of(run.name).metrics)));
    const layout = new Map();
    if (this.wanted) {
      const found = [...names].filter((name) => name.toLowerCase().includes(this.wanted)).sort();
      for (const name of found.slice(0, 40)) layout.set(name, { metrics: [name], log: false });
      return layout;
    }
    for (const [title, metrics, log = false] of CHARTS) {
      const present = metrics.filter((name) => names.has(name));
      if (present.length > 0) layout.set(title, { metrics: present, log });
    }
    for (const [title, prefix] of FAMILIES) {
      const present = [...names].filter((name) => name.startsWith(prefix)).sort();
      if (present.length > 0) layout.set(title, { metrics: present, log: false });
    }
    return layout;
  }

  /** Several runs have colors, and their metrics have dashes. A single run's metrics have colors. */
  curves(runs, metrics) {
    return runs.flatMap((run) => {
      const { steps, metrics: values } = this.app.curves.of(run.name);
      return metrics.map((name, i) => ({
        label: runs.length === 1 ? this.short(name, metrics) : `${run.name} ${metrics.length > 1 ? this.short(name, metrics) : ""}`,
        run: run.name,
        metric: name,
        color: runs.length === 1 ? runColor(i) : this.app.colorOf(run),
        dash: runs.length === 1 ? Math.floor(i / 6) : i,
        steps,
        values: values[name] ?? new Array(steps.length).fill(null),
      }));
    });
  }

  /** Label of a metric, or else its name without the common prefix of its chart. */
  short(name, metrics) {
    if (name in this.app.labels || metrics.length === 1) return this.app.label(name);
    const folder = name.slice(0, name.lastIndexOf("/") + 1);
    return metrics.every((each) => each.startsWith(folder)) ? name.slice(folder.length) : name;
  }

  recolor() {
    for (const chart of this.charts.values()) chart.recolor();
  }

  key(key) {
    if (key !== "/") return false;
    this.search.focus();
    return true;
  }

  close() {
    for (const chart of this.charts.values()) chart.close();
  }
}
