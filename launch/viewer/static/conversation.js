// An episode as a conversation.

import { element } from "./dom.js";
import { number, visible } from "./format.js";

const FOLDED = ["system", "developer"];

/** Create the node of one message. */
export function messageNode(message) {
  const isCall = message.recipient !== null && message.role === "assistant";
  const isCode = isCall || !["system", "developer", "user", "assistant"].includes(message.role);
  const title = element(
    "span.who",
    {},
    element("b", {}, message.role),
    message.channel ? ` ${message.channel}` : "",
    isCall ? ` → ${message.recipient}` : "",
    message.content_type ? ` (${message.content_type.replace("<|constrain|>", "")})` : "",
    message.ended_by === null ? element("span.cut", {}, " cut short") : "",
  );
  const text = element(isCode ? "pre.code" : "div.text", {}, visible(message.text));
  if (isCode) text.tabIndex = 0;
  const classes = ["message", message.is_sampled ? "sampled" : "given", message.channel ?? "none"];
  const isFolded = FOLDED.includes(message.role) && !message.is_sampled;
  const node = isFolded
    ? element("details", {}, element("summary", {}, title), text)
    : element("section", {}, title, text);
  node.classList.add(...classes.map((name) => name.replace(/\W/g, "_")));
  return node;
}

/** Summary of the result of an episode, in one line. */
export function outcome(episode) {
  const pill = (text, kind = "") => element("span.pill", { className: `pill ${kind}` }, text);
  const parts = Object.entries(episode.reward_parts ?? {}).map(([name, value]) => `${name} ${round(value)}`);
  return element(
    "div.outcome",
    {},
    episode.invalid
      ? pill(`invalid, ${episode.invalid}: ${episode.invalid_reason}`, "bad")
      : pill(`reward ${round(episode.reward)}`, episode.reward > 0 ? "good" : "bad"),
    (episode.advantage ?? null) === null ? null : pill(`advantage ${round(episode.advantage)}`),
    parts.length > 0 ? pill(parts.join(", ")) : null,
    pill(`ends: ${episode.format_error ? `format error, ${episode.format_error}` : episode.finish_reason}`),
    episode.excluded ? pill("not trained on", "bad") : null,
    pill(`tool calls ${episode.tool_calls}, failed ${episode.tool_errors}`),
    pill(`${number(episode.sampled_tokens)} of ${number(episode.tokens)} tokens sampled`),
    (episode.answer ?? null) === null ? null : pill(`answer ${episode.answer.slice(0, 80)}`),
    (episode.expected_answer ?? null) === null ? null : pill(`expected ${episode.expected_answer.slice(0, 80)}`),
  );
}

const round = (value) => ((value ?? null) === null ? "none" : String(Number(value.toPrecision(4))));
