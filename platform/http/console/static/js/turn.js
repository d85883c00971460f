// One answer in the conversation.

import { element } from "./dom.js";
import * as format from "./format.js";
import { TokenSplitter } from "./tokens.js";

const NEAR = 40; // pixels

export class Turn {
  #splitter = new TokenSplitter();
  #text = element("div", { className: "turn-text" });
  #foot = element("div", { className: "turn-foot" });
  #spans = new Map(); // token -> its element
  #last = null;
  #round = 0; // of the next token: a round is one verification, and ends with the token that the model samples
  #rejections = []; // {round, count} whose place in the text has not come yet
  #calls = []; // {shown, message}: an element, and the call as a message has it
  text = "";
  finishReason = null;

  constructor(model) {
    const head = element("div", { className: "turn-head" }, element("span", { textContent: model }));
    this.root = element("article", { className: "turn answer", ariaLabel: `Answer of ${model}` }, head, this.#text, this.#foot);
  }

  /** Adds a chunk's choice; returns its tokens. */
  add(choice) {
    const content = choice.delta.content ?? "";
    const { draft_status: statuses = [], rejected_drafts: rejected = [] } = choice;
    const tokens = (choice.logprobs?.content ?? []).map(({ token, logprob }, i) => {
      const drafted = statuses[i] === "drafted";
      const round = this.#round;
      if (rejected[i]) this.#rejections.push({ round, count: rejected[i] });
      if (!drafted) this.#round++;
      return { text: token, logprob, drafted, round };
    });
    for (const { token, text } of this.#splitter.push(tokens, content)) this.#write(token ?? this.#last, text);
    this.text += content;
    for (const call of choice.delta.tool_calls ?? []) this.#call(call);
    this.finishReason = choice.finish_reason ?? this.finishReason;
    return tokens;
  }

  /** Adds a delta of a call of a tool, which is shown as NAME ARGUMENTS on a line of its own. */
  #call({ index, id, function: { name, arguments: more = "" } }) {
    if (!this.#calls[index]) {
      const shown = element("div", { className: "turn-call", textContent: `${name} ` });
      this.#text.append(shown);
      this.#calls[index] = { shown, message: { id, type: "function", function: { name, arguments: "" } } };
    }
    const { shown, message } = this.#calls[index];
    message.function.arguments += more;
    shown.append(more);
  }

  /** The answer as a message of the conversation. */
  message() {
    const calls = this.#calls.map(({ message }) => message);
    return { role: "assistant", content: this.text, ...(calls.length > 0 && { tool_calls: calls }) };
  }

  #write(token, text) {
    let span = this.#spans.get(token);
    if (!span) {
      const how = token?.drafted ? "drafted" : "sampled";
      const begins = this.#last !== null && this.#last.round !== token?.round;
      span = element("span", { className: `token ${how}${begins ? " round" : ""}` });
      if (token) span.title = `${how} · ${format.percent(Math.exp(token.logprob))} likely`;
      if (token && !token.drafted) this.#reject(span, token.round);
      if (token?.drafted || span.dataset.rejected) this.root.classList.add("has-drafts"); // else there are no rounds to see
      this.#spans.set(token, span);
      this.#text.append(span);
    }
    span.append(text);
    this.#last = token;
  }

  /** Marks the place of rejected drafts, up to those of `round`: in front of the token that the model sampled instead. */
  #reject(span, round) {
    let count = 0;
    while (this.#rejections.length > 0 && this.#rejections[0].round <= round) count += this.#rejections.shift().count;
    if (count === 0) return;
    span.dataset.rejected = count;
    span.title += `${span.title && " · "}${format.plural(count, "draft")} rejected here`;
  }

  /** Whether the reader sees the end, or nearly: in the conversation and on the page, which scrolls on a phone. */
  get endIsSeen() {
    const log = this.root.parentElement;
    if (log === null) return false; // of a conversation that is gone
    const inLog = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR;
    return inLog && this.#foot.getBoundingClientRect().bottom < window.innerHeight + NEAR;
  }

  showEnd() {
    this.#foot.scrollIntoView({ block: "nearest", behavior: "instant" });
  }

  end(summary) {
    const reasons = { stop: "complete", tool_calls: "calls a tool", length: "ended by max tokens", stopped: "stopped" };
    if (this.#rejections.length > 0) { // at the end, behind which there is no text
      const span = element("span", { className: "rejections" });
      this.#reject(span, Infinity);
      this.#text.append(span);
    }
    this.#foot.textContent = [reasons[this.finishReason] ?? "incomplete", ...summary].join(" · ");
    this.#spans.clear();
  }
}
