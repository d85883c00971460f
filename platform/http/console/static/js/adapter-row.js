// One row of the table of adapters. It is kept from second to second, so that its buttons keep the focus.

import { cell, element, setChildren, setText, show } from "./dom.js";
import * as format from "./format.js";

const TIERS = { device: "device", host: "host memory", disk: "disk" };

export class AdapterRow {
  #name = element("span");
  #root = element("small");
  #tier = cell("Tier", "badges");
  #rank = cell("Rank", "number");
  #rows = cell("Rows", "number");
  #running = cell("Running", "number");
  #waiting = cell("Waiting", "number");
  #rate = cell("Tokens/s", "number");
  #acceptance = cell("Acceptance", "wide");
  #draft = cell("Draft weights", "wide");
  #pin = element("button", { type: "button", className: "small" });
  #unload = element("button", { type: "button", className: "small danger", textContent: "Unload" });
  #buttons = element("div", { className: "row-actions" }, this.#pin, this.#unload);
  #card = null;

  constructor(actions) {
    const head = element("th", { scope: "row" }, this.#name, this.#root);
    this.root = element(
      "tr", {}, head, this.#tier, this.#rank, this.#rows, this.#running, this.#waiting, this.#rate, this.#acceptance,
      this.#draft, element("td", { className: "wide" }, this.#buttons),
    );
    this.#pin.onclick = () => this.#busy(() => actions.setPinned(this.#card, this.#pin.dataset.to === "pinned"));
    this.#unload.onclick = () => actions.unload(this.#card);
  }

  async #busy(action) {
    this.#pin.disabled = true;
    try {
      await action();
    } finally {
      this.#pin.disabled = false;
      this.#pin.focus();
    }
  }

  /** `entry`: {title, kind: "base" | "adapter" | "mix", card, live}; what is live wins over the card. */
  update({ title, kind, card, live }) {
    this.#card = card;
    const facts = { ...card, ...dropUnknown(live, card) };
    setText(this.#name, title);
    setText(this.#root, kind === "base" ? "base model" : kind === "mix" ? "sum of adapters" : card?.root ?? "");
    const isAdapter = kind === "adapter";
    this.#showTier(isAdapter, facts);
    setText(this.#rank, isAdapter && facts.rank ? format.count(facts.rank) : "");
    setText(this.#rows, isAdapter && facts.rows ? format.count(facts.rows) : "");
    setText(this.#running, kind === "adapter" ? format.count(facts.running ?? facts.num_running ?? 0) : "");
    setText(this.#waiting, kind === "adapter" ? format.count(facts.waiting ?? facts.num_waiting ?? 0) : "");
    setText(this.#rate, format.rate(live?.output_tokens_per_second ?? 0));
    this.#showAcceptance(live?.acceptance);
    this.#showDraft(isAdapter, facts, live);
    show(this.#buttons, card !== null);
    const to = facts.pinned ? "unpinned" : "pinned";
    setText(this.#pin, facts.pinned ? "Unpin" : "Pin");
    this.#pin.dataset.to = to;
    this.#pin.ariaLabel = `${facts.pinned ? "Unpin" : "Pin"} ${title}`;
    this.#unload.ariaLabel = `Unload ${title}`;
  }

  #showTier(isAdapter, { tier, pinned }) {
    setChildren(this.#tier, `${isAdapter} ${tier} ${pinned}`, () => {
      if (!isAdapter) return [];
      const strong = tier === "device" ? " strong" : "";
      const badges = [element("span", { className: `badge${strong}`, textContent: TIERS[tier] ?? "disk" })];
      if (pinned) badges.push(element("span", { className: "badge strong", textContent: "pinned" }));
      return badges;
    });
  }

  #showAcceptance(acceptance) {
    const key = acceptance ? `${acceptance.accepted_tokens}/${acceptance.draft_tokens}` : "";
    setChildren(this.#acceptance, key, () => {
      if (!acceptance) return [];
      const value = format.percent(acceptance.rate);
      const meter = element("meter", { min: 0, max: 1, low: 0.4, optimum: 1, value: acceptance.rate, ariaLabel: `acceptance rate ${value}` });
      const text = element("span", {}, `${value} · ${format.decimal(acceptance.length)} a round`);
      return [element("div", { className: "meter-cell" }, meter, text)];
    });
  }

  /** Whether it has draft weights, and the acceptance with and without them if both are known. */
  #showDraft(isAdapter, { draft }, live) {
    const figures = (acceptance) => `${format.percent(acceptance.rate)} · ${format.decimal(acceptance.length)}`;
    const lines = [];
    if (isAdapter && live?.with_draft_weights) lines.push(`with: ${figures(live.with_draft_weights)}`);
    if (isAdapter && live?.without_draft_weights) lines.push(`without: ${figures(live.without_draft_weights)}`);
    setChildren(this.#draft, JSON.stringify([isAdapter, draft, lines]), () => {
      if (!isAdapter) return [];
      const texts = lines.map((line) => element("span", { className: "figures", textContent: line }));
      const state = draft === "loaded" ? "in use" : draft ? "not used" : "none";
      const badge = element("span", { className: `badge${draft === "loaded" ? " strong" : draft ? " bad" : ""}`, textContent: state });
      if (draft && draft !== "loaded") texts.push(element("span", { textContent: draft }));
      return [badge, element("span", { className: "lines dim" }, ...texts)];
    });
  }
}

/** The live facts; of an adapter that is not in memory they know less than its card. */
function dropUnknown(live, card) {
  if (!live) return {};
  return live.tier === null && card ? { running: live.running, waiting: live.waiting } : live;
}
