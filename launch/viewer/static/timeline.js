// Turns of an episode on a timeline: when each was sampled, when tools worked, when it waited.

import { element } from "./dom.js";
import { number } from "./format.js";

const WORK = { assistant: "sampling", tool: "tool", user: "user", prompt: "prompt" };
/** Names in a conversation of supervised fine-tuning, which nothing sampled. */
const OF_CONVERSATION = { assistant: "in the loss", prompt: "context", user: "context" };

/** Seconds with a unit and few digits. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds >= 120) return `${number(seconds / 60, 3)} min`;
  return seconds >= 1 ? `${number(seconds, 3)} s` : `${Math.round(seconds * 1000)} ms`;
}

/**
 * Parts of the turns in order: [{turn, kind, start, size}]. The unit is seconds, or tokens if no
 * turn was timed.
 */
export function timelineParts(turns) {
  const isTimed = turns.some((turn) => turn.seconds !== null);
  const parts = [];
  let end = 0;
  const add = (turn, kind, size) => {
    if (size > 0) parts.push({ turn, kind, start: end, size });
    end += Math.max(0, size);
  };
  for (const turn of turns) {
    if (!isTimed) add(turn, WORK[turn.role] ?? "tool", turn.end - turn.start);
    else {
      add(turn, "waiting", turn.waited ?? 0);
      add(turn, WORK[turn.role] ?? "tool", turn.seconds ?? 0);
    }
  }
  return { parts, total: end, isTimed };
}

/**
 * Create the timeline.
 * @param {object} episode
 * @param {function} show is called with the first token of a turn that the user chooses
 */
export function timeline(episode, show) {
  const { parts, total, isTimed } = timelineParts(episode.turns);
  if (episode.turns.length === 0) return null;
  const isConversation = (episode.reward ?? null) === null && !episode.invalid;
  const names = isConversation ? OF_CONVERSATION : WORK;
  const percent = (size) => `${((100 * size) / (total || 1)).toFixed(2)}%`;

  const rows = episode.turns.map((turn, place) => {
    const own = parts.filter((part) => part.turn === turn);
    const bars = own.map(({ kind, start, size }) => {
      const bar = element("span.bar", { "data-kind": kind });
      bar.style.setProperty("--start", percent(start));
      bar.style.setProperty("--size", percent(size));
      return bar;
    });
    const facts = [
      isTimed && turn.waited >= 0.001 ? `waited ${duration(turn.waited)}` : "",
      isTimed ? duration(turn.seconds) : "",
      turn.end - turn.start === 1 ? "1 token" : `${number(turn.end - turn.start)} tokens`,
    ];
    return element(
      "li",
      {},
      element(
        "button.turn",
        { type: "button", onclick: () => show(turn.start) },
        element("span.turn-name", {}, `${place + 1} ${names[turn.role] ?? turn.role}`),
        element("span.bars", { "aria-hidden": "true" }, bars),
        element("span.turn-facts", {}, facts.filter(Boolean).join(", ")),
      ),
    );
  });
  return element(
    "details.card.timeline",
    // On a narrow screen the conversation follows below.
    { open: matchMedia("(min-width: 901px)").matches },
    element("summary", {}, isTimed ? `Timeline: ${duration(total)}` : "Turns by tokens"),
    isTimed ? totals(parts) : null,
    element("ol", {}, rows),
  );
}

/** Seconds of each kind of work. */
function totals(parts) {
  const sums = new Map();
  for (const { kind, size } of parts) sums.set(kind, (sums.get(kind) ?? 0) + size);
  const entries = [...sums].map(([kind, size]) =>
    element("span.total", {}, element("span.bar-key", { "data-kind": kind }), ` ${kind} ${duration(size)}`),
  );
  return element("div.totals", {}, entries);
}
