// View of several runs: state and checks of each run, and curves of the selected runs.

import { Chart, Zoom, runColor } from "./chart.js";
import { element, fill, labeled } from "./dom.js";
import { ago, number } from "./format.js";

const MAX_COMPARED = 6;

/** First charts of every run: [title, metrics, on a log scale]. */
const CHARTS = [
  ["reward", ["reward"]],
  ["accuracy", ["accuracy", "held_out/accuracy"]],
  ["engine-trainer mismatch (nats)", ["mismatch/log_prob_gap_mean", "mismatch/kl_k3"], true],
  ["importance ratio: largest deviation from 1", ["ratio/deviation_max"]],
  ["entropy (nats)", ["entropy"]],
  ["gradient norm", ["grad_norm"]],
  ["loss", ["loss"]],
  ["staleness (weight versions)", ["rollout/staleness_max"]],
  ["tasks with zero advantage", ["rollout/zero_advantage_fraction"]],
  ["sampled tokens per episode", ["response_tokens"]],
  ["tool-call rate", ["tool_call_rate", "held_out/tool_call_rate"]],
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

const STATES = {
  running: "running",
  finished: "finished",
  stopped: "stopped",
  stalled: "no step for a while",
  waiting: "no step yet",
};

const HEADLINES = { "held_out/accuracy": "held-out accuracy" };

export class CurvesView {
  constructor(app) {
    this.app = app;
    this.charts = new Map();
    this.zoom = new Zoom(() => this.draw());
    this.wanted = "";
    this.reach = Number(localStorage.getItem("smoothing") ?? 4);
  }

  show() {
    this.cards = element("section.runs", { "aria-label": "Runs" });
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
      element("h1", {}, "Runs"),
      this.cards,
      element(
        "div.controls",
        {},
        labeled("Smoothing", smoothing),
        labeled("From step", this.from),
        labeled("to step", this.to),
        element("button", { type: "button", onclick: () => this.zoom.reset() }, "Whole run"),
        labeled("Metric", this.search),
      ),
      this.grid,
    );
    this.update();
  }

  /** Runs to compare: the runs in the address, or else the newest run. */
  chosen() {
    const named = (this.app.parameters.runs ?? "").split(",").filter(Boolean);
    const chosen = this.app.runs.filter((run) => named.includes(run.name));
    if (chosen.length > 0) return chosen;
    const newest = [...this.app.runs].sort((a, b) => (b.time ?? 0) - (a.time ?? 0));
    return newest.slice(0, 1);
  }

  toggle(run) {
    const chosen = new Set(this.chosen().map((each) => each.name));
    if (!chosen.delete(run.name)) chosen.add(run.name);
    if (chosen.size > MAX_COMPARED) return;
    this.app.go("curves", { runs: [...chosen].join(",") }, { replace: true });
    this.update();
  }

  async update() {
    this.showCards();
    const chosen = this.chosen();
    const changes = await Promise.all(chosen.map((run) => this.app.curves.refresh(run)));
    const names = chosen.map((run) => run.name).join();
    if (changes.some(Boolean) || names !== this.drawn) this.draw();
    this.drawn = names;
  }

  showCards() {
    const chosen = this.chosen();
    const focused = document.activeElement?.dataset?.run;
    const wasOpen = new Set(
      [...this.cards.querySelectorAll("details[open]")].map((node) => node.dataset.run),
    );
    fill(
      this.cards,
      this.app.runs.map((run) => this.card(run, chosen, wasOpen.has(run.name))),
    );
    if (focused) this.cards.querySelector(`input[data-run="${CSS.escape(focused)}"]`)?.focus();
  }

  card(run, chosen, isOpen) {
    const isChosen = chosen.some((each) => each.name === run.name);
    const box = element("input", {
      type: "checkbox",
      checked: isChosen,
      "data-run": run.name,
      onchange: () => this.toggle(run),
    });
    const swatch = element("span.swatch");
    if (isChosen) swatch.style.setProperty("--curve", `var(${this.colorOf(run, chosen)})`);

    const of = run.steps ? ` of ${number(run.steps)}` : "";
    const progress = run.step === null ? "" : `step ${number(run.step)}${of}, ${ago(run.time)}`;
    const headlines = Object.entries(run.headlines).map(([name, value]) =>
      element("div", {}, element("dt", {}, HEADLINES[name] ?? name), element("dd", {}, number(value, 3))),
    );
    const troubles = run.findings.filter((finding) => finding.level !== "good");
    return element(
      "article.card.run",
      { "data-health": troubles[0]?.level ?? "good" },
      element("label.name", {}, box, swatch, element("strong", {}, run.name)),
      element("div", {}, element(`span.state.${run.state}`, {}, STATES[run.state]), " ", progress),
      troubles.map((finding) => this.finding(finding)),
      this.healthy(run, troubles.length, isOpen),
      element("dl.headlines", {}, headlines),
      run.has_episodes ? element("a", { href: this.app.address("episodes", { run: run.name }) }, "Episodes") : "",
    );
  }

  /** Color of each run, for any selection. If one run is selected, its metrics have colors. */
  colorOf(run, chosen) {
    return runColor(chosen.length === 1 ? 0 : this.app.runs.findIndex((each) => each.name === run.name));
  }

  finding(finding) {
    return element(
      `p.finding.${finding.level}`,
      {},
      element("b", {}, `${finding.level === "bad" ? "Failed" : "Warning"}: ${finding.check}. `),
      finding.message,
    );
  }

  /** Collapsed list of the checks that passed. */
  healthy(run, troubles, isOpen) {
    const good = run.findings.filter((finding) => finding.level === "good");
    if (good.length === 0) return null;
    const title = troubles === 0 ? `All ${good.length} checks pass` : `${good.length} checks pass`;
    return element(
      "details",
      { open: isOpen, "data-run": run.name },
      element(`summary.${troubles === 0 ? "well" : "soft"}`, {}, title),
      element("ul", {}, good.map((finding) => element("li", {}, `${finding.check}: ${finding.message}`))),
    );
  }

  typeZoom() {
    this.zoom.from = this.from.value === "" ? null : Number(this.from.value);
    this.zoom.to = this.to.value === "" ? null : Number(this.to.value);
    this.draw();
  }

  draw() {
    this.from.value = this.zoom.from ?? "";
    this.to.value = this.zoom.to ?? "";
    const runs = this.chosen().filter((run) => this.app.curves.of(run.name));
    const wanted = this.layout(runs);

    for (const [title, chart] of this.charts) {
      if (wanted.has(title)) continue;
      chart.close();
      chart.node.remove();
      this.charts.delete(title);
    }
    for (const [title, { metrics, log }] of wanted) {
      if (!this.charts.has(title)) this.charts.set(title, new Chart(title, { log, zoom: this.zoom }));
      const chart = this.charts.get(title);
      this.grid.append(chart.node);
      chart.show(this.curves(runs, metrics), this.reach);
    }
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
        label: runs.length === 1 ? short(name, metrics) : `${run.name} ${metrics.length > 1 ? short(name, metrics) : ""}`,
        color: runs.length === 1 ? runColor(i) : this.colorOf(run, runs),
        dash: runs.length === 1 ? Math.floor(i / 6) : i,
        steps,
        values: values[name] ?? new Array(steps.length).fill(null),
      }));
    });
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

/** Name of a metric without the common prefix of its chart. */
function short(name, metrics) {
  if (metrics.length === 1) return name;
  const folder = name.slice(0, name.lastIndexOf("/") + 1);
  return metrics.every((each) => each.startsWith(folder)) ? name.slice(folder.length) : name;
}
