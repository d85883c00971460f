// One answer in the conversation.

import { element } from "./dom.js";
import * as format from "./format.js";
import { TokenSplitter } from "./tokens.js";

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
      span = element("span", { className: `token ${how}` });
      if (token) span.title = `${how} · ${format.percent(Math.exp(token.logprob))} likely`;
      this.#spans.set(token, span);
      this.#text.append(span);
    }
    span.append(text);
    this.#last = token;
  }

  end(summary) {
    const reasons = { stop: "complete", length: "ended by max tokens", stopped: "stopped" };
    this.#foot.textContent = [reasons[this.finishReason] ?? "incomplete", ...summary].join(" · ");
    this.#spans.clear();
  }
}
