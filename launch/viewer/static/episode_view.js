// View of one episode, as a conversation or as colored tokens.

import { episodeAddress, findEpisodes, readEpisode } from "./api.js";
import { COLORINGS, available, facts, strengths } from "./coloring.js";
import { conversationText, messageNode, outcome, rewardClass } from "./conversation.js";
import { copyButton } from "./copying.js";
import { element, fill, labeled, select } from "./dom.js";
import { number, visible } from "./format.js";
import { timeline } from "./timeline.js";

/** Facts of an episode at its side: [name, text or null]. */
const SIDE_FACTS = [
  ["run", (episode, app) => app.run().name],
  ["step", (episode) => number(episode.step)],
  ["split", (episode) => episode.split.replace("_", "-")],
  ["task of the step", (episode) => number(episode.group)],
  ["sample", (episode) => number(episode.sample)],
  ["turns of the policy", (episode) => number(episode.assistant_turns)],
  ["weight versions", ({ oldest_version: from, newest_version: to }) => (from === null ? null : from === to ? number(from) : `${from} to ${to}`)],
  ["engine-trainer gap (nats)", (episode) => (episode.log_prob_gap === null ? null : number(episode.log_prob_gap, 3))],
];

export class EpisodeView {
  constructor(app) {
    this.app = app;
    this.request = new AbortController();
    this.token = null;
  }

  async show() {
    const { id } = this.app.parameters;
    fill(this.app.main, element("p.soft", {}, "Loading …"));
    try {
      this.episode = await readEpisode(this.app.run().name, id, this.request.signal);
    } catch (error) {
      if (error.name !== "AbortError") fill(this.app.main, element("p.finding.bad", {}, error.message));
      return;
    }
    const { step, split, group, sample, task_id: task } = this.episode;
    const isConversation = rewardClass(this.episode) === "unjudged";
    const place = isConversation
      ? `conversation of step ${step}`
      : `step ${step}, ${split?.replace("_", "-")}, task ${group}, sample ${sample}`;
    this.content = element(`div.content.${rewardClass(this.episode)}`);
    this.details = element("dl.details.card", { "aria-live": "polite", hidden: true });
    this.tools = element("div.controls");
    fill(
      this.app.main,
      element("p", {}, element("a", { href: this.backAddress() }, "← All episodes")),
      element("h1", {}, task || "Task without a name"),
      element("p.soft", {}, place),
      outcome(this.episode),
      this.tools,
      element("div.episode", {}, element("div.side", {}, this.details, this.side()), this.content),
    );
    this.draw();
  }

  /** Timeline and facts, at the right of a wide screen. */
  side() {
    const facts = SIDE_FACTS.map(([name, text]) => [name, text(this.episode, this.app)]);
    return [
      timeline(this.episode, (token) => this.scrollTo(token)),
      element(
        "dl.card.facts-list",
        {},
        facts
          .filter(([, text]) => text !== null)
          .map(([name, text]) => element("div", {}, element("dt", {}, name), element("dd", {}, text))),
      ),
    ];
  }

  /** Scroll to the message of a token. */
  scrollTo(token) {
    const messages = [...this.content.querySelectorAll("[data-start]")];
    const ends = (node) => this.episode.messages.find((message) => message.start === Number(node.dataset.start)).end;
    const found = messages.find((node) => token < ends(node)) ?? messages.at(-1);
    if (found?.matches("details")) found.open = true;
    found?.scrollIntoView({ block: "start" });
    messages.forEach((node) => node.classList.toggle("found", node === found));
  }

  backAddress() {
    const { id, view, color, offset = "0", ...rest } = this.app.parameters;
    const page = Math.floor(Number(offset) / 50) * 50;
    return this.app.address("episodes", { ...rest, offset: page || "" });
  }

  groupAddress() {
    const { step, split, group } = this.episode;
    return this.app.address("group", { run: this.app.run().name, step, split, group });
  }

  set(changes) {
    this.app.go("episode", { ...this.app.parameters, ...changes }, { replace: true });
    this.draw();
  }

  draw() {
    const { view = "conversation" } = this.app.parameters;
    const choices = available(this.episode);
    const color = choices.includes(this.app.parameters.color) ? this.app.parameters.color : choices[0];
    const button = (name, title) =>
      element("button", { type: "button", "aria-pressed": String(view === name), onclick: () => this.set({ view: name }) }, title);

    const colors = select(
      choices.map((name) => [name, COLORINGS[name][0]]),
      color,
      (name) => this.set({ color: name }),
    );
    fill(
      this.tools,
      element("div.switch", { role: "group", "aria-label": "View" }, button("conversation", "Conversation"), button("tokens", "Tokens")),
      view === "tokens" ? labeled("Color", colors) : null,
      view === "tokens" ? element("span.soft", {}, COLORINGS[color]?.[1] ?? "") : null,
      rewardClass(this.episode) === "unjudged" ? null : element("a.button", { href: this.groupAddress() }, "Same task side by side"),
      element("button", { type: "button", onclick: () => this.move(-1) }, "Previous"),
      element("button", { type: "button", onclick: () => this.move(1) }, "Next"),
      copyButton("Copy conversation", "Copy the whole conversation as text", () => conversationText(this.episode)),
      element("a.button", { href: this.exportAddress(), download: this.fileName() }, "Export as JSON"),
    );
    this.details.hidden = view !== "tokens";
    if (view === "tokens") this.drawTokens(color);
    else fill(this.content, this.episode.messages.map(messageNode));
  }

  drawTokens(color) {
    const strength = strengths(color, this.episode);
    this.spans = [];
    const messages = this.episode.messages.map((message) => {
      const spans = [];
      for (let i = message.start; i < message.end; i++) spans.push(this.tokenNode(i, strength[i]));
      const who = [message.role, message.channel, message.recipient && `→ ${message.recipient}`];
      return element(
        "section.message",
        { "data-start": message.start },
        element("span.who", {}, element("b", {}, who.filter(Boolean).join(" "))),
        element("pre.tokens", {}, spans),
      );
    });
    fill(
      this.details,
      element("div", {}, element("dt", {}, "Token"), element("dd", {}, "Click one, or use ← and →.")),
    );
    const tokens = element(
      "div",
      {
        onclick: (event) => {
          const place = event.target.dataset?.i;
          if (place !== undefined) this.choose(Number(place));
        },
      },
      messages,
    );
    fill(this.content, tokens);
    if (this.token !== null) this.choose(this.token, false);
  }

  tokenNode(i, strength) {
    const text = visible(this.episode.texts[i]).replaceAll("\n", "⏎\n");
    const node = element("span.token", { "data-i": i }, text);
    if (strength !== null && strength !== undefined) {
      node.classList.add(strength < 0 ? "less" : "more");
      node.style.setProperty("--strength", `${Math.round(Math.abs(strength) * 100)}%`);
    }
    if (this.episode.loss_mask[i]) node.classList.add("sampled");
    this.spans[i] = node;
    return node;
  }

  /** Show the recorded values of a token. */
  choose(i, scrolls = true) {
    this.spans[this.token]?.classList.remove("chosen");
    this.token = i;
    this.spans[i]?.classList.add("chosen");
    if (scrolls) this.spans[i]?.scrollIntoView({ block: "nearest" });
    const text = JSON.stringify(this.episode.texts[i]);
    fill(
      this.details,
      element("div", {}, element("dt", {}, "text"), element("dd", {}, text)),
      facts(this.episode, i).map(([name, value]) =>
        element("div", {}, element("dt", {}, name), element("dd", {}, number(value, 6))),
      ),
    );
  }

  exportAddress() {
    return episodeAddress(this.app.run().name, this.episode.id);
  }

  fileName() {
    const { step, split, group, sample } = this.episode;
    return `${this.app.run().name}-step${step}-${split}-${group}-${sample}.json`;
  }

  /** Go to the next or previous episode of the table, with its filters and order. */
  async move(by) {
    const { id, view, color, run, offset = "0", ...filters } = this.app.parameters;
    const next = Number(offset) + by;
    if (next < 0) return;
    const page = await findEpisodes(this.app.run().name, { ...filters, offset: next, limit: 1 });
    if (page.rows.length > 0) this.app.go("episode", { ...this.app.parameters, id: page.rows[0].id, offset: next });
  }

  key(key) {
    const { view = "conversation", color } = this.app.parameters;
    if (!this.episode) return false;
    if (key === "t") this.set({ view: view === "tokens" ? "conversation" : "tokens" });
    else if (key === "c") {
      const choices = available(this.episode);
      this.set({ view: "tokens", color: choices[(Math.max(0, choices.indexOf(color)) + 1) % choices.length] });
    } else if (key === "g") location.hash = this.groupAddress();
    else if (key === "j") this.move(1);
    else if (key === "k") this.move(-1);
    else if (key === "Escape") location.hash = this.backAddress();
    else if (view === "tokens" && (key === "ArrowRight" || key === "ArrowLeft")) {
      const by = key === "ArrowRight" ? 1 : -1;
      const next = this.token === null ? 0 : this.token + by;
      this.choose(Math.max(0, Math.min(this.episode.token_ids.length - 1, next)));
    } else return false;
    return true;
  }

  close() {
    this.request.abort();
  }
}
