// The page: current view, its runs, theme and keyboard shortcuts.

import { Curves, listRuns } from "./api.js";
import { runColor } from "./chart.js";
import { ConfigView } from "./config_view.js";
import { CurvesView } from "./curves_view.js";
import { element, fill } from "./dom.js";
import { EpisodeView } from "./episode_view.js";
import { EpisodesView } from "./episodes_view.js";
import { GroupView } from "./group_view.js";
import { MAX_COMPARED, RunsRail } from "./rail.js";

const POLL_MILLISECONDS = 2000;
/** Pause while the server reads the metrics of many runs for the first time. */
const READING_MILLISECONDS = 100;
const VIEWS = {
  curves: CurvesView,
  episodes: EpisodesView,
  episode: EpisodeView,
  group: GroupView,
  config: ConfigView,
};
const TAB_OF = { episode: "episodes", group: "episodes" };
const WITH_RAIL = ["curves", "episodes", "config"];

/** State and actions that all views share. */
const app = {
  runs: [],
  /** Version of `runs` at the server. */
  version: null,
  /** {metric: label}, as in the terminal. */
  labels: {},
  /** Name of the current view. */
  view: "curves",
  /** Names of the runs that were chosen last, for views whose address does not name them. */
  selection: [],
  /** {run: place of its color}. A run keeps its color while it is chosen. */
  places: new Map(),
  curves: new Curves(),
  main: document.getElementById("main"),

  /** Show a view. Empty parameters are left out of the address. */
  go(view, parameters = {}, { replace = false } = {}) {
    const address = app.address(view, parameters);
    if (!replace) {
      location.hash = address;
      return;
    }
    history.replaceState(null, "", address);
    app.parameters = readAddress().parameters;
    showTabs();
  },

  address(view, parameters = {}) {
    const kept = Object.entries(parameters).filter(([, value]) => value !== "" && value !== null);
    const query = new URLSearchParams(kept).toString();
    return `#/${view}${query ? `?${query}` : ""}`;
  },

  /** Run of the address, or else the first chosen one. */
  run() {
    return app.runs.find((run) => run.name === app.parameters.run) ?? app.chosen()[0] ?? null;
  },

  /** Runs to compare: those of the address, or those chosen last, or else the newest run. */
  chosen() {
    const { runs, run } = app.parameters;
    const named = runs ? runs.split(",") : run && !app.selection.includes(run) ? [run] : app.selection;
    const chosen = named.map((name) => app.runs.find((each) => each.name === name)).filter(Boolean);
    if (chosen.length > 0) return chosen.slice(0, MAX_COMPARED);
    return [...app.runs].sort((a, b) => (b.time ?? 0) - (a.time ?? 0)).slice(0, 1);
  },

  /** Add a run to the chosen ones, or remove it. */
  toggle(run) {
    const names = app.chosen().map((each) => each.name);
    const others = names.filter((name) => name !== run.name);
    const chosen = others.length < names.length ? others : [...names, run.name];
    app.selection = chosen;
    app.go(app.view, { runs: chosen.join(",") }, { replace: true });
    if (app.view === "curves") update();
    else navigate();
  },

  /** CSS variable of a chosen run's color. */
  colorOf(run) {
    const names = app.chosen().map((each) => each.name);
    for (const name of app.places.keys()) if (!names.includes(name)) app.places.delete(name);
    for (const name of names) {
      const taken = [...app.places.values()];
      if (!app.places.has(name)) app.places.set(name, [...names.keys()].find((place) => !taken.includes(place)));
    }
    return runColor(app.places.get(run.name));
  },

  label: (metric) => app.labels[metric] ?? metric,

  /** Address of a view with the chosen runs. */
  tabAddress(tab) {
    const names = app.chosen().map((run) => run.name).join(",");
    return app.address(tab, tab === "episodes" ? { run: app.run()?.name ?? "" } : { runs: names });
  },

  parameters: {},
};

let view = null;
const rail = new RunsRail(app);

function readAddress() {
  const [name, query] = location.hash.replace(/^#\/?/, "").split("?");
  return {
    name: VIEWS[name] ? name : "curves",
    parameters: Object.fromEntries(new URLSearchParams(query ?? "")),
  };
}

function showTabs() {
  const { name } = readAddress();
  const current = TAB_OF[name] ?? name;
  for (const tab of Object.keys(VIEWS)) {
    const link = document.getElementById(`to-${tab}`);
    if (!link) continue;
    if (tab === current) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
    link.href = app.tabAddress(tab);
  }
}

function navigate() {
  if (location.hash === "#main") return; // the link that skips the header
  const { name, parameters } = readAddress();
  app.parameters = parameters;
  app.view = name;
  if (app.runs.length > 0) app.selection = app.chosen().map((run) => run.name);
  document.body.dataset.rail = WITH_RAIL.includes(name) && app.runs.length > 0 ? "shown" : "hidden";
  showTabs();
  rail.update();
  view?.close?.();
  if (app.runs.length === 0) {
    fill(
      app.main,
      element("h1", {}, "No runs yet"),
      element("p.soft", {}, "Runs appear here when they start."),
    );
    view = null;
    return;
  }
  view = new VIEWS[name](app);
  view.show();
}

async function poll() {
  const connection = document.getElementById("connection");
  try {
    if (document.hidden) return;
    const hadRuns = app.runs.length > 0;
    const answer = await listRuns(app.version);
    if (answer.runs) Object.assign(app, answer);
    connection.textContent = "";
    if (!hadRuns || view === null) navigate();
    else await update();
  } catch (error) {
    connection.textContent =
      error instanceof TypeError ? "the server does not respond" : error.message;
  } finally {
    const isReading = app.runs.some((run) => !run.is_checked);
    setTimeout(poll, isReading ? READING_MILLISECONDS : POLL_MILLISECONDS);
  }
}

async function update() {
  rail.update();
  showTabs();
  await view?.update?.();
}

// -- theme ----------------------------------------------------------------------------------------

const THEMES = ["system", "light", "dark"];
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
let chosenTheme = localStorage.getItem("theme");
if (!THEMES.includes(chosenTheme)) chosenTheme = "system";

function showTheme() {
  const system = systemIsDark.matches ? "dark" : "light";
  document.documentElement.dataset.theme = chosenTheme === "system" ? system : chosenTheme;
  document.getElementById("theme").textContent = `Theme: ${chosenTheme}`;
  view?.recolor?.();
}

document.getElementById("theme").addEventListener("click", () => {
  chosenTheme = THEMES[(THEMES.indexOf(chosenTheme) + 1) % THEMES.length];
  localStorage.setItem("theme", chosenTheme);
  showTheme();
});
systemIsDark.addEventListener("change", showTheme);

// -- keys -----------------------------------------------------------------------------------------

const keys = document.getElementById("keys");
document.getElementById("help").addEventListener("click", () => keys.showModal());

document.addEventListener("keydown", (event) => {
  const isTyping = event.target.matches("input, select, textarea");
  if (event.ctrlKey || event.metaKey || event.altKey || keys.open) return;
  if (isTyping) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.key === "?") keys.showModal();
  else if (event.key === "1") location.hash = app.tabAddress("curves");
  else if (event.key === "2") location.hash = app.tabAddress("episodes");
  else if (event.key === "3") location.hash = app.tabAddress("config");
  else if (event.key === "r" && document.body.dataset.rail === "shown") rail.focus();
  else if (!view?.key?.(event.key)) return;
  event.preventDefault();
});

addEventListener("hashchange", navigate);
showTheme();
poll();
