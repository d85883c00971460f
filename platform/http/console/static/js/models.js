// The base model and the adapters, as `/v1/models` says.

import { getJson } from "./api.js";

const INTERVAL = 10_000; // ms: where adapters are comes with the live statistics; here it is about which there are

export class Models {
  #listeners = [];
  #timer = null;
  #running = false;
  cards = [];

  listen(listener) {
    this.#listeners.push(listener);
  }

  start() {
    this.#running = true;
    return this.refresh();
  }

  stop() {
    this.#running = false;
    this.cards = [];
    clearTimeout(this.#timer);
  }

  /** Asks now; the next call comes by itself. Without an answer, what was known stays. */
  async refresh() {
    clearTimeout(this.#timer);
    try {
      if (!document.hidden) {
        const { data } = await getJson("v1/models");
        if (!this.#running) return;
        this.cards = data;
        for (const listener of this.#listeners) listener(data);
      }
    } catch {
      // the live statistics show that the server does not answer
    }
    if (this.#running) this.#timer = setTimeout(() => this.refresh(), INTERVAL);
  }
}
