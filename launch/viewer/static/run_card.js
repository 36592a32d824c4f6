// State, newest figures and checks of one run.

import { chip } from "./chips.js";
import { element } from "./dom.js";
import { number } from "./format.js";
import { STATES, progress, worst } from "./rail.js";

/**
 * Create the card of a run.
 * @param {object} app
 * @param {object} run
 * @param {boolean} isOpen whether the list of checks is open
 * @param {boolean} isSmall whether problems are part of the list, as there are several cards
 */
export function runCard(app, run, isOpen, isSmall) {
  const swatch = element("span.swatch");
  if (isSmall) swatch.style.setProperty("--curve", `var(${app.colorOf(run)})`);
  const headlines = Object.entries(run.headlines).map(([name, value]) =>
    element("div", {}, element("dt", {}, app.label(name)), element("dd", {}, number(value, 3))),
  );
  const troubles = run.findings.filter((one) => one.level !== "good");
  const episodes = run.kind === "sft" ? "Conversations" : "Episodes";
  return element(
    `article.card.run-card${isSmall ? ".small" : ""}`,
    { "data-health": worst(run)?.level ?? "good" },
    element(
      "div.run-title",
      {},
      isSmall ? swatch : null,
      element("strong", {}, run.name),
      run.kind ? chip(run.kind, "", run.kind.toUpperCase()) : null,
      run.tags.map((tag) => chip("tag", "", tag)),
      element(`span.state.${run.state}`, {}, STATES[run.state]),
      element("span.progress", {}, progress(run)),
      run.has_episodes ? element("a", { href: app.address("episodes", { run: run.name }) }, episodes) : null,
    ),
    headlines.length > 0 ? element("dl.headlines", {}, headlines) : null,
    isSmall ? null : troubles.map(finding),
    checks(run, troubles, isOpen, isSmall),
  );
}

function finding(one) {
  return element(
    `p.finding.${one.level}`,
    {},
    element("b", {}, `${one.level === "bad" ? "Failed" : "Warning"}: ${one.check}. `),
    one.message,
  );
}

/** Folded list of the checks that passed, and in a small card of the problems. */
function checks(run, troubles, isOpen, isSmall) {
  const good = run.findings.filter((one) => one.level === "good");
  if (run.findings.length === 0) return null;
  let title = `${good.length} checks pass`;
  if (troubles.length === 0) title = `All ${title}`;
  else if (isSmall) title = `${troubles.length} of ${run.findings.length} checks report a problem`;
  const kind = troubles.length === 0 ? "well" : isSmall ? worst(run).level : "soft";
  return element(
    "details",
    { open: isOpen, "data-run": run.name },
    element(`summary.${kind}`, {}, title),
    isSmall ? troubles.map(finding) : null,
    element("ul", {}, good.map((one) => element("li", {}, `${one.check}: ${one.message}`))),
  );
}
