// List of runs at the left of the page: search, order, groups, and the runs to compare.

import { chip } from "./chips.js";
import { element, fill, labeled, select } from "./dom.js";
import { ago, number } from "./format.js";
import { arranged, groupChoices, orderChoices } from "./run_list.js";

export const MAX_COMPARED = 6;

const WIDE = matchMedia("(min-width: 901px)");

export const STATES = {
  running: "running",
  finished: "finished",
  stopped: "stopped",
  stalled: "no step for a while",
  waiting: "no step yet",
};

export class RunsRail {
  constructor(app) {
    this.app = app;
    this.text = "";
    this.order = localStorage.getItem("order") ?? "newest";
    this.grouping = localStorage.getItem("grouping") ?? "none";
    /** Rows by group and run: {node, signature}. */
    this.rows = new Map();

    this.title = element("summary");
    this.list = element("div.rail-list");
    this.search = element("input", {
      type: "search",
      placeholder: "name, tag, model, state",
      oninput: (event) => {
        this.text = event.target.value;
        this.update();
      },
    });
    const choose = (key) => (value) => {
      this[key] = value;
      localStorage.setItem(key, value);
      this.update();
    };
    // A narrow screen needs its space for the charts, so the list opens on request.
    this.box = element(
      "details",
      { open: WIDE.matches },
      this.title,
      element(
        "div.rail-controls",
        {},
        labeled("Find a run", this.search),
        labeled("Sort", select(orderChoices(), this.order, choose("order"))),
        labeled("Group", select(groupChoices(), this.grouping, choose("grouping"))),
      ),
      this.list,
    );
    WIDE.addEventListener("change", () => (this.box.open = WIDE.matches));
    this.rail = fill(document.getElementById("rail"), this.box);
  }

  focus() {
    this.box.open = true;
    this.search.focus();
  }

  /** Draw what has changed. */
  update() {
    const { runs } = this.app;
    const chosen = this.app.chosen().map((run) => run.name);
    const troubled = runs.filter((run) => worst(run)?.level === "bad").length;
    const counts = [`${number(runs.length)} ${runs.length === 1 ? "run" : "runs"}`, `${chosen.length} shown`];
    if (troubled > 0) counts.push(`${number(troubled)} with failed checks`);
    this.title.textContent = counts.join(", ");

    const groups = arranged(runs, this.text, this.order, this.grouping);
    const drawn = new Set();
    const nodes = groups.flatMap(([group, members]) => {
      const rows = members.map((run) => {
        const key = `${group}/${run.name}`;
        drawn.add(key);
        return this.row(key, run, chosen);
      });
      return group === "" ? rows : [element("h2.rail-group", {}, `${group} (${members.length})`), ...rows];
    });
    for (const key of this.rows.keys()) if (!drawn.has(key)) this.rows.delete(key);
    if (nodes.length === 0) nodes.push(element("p.soft", {}, "no run matches"));
    // Moving a node takes the focus away, so nothing moves if the order is the same.
    const isSame = nodes.length === this.list.children.length && nodes.every((node, i) => node === this.list.children[i]);
    if (!isSame) this.replace(nodes);
  }

  replace(nodes) {
    const focused = document.activeElement;
    const isFirst = this.list.children.length === 0;
    fill(this.list, nodes);
    // The runs of a shared address may be far down.
    const row = isFirst ? this.list.querySelector(".run:has(:checked, [aria-current])") : null;
    const { rail } = this;
    if (row && row.offsetTop > rail.clientHeight) rail.scrollTop = row.offsetTop - rail.clientHeight / 2;
    if (focused !== document.activeElement && this.list.contains(focused)) focused.focus();
  }

  /** Return the row of a run. An unchanged run keeps its node. */
  row(key, run, chosen) {
    const isChosen = chosen.includes(run.name);
    const isFull = chosen.length >= MAX_COMPARED && !isChosen;
    const { view } = this.app;
    const isCurrent = view === "episodes" ? this.app.run().name === run.name : isChosen && chosen.length === 1;
    const color = isChosen && view !== "episodes" ? this.app.colorOf(run) : null;
    const signature = JSON.stringify([run, isChosen, isFull, view, isCurrent, color, ago(run.time)]);
    const known = this.rows.get(key);
    if (known?.signature === signature) return known.node;

    const node = known?.node ?? element("div.run", { "data-run": run.name });
    const hadFocus = node.contains(document.activeElement) ? document.activeElement.className : null;
    node.dataset.health = worst(run)?.level ?? "good";
    fill(node, this.pick(run, isChosen, isFull), this.name(run, isCurrent, color), facts(run, this.app));
    if (hadFocus !== null) node.querySelector(`.${hadFocus.split(" ")[0]}`)?.focus();
    this.rows.set(key, { node, signature });
    return node;
  }

  /** Checkbox that shows a run. The table of episodes has one run, so it needs none. */
  pick(run, isChosen, isFull) {
    if (this.app.view === "episodes") return null;
    return element("input.pick", {
      type: "checkbox",
      checked: isChosen,
      disabled: isFull,
      title: isFull ? `At most ${MAX_COMPARED} runs at a time` : "Show this run",
      "aria-label": run.name,
      onchange: () => this.app.toggle(run),
    });
  }

  name(run, isCurrent, color) {
    const { view } = this.app;
    const address = this.app.address(view, view === "episodes" ? { run: run.name } : { runs: run.name });
    const swatch = element("span.swatch");
    if (color) swatch.style.setProperty("--curve", `var(${color})`);
    return element(
      "a.name",
      { href: address, title: run.path, "aria-current": isCurrent ? "true" : null },
      color ? swatch : null,
      run.name,
    );
  }
}

/** First finding that is not good. The server sorts the worst first. */
export const worst = (run) => run.findings.find((finding) => finding.level !== "good");

/** Newest figure that says most about a run. */
function figure(run, app) {
  const name = ["held_out/accuracy", "reward", "accuracy", "loss"].find((key) => run.headlines[key] !== undefined);
  return name === undefined ? null : element("span.figure", {}, `${app.label(name)} `, element("b", {}, number(run.headlines[name], 3)));
}

export function progress(run) {
  if (run.step === null) return "";
  return `step ${number(run.step)}${run.steps ? ` of ${number(run.steps)}` : ""}, ${ago(run.time)}`;
}

/** Figures in one line. Tags and a problem follow in a second one. */
function facts(run, app) {
  const trouble = worst(run);
  const word = trouble?.level === "bad" ? "failed" : "warning";
  const steps = run.step === null ? "" : ` ${number(run.step)}${run.steps ? `/${number(run.steps)}` : ""}`;
  return element(
    "div.facts",
    {},
    figure(run, app),
    element("span", { title: ago(run.time) }, element(`span.state.${run.state}`, {}, STATES[run.state]), steps),
    run.is_checked ? null : element("span", {}, "reading …"),
    run.kind ? chip(run.kind, "", run.kind.toUpperCase()) : null,
    run.tags.map((tag) => chip("tag", "", tag)),
    trouble ? chip("problem", "", `${word}: ${trouble.check}`, trouble.level) : null,
  );
}
