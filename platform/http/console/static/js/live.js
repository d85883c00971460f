// The live statistics: asked for once a second while the page is looked at, and kept for the charts.

import { getJson } from "./api.js";

const INTERVAL = 1000; // ms
export const HISTORY = 300; // seconds

export class Live {
  #listeners = [];
  #timer = null;
  #running = false;
  #gap = true; // something may have been missed: the next call brings the history too
  points = [];

  /** `listener(stats, points)` for each answer, `listener(null, points, error)` for each that did not come. */
  listen(listener) {
    this.#listeners.push(listener);
  }

  /** Starts with the first answer, whose error is the caller's. */
  async start(options) {
    this.#take(await this.#ask(options));
    this.#running = true;
    this.#schedule();
    document.addEventListener("visibilitychange", this.#onVisibility);
  }

  stop() {
    this.#running = false;
    this.#gap = true;
    this.points = [];
    clearTimeout(this.#timer);
    document.removeEventListener("visibilitychange", this.#onVisibility);
  }

  #onVisibility = () => {
    clearTimeout(this.#timer);
    if (document.hidden) this.#gap = true;
    else this.#tick();
  };

  #schedule() {
    clearTimeout(this.#timer);
    if (this.#running && !document.hidden) this.#timer = setTimeout(() => this.#tick(), INTERVAL);
  }

  async #tick() {
    try {
      const stats = await this.#ask();
      if (this.#running) this.#take(stats);
    } catch (error) {
      this.#gap = true;
      if (this.#running) for (const listener of this.#listeners) listener(null, this.points, error);
    }
    this.#schedule();
  }

  #ask(options) {
    return getJson(this.#gap ? `admin/v1/stats?history=${HISTORY}` : "admin/v1/stats", options);
  }

  #take(stats) {
    if (stats.history) this.points = stats.history;
    else if (this.points.at(-1)?.time === stats.live.time) this.points.splice(-1, 1, stats.live);
    else this.points.push(stats.live);
    this.points.splice(0, this.points.length - HISTORY);
    this.#gap = false;
    for (const listener of this.#listeners) listener(stats, this.points);
  }
}
