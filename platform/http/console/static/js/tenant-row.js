// One row of the table of tenants.

import { cell, element, setChildren, setText } from "./dom.js";
import * as format from "./format.js";

export class TenantRow {
  #name = element("span");
  #own = element("small");
  #state = cell("State");
  #weight = cell("Weight", "number");
  #rate = cell("Tokens/s", "number");
  #requests = cell("Requests", "number");
  #prompt = cell("Prompt tokens", "number");
  #output = cell("Output tokens", "number");
  #limits = cell("Limits", "wide");

  constructor() {
    const head = element("th", { scope: "row" }, this.#name, this.#own);
    this.root = element(
      "tr", {}, head, this.#state, this.#weight, this.#rate, this.#requests, this.#prompt, this.#output, this.#limits,
    );
  }

  /** `usage`: its sums in the ledger, if any; `spent`: tokens of its budget, if it has one. */
  update(tenant, usage, spent) {
    setText(this.#name, tenant.name);
    setText(this.#own, tenant.max_adapters ? `may load ${format.plural(tenant.max_adapters, "adapter")} of its own` : "");
    setChildren(this.#state, String(tenant.disabled), () => [
      element("span", { className: `badge ${tenant.disabled ? "bad" : "strong"}`, textContent: tenant.disabled ? "disabled" : "active" }),
    ]);
    setText(this.#weight, String(tenant.weight));
    setText(this.#requests, format.count(usage?.requests ?? 0));
    setText(this.#prompt, format.count(usage?.prompt_tokens ?? 0));
    setText(this.#output, format.count(usage?.output_tokens ?? 0));
    this.#showLimits(tenant.limits, spent);
  }

  showRate(rate) {
    setText(this.#rate, format.rate(rate));
  }

  #showLimits(limits, spent) {
    setChildren(this.#limits, JSON.stringify([limits, spent]), () => {
      const parts = limitTexts(limits).map((text) => element("span", { textContent: text }));
      if (limits.token_budget !== null) parts.unshift(budget(limits, spent ?? 0));
      return parts.length ? [element("div", { className: "lines" }, ...parts)] : [];
    });
  }
}

function budget({ token_budget: all, budget_period: period }, spent) {
  const share = all ? spent / all : 1;
  const text = `${format.count(spent)} of ${format.count(all)} tokens this ${period ?? "month"}`;
  const meter = element("meter", { min: 0, max: 1, high: 0.9, optimum: 0, value: Math.min(1, share), ariaLabel: text });
  return element("div", { className: "meter-cell" }, meter, element("span", { textContent: text }));
}

function limitTexts(limits) {
  const texts = [];
  const add = (value, text) => value !== null && value !== undefined && texts.push(text(value));
  add(limits.requests_per_minute, (value) => `${format.plural(value, "request")}/min`);
  add(limits.tokens_per_minute, (value) => `${format.plural(value, "token")}/min`);
  add(limits.max_concurrent_requests, (value) => `${value} at once`);
  add(limits.max_queued_requests, (value) => `${value} queued`);
  add(limits.max_context_tokens, (value) => `context ${format.count(value)}`);
  add(limits.max_output_tokens, (value) => `max tokens ${format.count(value)}`);
  add(limits.allowed_adapters, (value) => `adapters: ${value.join(", ") || "none"}`);
  return texts.length ? [texts.join(" · ")] : [];
}
