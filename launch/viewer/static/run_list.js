// Search, order and groups of runs.

/** {name: [title, compares two runs]} */
const ORDERS = {
  newest: ["newest first", (a, b) => (b.time ?? 0) - (a.time ?? 0)],
  name: ["name", () => 0],
  reward: ["highest reward", byHeadline("reward", -1)],
  held_out: ["highest held-out accuracy", byHeadline("held_out/accuracy", -1)],
  loss: ["lowest loss", byHeadline("loss", 1)],
  step: ["most steps", (a, b) => (b.step ?? -1) - (a.step ?? -1)],
};

/** {name: [title, group of a run]} */
const GROUPS = {
  none: ["no groups", null],
  kind: ["kind", (run) => [run.kind.toUpperCase() || "other"]],
  state: ["state", (run) => [run.state]],
  tag: ["tag", (run) => (run.tags.length > 0 ? run.tags : ["no tag"])],
  model: ["model", (run) => [run.model || "unknown model"]],
  data: ["data", (run) => [run.data || "unknown data"]],
};

export const orderChoices = () => Object.entries(ORDERS).map(([name, [title]]) => [name, title]);
export const groupChoices = () => Object.entries(GROUPS).map(([name, [title]]) => [name, title]);

/** Compare runs by a newest figure. Runs without it come last. `sign` is 1 for the lowest first. */
function byHeadline(name, sign) {
  return (a, b) => {
    const [one, other] = [a.headlines[name], b.headlines[name]];
    if (one === undefined || other === undefined) return Number(one === undefined) - Number(other === undefined);
    return sign * (one - other);
  };
}

/** Text in which a search looks for words. */
function searched(run) {
  return [run.name, run.kind, run.state, run.model, run.data, ...run.tags].join(" ").toLowerCase();
}

/**
 * Find, sort and group runs.
 * @param {Array} runs
 * @param {string} text words that all occur in name, kind, state, model, data or tags
 * @param {string} order of ORDERS
 * @param {string} grouping of GROUPS
 * @returns {Array<[string, Array]>} title and runs of each group. Without groups the title is "".
 */
export function arranged(runs, text, order, grouping) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const found = runs.filter((run) => words.every((word) => searched(run).includes(word)));
  const compare = (ORDERS[order] ?? ORDERS.newest)[1];
  found.sort((a, b) => compare(a, b) || a.name.localeCompare(b.name, "en", { numeric: true }));

  const groupsOf = (GROUPS[grouping] ?? GROUPS.none)[1];
  if (groupsOf === null) return found.length > 0 ? [["", found]] : [];
  const groups = new Map();
  for (const run of found) {
    for (const group of groupsOf(run)) groups.set(group, [...(groups.get(group) ?? []), run]);
  }
  return [...groups].sort(([a], [b]) => a.localeCompare(b));
}
