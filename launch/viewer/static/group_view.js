// View of the episodes of one task side by side, to compare good and bad ones.

import { findEpisodes, readEpisode } from "./api.js";
import { messageNode, outcome, rewardClass } from "./conversation.js";
import { element, fill } from "./dom.js";

export class GroupView {
  constructor(app) {
    this.app = app;
    this.request = new AbortController();
  }

  async show() {
    const { step, split, group } = this.app.parameters;
    const run = this.app.run().name;
    const { signal } = this.request;
    fill(this.app.main, element("p.soft", {}, "Loading …"));
    try {
      const query = { step_from: step, step_to: step, split, group, sort: "sample", descending: false, limit: 64 };
      const { rows } = await findEpisodes(run, query, signal);
      const episodes = await Promise.all(rows.map((row) => readEpisode(run, row.id, signal)));
      this.draw(episodes);
    } catch (error) {
      if (error.name !== "AbortError") fill(this.app.main, element("p.finding.bad", {}, error.message));
    }
  }

  draw(episodes) {
    const { step, split } = this.app.parameters;
    const prompt = episodes[0]?.messages.filter((message) => !message.is_sampled && message.role === "user")[0];
    fill(
      this.app.main,
      element("p", {}, element("a", { href: this.app.address("episodes", { run: this.app.run().name }) }, "← All episodes")),
      element("h1", {}, episodes.length === 0 ? "No such task" : episodes[0].task_id || "Task without a name"),
      element("p.soft", {}, `step ${step}, ${split?.replace("_", "-")}, ${episodes.length} ${episodes.length === 1 ? "episode" : "episodes"}`),
      prompt ? messageNode(prompt) : "",
      element(
        "div.siblings",
        { tabIndex: 0, role: "region", "aria-label": "Episodes side by side" },
        episodes.map((episode) => this.column(episode)),
      ),
    );
  }

  column(episode) {
    const address = this.app.address("episode", { run: this.app.run().name, id: episode.id });
    // All episodes have the same prompt.
    const first = episode.messages.findIndex((message) => message.is_sampled);
    return element(
      `article.card.${rewardClass(episode)}`,
      {},
      element("h2", {}, element("a", { href: address }, `Sample ${episode.sample}`)),
      outcome(episode),
      episode.messages.slice(Math.max(0, first)).map(messageNode),
    );
  }

  key(key) {
    if (key !== "Escape") return false;
    history.back();
    return true;
  }

  close() {
    this.request.abort();
  }
}
