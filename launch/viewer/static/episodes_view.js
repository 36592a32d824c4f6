// Table of all recorded episodes. The server filters, sorts and pages it.

import { findEpisodes } from "./api.js";
import { debounced, element, fill, labeled, select } from "./dom.js";
import { number } from "./format.js";

const PAGE = 50;

/** [column, title, is a number, text] */
const COLUMNS = [
  ["step", "Step", true, (row) => number(row.step)],
  ["split", "Split", false, (row) => (row.split ?? "").replace("_", "-")],
  ["task_id", "Task", false, (row) => row.task_id || "without a name"],
  ["sample", "Sample", true, (row) => number(row.sample)],
  ["reward", "Reward", true, (row) => (row.invalid ? `invalid: ${row.invalid}` : number(row.reward))],
  ["advantage", "Advantage", true, (row) => number(row.advantage)],
  ["finish_reason", "End", false, (row) => row.format_error ?? row.finish_reason ?? ""],
  ["tool_calls", "Tool calls", true, toolCalls],
  ["assistant_turns", "Turns", true, (row) => number(row.assistant_turns)],
  ["tokens", "Tokens", true, (row) => number(row.tokens)],
  ["sampled_tokens", "Sampled", true, (row) => number(row.sampled_tokens)],
  ["log_prob_gap", "Gap (nats)", true, (row) => number(row.log_prob_gap, 2)],
  ["answer", "Answer", false, (row) => (row.answer ?? "").slice(0, 60)],
  ["expected_answer", "Expected", false, (row) => (row.expected_answer ?? "").slice(0, 60)],
];

/** Columns of a run of supervised fine-tuning. Its conversations have no reward, and no ending. */
const OF_CONVERSATIONS = ["step", "task_id", "assistant_turns", "tokens", "sampled_tokens"];
const CONVERSATION_TITLES = {
  task_id: "Conversation",
  assistant_turns: "Turns in the loss",
  sampled_tokens: "Tokens in the loss",
};

/** Columns of a run's table, and their titles. */
function columnsOf(run) {
  if (run.kind !== "sft") return COLUMNS.filter(([name]) => name !== "tokens");
  return COLUMNS.filter(([name]) => OF_CONVERSATIONS.includes(name)).map(([name, title, ...rest]) => [
    name,
    CONVERSATION_TITLES[name] ?? title,
    ...rest,
  ]);
}

function toolCalls(row) {
  return row.tool_errors > 0 ? `${row.tool_calls}, ${row.tool_errors} failed` : number(row.tool_calls);
}

/** Filters with a text or a number: [name, title, type]. */
const INPUTS = [
  ["text", "Text in the episode", "search"],
  ["task", "Task", "search"],
  ["step_from", "From step", "number"],
  ["step_to", "to step", "number"],
  ["reward_from", "Reward from", "number"],
  ["reward_to", "to", "number"],
];

export class EpisodesView {
  constructor(app) {
    this.app = app;
    this.request = null;
    this.row = 0;
  }

  show() {
    if (!this.app.run().has_episodes) {
      this.showNone();
      return;
    }
    this.isOfSft = this.app.run().kind === "sft";
    this.columns = columnsOf(this.app.run());
    const inputs = this.isOfSft ? INPUTS.filter(([name]) => !name.startsWith("reward")) : INPUTS;
    const changed = debounced(200, (name, value) => this.filter(name, value));
    this.inputs = Object.fromEntries(
      inputs.map(([name, , type]) => [
        name,
        element("input", {
          type,
          step: "any",
          value: this.app.parameters[name] ?? "",
          oninput: (event) => changed(name, event.target.value),
        }),
      ]),
    );
    this.choices = element("span.choices");
    this.summary = element("p.soft", { role: "status" });
    this.damages = element("div");
    this.body = element("tbody");
    this.pages = element("nav.pages", { "aria-label": "Pages of the table" });
    this.head = element("tr");
    fill(
      this.app.main,
      element("h1", {}, this.title()),
      element(
        "form.controls",
        { role: "search", onsubmit: (event) => event.preventDefault() },
        inputs.map(([name, title]) => labeled(title, this.inputs[name])),
        this.choices,
      ),
      this.summary,
      this.damages,
      element(
        "div.scroll",
        { tabIndex: 0, role: "region", "aria-label": "Table of episodes" },
        element("table.episodes", {}, element("thead", {}, this.head), this.body),
      ),
      this.pages,
    );
    this.load();
  }

  title() {
    return `${this.isOfSft ? "Conversations" : "Episodes"} of ${this.app.run().name}`;
  }

  /** Show a message in place of the table. */
  showNone() {
    const why =
      "No episodes are recorded. gptoss rl and gptoss sft record them after their first step, unless tracking.episodes is 0.";
    this.isEmpty = true;
    fill(
      this.app.main,
      element("h1", {}, `Episodes of ${this.app.run().name}`),
      element("p.soft", { role: "status" }, why),
    );
  }

  /** Filters as query parameters of the server. */
  query() {
    const { run, ...rest } = this.app.parameters;
    return { limit: PAGE, ...rest };
  }

  filter(name, value) {
    const parameters = { ...this.app.parameters, run: this.app.run().name, offset: "", [name]: value };
    this.app.go("episodes", parameters, { replace: true });
    this.row = 0;
    this.load();
  }

  sort(column) {
    const { sort = "id", descending = "true" } = this.app.parameters;
    const isOtherWay = sort === column && descending === "true";
    const parameters = { ...this.app.parameters, sort: column, descending: String(!isOtherWay), offset: "" };
    this.app.go("episodes", parameters, { replace: true });
    this.load();
  }

  async load() {
    this.request?.abort();
    this.request = new AbortController();
    const { signal } = this.request;
    try {
      const page = await findEpisodes(this.app.run().name, this.query(), signal);
      this.page = page;
      this.draw(page);
      // Each request searches the text for a limited time, in the newest episodes first.
      if (page.searched < page.recorded) setTimeout(() => !signal.aborted && this.load(), 50);
    } catch (error) {
      if (error.name !== "AbortError") this.summary.textContent = error.message;
    }
  }

  /** Load new episodes of a run if the first page is shown. */
  update() {
    const isFirstPage = !Number(this.app.parameters.offset);
    const run = this.app.run();
    if (this.isEmpty) {
      if (!run.has_episodes) return;
      this.isEmpty = false;
      this.show();
    } else if (isFirstPage && run.records !== this.records) this.load();
    this.records = run.records;
  }

  draw(page) {
    const { sort = "id", descending = "true", offset = "0", split = "", finish = "", tools = "" } = this.app.parameters;
    const all = [["", "all"]];
    const ends = [...page.finish_reasons, "invalid"];
    if (!this.isOfSft && !this.choices.contains(document.activeElement)) {
      fill(
        this.choices,
        labeled("Split", select(all.concat(page.splits.map((s) => [s, s.replace("_", "-")])), split, (v) => this.filter("split", v))),
        labeled("End", select(all.concat(ends.map((e) => [e, e])), finish, (v) => this.filter("finish", v))),
        labeled("Tools", select([...all, ["errors", "with failed calls"], ["calls", "with calls"], ["none", "without calls"]], tools, (v) => this.filter("tools", v))),
      );
    }
    const isSearching = page.searched < page.recorded;
    const searched = isSearching ? `; ${number(page.searched)} of ${number(page.recorded)} searched …` : "";
    const rows = this.isOfSft ? "conversations" : "episodes";
    this.summary.textContent = `${number(page.total)} of ${number(page.recorded)} ${rows}${searched}`;

    fill(this.damages, page.damaged.map((text) => element("p.finding.bad", {}, element("b", {}, "Left out: "), text)));

    fill(this.head, this.columns.map((column) => this.heading(column, sort, descending)));
    fill(this.body, page.rows.map((row, place) => this.tableRow(row, place)));
    this.mark(Math.min(this.row, page.rows.length - 1), false);
    this.drawPages(page.total, Number(offset));
  }

  heading([name, title, isNumber], sort, descending) {
    const direction = descending === "true" ? "descending" : "ascending";
    const button = element("button.plain", { type: "button", onclick: () => this.sort(name) }, title);
    const heading = element("th", { scope: "col", className: isNumber ? "number" : "" }, button);
    if (sort === name) heading.setAttribute("aria-sort", direction);
    return heading;
  }

  tableRow(row, place) {
    const address = this.episodeAddress(row, place);
    const cells = this.columns.map(([name, title, isNumber, text]) => {
      const shown = name === "task_id" ? element("a", { href: address }, text(row)) : text(row);
      return element("td", { className: isNumber ? "number" : "", "data-label": title }, shown);
    });
    const made = element("tr", { onclick: () => this.app.go("episode", this.episodeParameters(row, place)) }, cells);
    if (row.reward !== null) made.classList.add(row.reward > 0 ? "good" : "bad");
    return made;
  }

  episodeParameters(row, place) {
    const offset = Number(this.app.parameters.offset ?? 0) + place;
    return { ...this.app.parameters, run: this.app.run().name, id: row.id, offset };
  }

  episodeAddress(row, place) {
    return this.app.address("episode", this.episodeParameters(row, place));
  }

  drawPages(total, offset) {
    const turn = (to) => {
      this.app.go("episodes", { ...this.app.parameters, offset: to || "" }, { replace: true });
      this.row = 0;
      this.load();
    };
    const last = Math.min(offset + PAGE, total);
    fill(
      this.pages,
      element("button", { type: "button", disabled: offset === 0, onclick: () => turn(Math.max(0, offset - PAGE)) }, "Previous"),
      element("span", {}, total === 0 ? "no episode matches" : `${number(offset + 1)} to ${number(last)} of ${number(total)}`),
      element("button", { type: "button", disabled: last >= total, onclick: () => turn(offset + PAGE) }, "Next"),
    );
  }

  /** Mark the row that is selected with the keyboard. */
  mark(row, moves = true) {
    this.row = Math.max(0, row);
    [...this.body.children].forEach((node, place) => node.classList.toggle("marked", place === this.row));
    if (moves) this.body.children[this.row]?.querySelector("a")?.focus();
  }

  key(key) {
    const rows = this.page?.rows ?? [];
    if (this.isEmpty) return false;
    if (key === "/") this.inputs.text.focus();
    else if (key === "j") this.mark(Math.min(this.row + 1, rows.length - 1));
    else if (key === "k") this.mark(this.row - 1);
    else return false;
    return true;
  }

  close() {
    this.request?.abort();
  }
}
