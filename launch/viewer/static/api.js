// Requests to the server. Responses are JSON. Errors have the message of the server.

async function get(path, parameters = {}, signal = undefined) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== "" && value !== null && value !== undefined) {
      for (const one of [value].flat()) query.append(name, one);
    }
  }
  const response = await fetch(`${path}?${query}`, { signal });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error ?? response.statusText);
  return answer;
}

const ofRun = (run) => `/api/runs/${encodeURIComponent(run)}`;

/** Fetch {version, runs, labels}. Without runs and labels if `known` is their version. */
export const listRuns = (known) => get("/api/runs", { known });
export const readConfig = (run) => get(`${ofRun(run)}/config`);
export const compareConfigs = (runs) => get("/api/compare", { run: runs });
export const episodeAddress = (run, id) => `${ofRun(run)}/episodes/${id}`;
export const findEpisodes = (run, query, signal) => get(`${ofRun(run)}/episodes`, query, signal);
export const readEpisode = (run, id, signal) => get(episodeAddress(run, id), {}, signal);

/** Curves of runs. Each update fetches only new steps. */
export class Curves {
  constructor() {
    this.known = new Map();
  }

  /** Fetch the new steps of a run. Returns true if there are any. */
  async refresh(run) {
    const before = this.known.get(run.name);
    if (before && before.generation === run.generation && before.steps.length === run.records) {
      return false;
    }
    const answer = await get(`${ofRun(run.name)}/curves`, {
      generation: before?.generation ?? -1,
      after: before?.steps.length ?? 0,
    });
    const isContinued = before && answer.generation === before.generation && answer.after > 0;
    this.known.set(run.name, isContinued ? joined(before, answer) : answer);
    return true;
  }

  of(name) {
    return this.known.get(name);
  }
}

/** Append new steps to the known ones. A metric that a step lacks is null at this step. */
function joined(before, answer) {
  const metrics = {};
  const names = new Set([...Object.keys(before.metrics), ...Object.keys(answer.metrics)]);
  for (const name of names) {
    const old = before.metrics[name] ?? new Array(before.steps.length).fill(null);
    const added = answer.metrics[name] ?? new Array(answer.steps.length).fill(null);
    metrics[name] = old.concat(added);
  }
  return {
    ...answer,
    steps: before.steps.concat(answer.steps),
    times: before.times.concat(answer.times),
    metrics,
  };
}
