// Small labeled values: the name of the value, and a color by kind.

import { element } from "./dom.js";

/**
 * Create a chip.
 * @param {string} kind of the value, which chooses its color: "rl", "sft", "tag", "reward", "end",
 *   "tools", "tokens", "answer" or "problem"
 * @param {string} name of the value; "" for none
 * @param {string} text
 * @param {string} state "good" or "bad" in place of the color of the kind
 */
export function chip(kind, name, text, state = "") {
  const made = element("span.chip", { className: `chip ${state}`, "data-kind": kind });
  if (name) made.append(element("span.chip-name", {}, name), " ");
  made.append(text);
  return made;
}
