// Tenants with their limits and their usage; hidden if the server has no database of them.

import { getJson } from "./api.js";
import { byId, element, setText, show, tell } from "./dom.js";
import * as format from "./format.js";
import { offerTenants } from "./load-dialog.js";
import { TenantRow } from "./tenant-row.js";

const INTERVAL = 30_000; // ms: the database adds up the ledger each time
const MAX_ROWS = 200;

export class Tenants {
  #timer = null;
  #running = false;
  #tenants = [];
  #usage = new Map(); // tenant -> its row of the chosen time
  #budgets = new Map(); // tenant -> tokens since its period began
  #rates = new Map(); // tenant -> output tokens a second, now
  #rows = new Map(); // tenant -> TenantRow

  constructor() {
    byId("usage-period").onchange = () => this.#running && this.refresh();
  }

  follow(live) {
    live.listen((stats) => {
      if (!stats) return;
      if (stats.server.has_tenants !== this.#running) stats.server.has_tenants ? this.#start() : this.stop();
      this.#rates = new Map(stats.tenants.map((tenant) => [tenant.tenant, tenant.output_tokens_per_second]));
      for (const [name, row] of this.#rows) row.showRate(this.#rates.get(name) ?? 0);
    });
  }

  #start() {
    this.#running = true;
    this.refresh();
  }

  stop() {
    this.#running = false;
    clearTimeout(this.#timer);
    this.#show(false);
    offerTenants([]);
  }

  async refresh() {
    clearTimeout(this.#timer);
    try {
      if (!document.hidden) await this.#ask();
    } catch (error) {
      if (error.status !== 0) tell(byId("tenant-message"), error.message, true);
    }
    if (this.#running) this.#timer = setTimeout(() => this.refresh(), INTERVAL);
  }

  async #ask() {
    const { data: tenants } = await getJson("admin/v1/tenants");
    const hours = Number(byId("usage-period").value);
    const usage = await usageSince(Date.now() / 1000 - 3600 * hours);
    const budgets = await this.#askForBudgets(tenants);
    if (!this.#running) return;
    [this.#tenants, this.#usage, this.#budgets] = [tenants, usage, budgets];
    offerTenants(tenants.map((tenant) => tenant.name));
    tell(byId("tenant-message"), "");
    this.#show(true);
    this.#draw();
  }

  /** One call for each kind of period that some tenant has a budget for. */
  async #askForBudgets(tenants) {
    const limited = tenants.filter((tenant) => tenant.limits.token_budget !== null);
    const used = new Map();
    for (const period of new Set(limited.map((tenant) => tenant.limits.budget_period ?? "month"))) {
      const usage = await usageSince(startOf(period));
      for (const { name, limits } of limited) {
        if ((limits.budget_period ?? "month") !== period) continue;
        const row = usage.get(name);
        used.set(name, row ? row.prompt_tokens + row.output_tokens : 0);
      }
    }
    return used;
  }

  #show(visible) {
    show(byId("tenants"), visible);
    show(byId("tenants-link"), visible);
  }

  #draw() {
    const shown = this.#tenants.slice(0, MAX_ROWS);
    const rows = new Map(shown.map((tenant) => [tenant.name, this.#rows.get(tenant.name) ?? new TenantRow()]));
    for (const tenant of shown) {
      const row = rows.get(tenant.name);
      row.update(tenant, this.#usage.get(tenant.name), this.#budgets.get(tenant.name));
      row.showRate(this.#rates.get(tenant.name) ?? 0);
    }
    this.#rows = rows;
    byId("tenant-rows").replaceChildren(...[...rows.values()].map((row) => row.root));
    const total = [...this.#usage.values()].reduce((sum, row) => sum + row.requests, 0);
    setText(byId("tenant-facts"), `${format.plural(this.#tenants.length, "tenant")} · ${format.plural(total, "request")}`);
    const empty = byId("tenant-empty");
    const more = this.#tenants.length - shown.length;
    show(empty, this.#tenants.length === 0 || more > 0);
    empty.replaceChildren(
      ...(more > 0 ? [`${more} more; outrider admin tenant list has all`] : ["No tenants yet: ", element("code", { textContent: "outrider admin tenant create NAME" })]),
    );
  }
}

/** Sums of the ledger by tenant, of requests that ended after a time. */
async function usageSince(seconds) {
  const { data } = await getJson(`admin/v1/usage?group_by=tenant&from=${Math.floor(seconds)}`);
  return new Map(data.map((row) => [row.tenant, row]));
}

/** When a budget's period began, in UTC; weeks begin on Monday. */
function startOf(period) {
  const now = new Date();
  const [year, month, day] = [now.getUTCFullYear(), now.getUTCMonth(), now.getUTCDate()];
  if (period === "month") return Date.UTC(year, month, 1) / 1000;
  const back = period === "week" ? (now.getUTCDay() + 6) % 7 : 0;
  return Date.UTC(year, month, day - back) / 1000;
}
