// An episode as a conversation.

import { chip } from "./chips.js";
import { copyButton } from "./copying.js";
import { element } from "./dom.js";
import { number, visible } from "./format.js";

const FOLDED = ["system", "developer"];

/** Author, channel and recipient of a message. */
function heading({ role, channel, recipient }) {
  return [role, channel, role === "assistant" && recipient && `to ${recipient}`].filter(Boolean).join(" ");
}

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
  const copy = copyButton("Copy", `Copy the message of ${heading(message)}`, () => message.text);
  const classes = ["message", message.is_sampled ? "sampled" : "given", message.channel ?? "none"];
  const isFolded = FOLDED.includes(message.role) && !message.is_sampled;
  const node = isFolded
    ? element("details", { "data-start": message.start }, element("summary", {}, title), copy, text)
    : element("section", { "data-start": message.start }, title, copy, text);
  node.classList.add(...classes.map((name) => name.replace(/\W/g, "_")));
  return node;
}

/** Conversation as plain text, for the clipboard. */
export function conversationText(episode) {
  return episode.messages.map((message) => `[${heading(message)}]\n${message.text}`).join("\n\n");
}

/** Chips with the result of an episode. */
export function outcome(episode) {
  const isJudged = (episode.reward ?? null) !== null;
  const parts = Object.entries(episode.reward_parts ?? {});
  const cut = (text) => (text.length > 80 ? `${text.slice(0, 80)} …` : text);
  const failed = episode.tool_errors > 0 ? `, ${episode.tool_errors} failed` : "";
  const isConversation = !isJudged && !episode.invalid;
  return element(
    "div.outcome",
    {},
    episode.invalid ? chip("problem", "invalid", `${episode.invalid}: ${episode.invalid_reason}`, "bad") : null,
    isJudged ? chip("reward", "reward", round(episode.reward), episode.reward > 0 ? "good" : "bad") : null,
    (episode.advantage ?? null) === null ? null : chip("reward", "advantage", round(episode.advantage)),
    parts.map(([name, value]) => chip("reward", name.replaceAll("_", " "), round(value))),
    isConversation ? null : chip("end", "ends", episode.format_error ? `format error, ${episode.format_error}` : episode.finish_reason),
    episode.excluded ? chip("problem", "", "not trained on", "bad") : null,
    isConversation ? null : chip("tools", "tool calls", `${episode.tool_calls}${failed}`),
    chip("tokens", isConversation ? "in the loss" : "sampled", `${number(episode.sampled_tokens)} of ${number(episode.tokens)} tokens`),
    (episode.answer ?? null) === null ? null : chip("answer", "answer", cut(episode.answer)),
    (episode.expected_answer ?? null) === null ? null : chip("answer", "expected", cut(episode.expected_answer)),
  );
}

/** Class of an episode's color: rewarded, unrewarded, or none for a conversation. */
export function rewardClass(episode) {
  if ((episode.reward ?? null) === null && !episode.invalid) return "unjudged";
  return episode.reward > 0 ? "rewarded" : "unrewarded";
}

const round = (value) => ((value ?? null) === null ? "none" : String(Number(value.toPrecision(4))));
