// The page: current view, its runs, theme and keyboard shortcuts.

import { Curves, listRuns } from "./api.js";
import { ConfigView } from "./config_view.js";
import { CurvesView } from "./curves_view.js";
import { element, fill } from "./dom.js";
import { EpisodeView } from "./episode_view.js";
import { EpisodesView } from "./episodes_view.js";
import { GroupView } from "./group_view.js";

const POLL_MILLISECONDS = 2000;
const VIEWS = {
  curves: CurvesView,
  episodes: EpisodesView,
  episode: EpisodeView,
  group: GroupView,
  config: ConfigView,
};
const TAB_OF = { episode: "episodes", group: "episodes" };

/** State and actions that all views share. */
const app = {
  runs: [],
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

  /** Run of the address, or else the first running one, or else the first of all. */
  run() {
    const named = app.runs.find((run) => run.name === app.parameters.run);
    return named ?? app.runs.find((run) => run.state === "running") ?? app.runs[0] ?? null;
  },

  parameters: {},
};

let view = null;

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
    if (tab !== "curves") link.href = app.address(tab, { run: app.parameters.run ?? "" });
  }
}

function navigate() {
  if (location.hash === "#main") return; // the link that skips the header
  const { name, parameters } = readAddress();
  app.parameters = parameters;
  showTabs();
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
    app.runs = await listRuns();
    connection.textContent = "";
    if (!hadRuns || view === null) navigate();
    else await view.update?.();
  } catch (error) {
    connection.textContent =
      error instanceof TypeError ? "the server does not respond" : error.message;
  } finally {
    setTimeout(poll, POLL_MILLISECONDS);
  }
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
  else if (event.key === "1") app.go("curves");
  else if (event.key === "2") app.go("episodes", { run: app.parameters.run ?? "" });
  else if (event.key === "3") app.go("config", { run: app.parameters.run ?? "" });
  else if (!view?.key?.(event.key)) return;
  event.preventDefault();
});

addEventListener("hashchange", navigate);
showTheme();
poll();
