// The table of adapters, and what can be done with them.

import { post } from "./api.js";
import { AdapterRow } from "./adapter-row.js";
import { confirm } from "./dialogs.js";
import { byId, setText, show, tell } from "./dom.js";
import * as format from "./format.js";
import { setUpLoading } from "./load-dialog.js";

const MAX_ROWS = 100; // shown at once

export function setUpAdapters(live, models) {
  const view = new AdapterView(models);
  live.listen((stats) => stats && view.update({ stats }));
  models.listen((cards) => view.update({ cards }));
  byId("adapter-filter").addEventListener("input", () => view.draw());
  setUpLoading(async (name) => {
    tell(byId("adapter-message"), `${name} has been loaded.`);
    await models.refresh();
  });
}

/** What the API needs to know an adapter by: its own name, and its tenant's if it has one. */
function identity(card) {
  if (!card.tenant) return { lora_name: card.id };
  return { lora_name: card.id.slice(card.tenant.length + 1), tenant: card.tenant };
}

class AdapterView {
  #models;
  #cards = [];
  #stats = null;
  #rows = new Map(); // name -> AdapterRow

  constructor(models) {
    this.#models = models;
  }

  update({ cards = this.#cards, stats = this.#stats }) {
    [this.#cards, this.#stats] = [cards, stats];
    this.draw();
  }

  draw() {
    if (!this.#stats) return;
    const wanted = byId("adapter-filter").value.trim().toLowerCase();
    const entries = this.#entries().filter((entry) => entry.title.toLowerCase().includes(wanted));
    // Those in memory first when there are too many; then by name, so that rows stay where they are.
    entries.sort((a, b) => Number(isCold(a)) - Number(isCold(b)) || compare(a, b));
    const shown = entries.slice(0, MAX_ROWS).sort(compare);
    const names = new Set(shown.map((entry) => entry.name));
    for (const [name, row] of this.#rows) {
      if (names.has(name)) continue;
      row.root.remove();
      this.#rows.delete(name);
    }
    const body = byId("adapter-rows");
    shown.forEach((entry, i) => {
      let row = this.#rows.get(entry.name);
      if (!row) this.#rows.set(entry.name, (row = new AdapterRow(this.#actions)));
      row.update(entry);
      if (body.children[i] !== row.root) body.insertBefore(row.root, body.children[i] ?? null);
    });
    this.#tellWhatIsMissing(entries.length - shown.length, entries.length === 0 && wanted !== "");
    this.#tellTotals();
  }

  /** The base model, what `/v1/models` lists, and what else has traffic: sums of adapters. */
  #entries() {
    const live = new Map(this.#stats.adapters.map((facts) => [facts.name, facts]));
    const base = this.#stats.server.model;
    const entries = [{ name: "", title: base, kind: "base", card: null, live: live.get("") }];
    const known = new Set([""]);
    for (const card of this.#cards) {
      if (card.parent === null) continue;
      known.add(card.id);
      entries.push({ name: card.id, title: card.id, kind: "adapter", card, live: live.get(card.id) });
    }
    for (const [name, facts] of live) {
      if (known.has(name) || (!facts.running && !facts.waiting && !facts.output_tokens_per_second)) continue;
      entries.push({ name, title: name, kind: facts.tier === null ? "mix" : "adapter", card: null, live: facts });
    }
    return entries;
  }

  #tellWhatIsMissing(hidden, nothing) {
    const empty = byId("adapter-empty");
    show(empty, hidden > 0 || nothing);
    setText(empty, nothing ? "No adapter has this name." : `${format.count(hidden)} more; filter by name to see them.`);
  }

  #tellTotals() {
    const { lora } = this.#stats;
    const parts = [
      format.plural(this.#cards.filter((card) => card.parent !== null).length, "adapter"),
      `${lora.on_device} on the device`,
      `${lora.in_host_memory} in host memory (${format.bytes(lora.host_bytes)})`,
    ];
    if (lora.load_failures) parts.push(format.plural(lora.load_failures, "failed load"));
    setText(byId("adapter-facts"), lora.rows ? parts.join(" · ") : "Adapters are off (--enable-lora).");
    byId("load-adapter").disabled = !lora.rows;
  }

  #actions = {
    setPinned: async (card, pinned) => {
      const message = byId("adapter-message");
      try {
        await post(pinned ? "v1/pin_lora_adapter" : "v1/unpin_lora_adapter", identity(card));
        tell(message, pinned ? `${card.id} stays on the device now.` : `${card.id} may be evicted now.`);
        await this.#models.refresh();
      } catch (error) {
        tell(message, `${card.id}: ${error.message}`, true);
      }
    },
    unload: (card) =>
      confirm({
        title: "Unload this adapter?",
        text: `${card.id} takes no new requests from then on; those that run with it finish. Its files stay where they are.`,
        yes: "Unload",
        action: async () => {
          await post("v1/unload_lora_adapter", identity(card));
          tell(byId("adapter-message"), `${card.id} has been unloaded.`);
          await this.#models.refresh();
        },
      }),
  };
}

const isCold = (entry) => entry.kind !== "base" && (entry.live?.tier ?? "disk") === "disk";

function compare(a, b) {
  return Number(a.kind !== "base") - Number(b.kind !== "base") || a.title.localeCompare(b.title);
}
