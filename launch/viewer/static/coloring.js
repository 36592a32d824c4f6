// Colorings of tokens. A coloring maps each token to a number from -1 to 1, or to null.

const exists = (column) => column !== null && column !== undefined;

/** Magnitude of the strongest color. It ignores a few outliers, which would make others pale. */
function scaleOf(values) {
  const sizes = values.filter((v) => v !== null && v !== undefined).map(Math.abs).sort((a, b) => a - b);
  return sizes[Math.floor(0.98 * (sizes.length - 1))] || sizes[sizes.length - 1] || 1;
}

const clipped = (value) => Math.max(-1, Math.min(1, value));

/** Number of each sampled token; null for others. */
function ofSampled(episode, values) {
  return values.map((value, i) => (episode.loss_mask[i] ? value : null));
}

function versions(episode) {
  const column = new Array(episode.token_ids.length).fill(null);
  for (const { start, end, version } of episode.weight_versions) column.fill(version, start, end);
  return column;
}

export function gaps(episode) {
  const trainer = episode.trainer_log_probs;
  if (!exists(trainer)) return null;
  return ofSampled(episode, trainer.map((value, i) => (value === null ? null : value - episode.rollout_log_probs[i])));
}

/** {name: [title, explanation, function of the episode that gives a number per token]} */
export const COLORINGS = {
  mask: ["Mask", "sampled by the policy", (episode) => episode.loss_mask.map((on) => (on ? 0.6 : null))],
  advantage: [
    "Advantage",
    "green: trained to be more likely, red: less likely",
    (episode) => exists(episode.advantages) && ofSampled(episode, episode.advantages),
  ],
  log_prob: [
    "Log-prob",
    "dark: a low probability in the engine",
    (episode) => ofSampled(episode, episode.rollout_log_probs),
  ],
  gap: [
    "Engine-trainer gap",
    "green: more likely in the trainer than in the engine, red: less likely",
    gaps,
  ],
  version: ["Weight version", "strong: sampled by new weights", versions],
  entropy: [
    "Entropy",
    "strong: an uncertain policy",
    (episode) => exists(episode.entropy) && ofSampled(episode, episode.entropy),
  ],
};

/** Colorings for which an episode has numbers. */
export function available(episode) {
  return Object.keys(COLORINGS).filter((name) => {
    const values = COLORINGS[name][2](episode);
    return Array.isArray(values) && values.some((value) => value !== null);
  });
}

/** Strength of the color of each token, between -1 and 1; null for none. */
export function strengths(name, episode) {
  const values = COLORINGS[name][2](episode);
  if (name === "mask") return values;
  if (name === "version") {
    const known = values.filter((value) => value !== null);
    const oldest = Math.min(...new Set(known));
    const newest = Math.max(...new Set(known));
    return values.map((v) => (v === null ? null : newest === oldest ? 0.5 : 0.15 + (0.85 * (v - oldest)) / (newest - oldest)));
  }
  const scale = scaleOf(values);
  return values.map((value) => (value === null ? null : clipped(value / scale)));
}

/** Recorded values of one token: [name, value] pairs. */
export function facts(episode, i) {
  const at = (column) => (exists(column) ? column[i] : null);
  const engine = episode.loss_mask[i] ? episode.rollout_log_probs[i] : null;
  const gap = gaps(episode)?.[i] ?? null;
  return [
    ["token", `${i} of ${episode.token_ids.length}, id ${episode.token_ids[i]}`],
    ["sampled", episode.loss_mask[i] ? "yes" : "no"],
    ["probability, engine", engine === null ? null : Math.exp(engine)],
    ["log-prob, engine", engine],
    ["log-prob, trainer", episode.loss_mask[i] ? at(episode.trainer_log_probs) : null],
    ["gap", gap],
    ["log-prob, reference", episode.loss_mask[i] ? at(episode.reference_log_probs) : null],
    ["advantage", episode.loss_mask[i] ? at(episode.advantages) : null],
    ["entropy", episode.loss_mask[i] ? at(episode.entropy) : null],
    ["value", episode.loss_mask[i] ? at(episode.values) : null],
    ["weight version", versions(episode)[i]],
    ["spliced", episode.spliced.some(({ start, end }) => start <= i && i < end) ? "yes" : null],
  ].filter(([, value]) => value !== null && value !== undefined);
}
