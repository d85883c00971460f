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
  text = "";
  finishReason = null;

  constructor(model) {
    const head = element("div", { className: "turn-head" }, element("span", { textContent: model }));
    this.root = element("article", { className: "turn answer", ariaLabel: `Answer of ${model}` }, head, this.#text, this.#foot);
  }

  /** Adds a chunk's choice; returns its tokens. */
  add(choice) {
    const content = choice.delta.content ?? "";
    const statuses = choice.draft_status ?? [];
    const tokens = (choice.logprobs?.content ?? []).map(({ token, logprob }, i) => ({
      text: token, logprob, drafted: statuses[i] === "drafted",
    }));
    for (const { token, text } of this.#splitter.push(tokens, content)) this.#write(token ?? this.#last, text);
    this.text += content;
    this.finishReason = choice.finish_reason ?? this.finishReason;
    return tokens;
  }

  #write(token, text) {
    let span = this.#spans.get(token);
    if (!span) {
      const how = token?.drafted ? "drafted" : "sampled";
      // A round ends with the token that the model samples behind the drafts that it accepts.
      const begins = this.#last !== null && !this.#last.drafted;
      span = element("span", { className: `token ${how}${begins ? " round" : ""}` });
      if (token) span.title = `${how} · ${format.percent(Math.exp(token.logprob))} likely`;
      if (token?.drafted) this.root.classList.add("has-drafts"); // without any there are no rounds to see
      this.#spans.set(token, span);
      this.#text.append(span);
    }
    span.append(text);
    this.#last = token;
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
    const reasons = { stop: "complete", length: "ended by max tokens", stopped: "stopped" };
    this.#foot.textContent = [reasons[this.finishReason] ?? "incomplete", ...summary].join(" · ");
    this.#spans.clear();
  }
}
