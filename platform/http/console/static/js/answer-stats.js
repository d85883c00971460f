// The figures next to the conversation: of the answer that comes, or came last.

import { element, setText } from "./dom.js";
import * as format from "./format.js";

const NAMES = ["Acceptance length", "Tokens/s", "Time to first token", "Tokens", "Drafted", "Drafts rejected", "Acceptance rate", "Prompt tokens"];
const MAIN = 2; // of them are the most important
const SHORTEST = 0.02; // seconds from which a speed can be computed: chunks of a shorter answer may have come together

export class AnswerStats {
  #values = NAMES.map((name, i) => element("dd", { textContent: "–", className: i < MAIN ? "main" : "" }));
  #started = 0;
  #first = null; // when the first token came
  #latest = 0;
  #tokens = 0;
  #afterFirst = 0; // tokens that came later than the first chunk's
  #drafted = 0;
  #length = null;
  #rate = null;
  #rejected = null;
  #promptTokens = null;

  constructor(list) {
    list.replaceChildren(
      ...NAMES.flatMap((name, i) => [element("dt", { textContent: name, className: i < MAIN ? "main" : "" }), this.#values[i]]),
    );
  }

  clear() {
    for (const value of this.#values) setText(value, "–");
  }

  begin() {
    this.#started = performance.now();
    this.#first = this.#length = this.#rate = this.#rejected = this.#promptTokens = null;
    this.#latest = this.#tokens = this.#afterFirst = this.#drafted = 0;
    this.clear();
  }

  /** Counts new tokens. A round ends with one that the model sampled, which gives the length as long as it is not told. */
  count(tokens) {
    if (tokens.length === 0) return;
    this.#latest = performance.now();
    if (this.#first === null) this.#first = this.#latest;
    else this.#afterFirst += tokens.length;
    this.#tokens += tokens.length;
    this.#drafted += tokens.filter((token) => token.drafted).length;
    const sampled = this.#tokens - this.#drafted;
    this.#length = sampled ? this.#tokens / sampled : null;
    this.#show();
  }

  /** What the server says at the end. */
  end(speculation, usage) {
    this.#length = speculation.acceptance_length;
    this.#rate = speculation.acceptance_rate;
    this.#rejected = speculation.num_draft_tokens - speculation.num_accepted_tokens;
    this.#promptTokens = usage?.prompt_tokens ?? null;
    this.#show();
  }

  get #speed() {
    const seconds = (this.#latest - this.#first) / 1000;
    return this.#afterFirst && seconds >= SHORTEST ? this.#afterFirst / seconds : null;
  }

  #show() {
    const drafted = this.#tokens ? `${this.#drafted} (${format.percent(this.#drafted / this.#tokens)})` : "–";
    const first = this.#first === null ? null : (this.#first - this.#started) / 1000;
    [
      format.decimal(this.#length), format.rate(this.#speed), format.seconds(first), format.count(this.#tokens), drafted,
      format.count(this.#rejected),
      format.percent(this.#rate), format.count(this.#promptTokens),
    ].forEach((text, i) => setText(this.#values[i], text));
  }

  /** For the line below the answer. */
  summary() {
    const parts = [format.plural(this.#tokens, "token")];
    if (this.#speed) parts.push(`${format.rate(this.#speed)} tokens/s`);
    if (this.#rejected) parts.push(`${format.plural(this.#rejected, "draft")} rejected`);
    if (this.#length) parts.push(`acceptance length ${format.decimal(this.#length)}`);
    return parts;
  }
}
