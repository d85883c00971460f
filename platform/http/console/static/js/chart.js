// A line chart over the last minutes with its figures next to it, drawn by uPlot.

import { element, setText } from "./dom.js";
import { HISTORY } from "./live.js";
import { colour } from "./theme.js";

/* global uPlot */

const DASHES = [[], [6, 4], [2, 3]];
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });

export class Chart {
  #spec;
  #plot = null;
  #data;
  #holder = element("div", { className: "plot", role: "img" });
  #value = element("span", { className: "chart-value" });
  #note = element("div", { className: "chart-note" });
  #figures;

  /**
   * `spec`: title, series ([{label, of: point -> number}]), format, least and most (how far
   * the y axis goes up), from (where it starts), incrs (between its
   * lines), value (stats -> [number, unit]) and note (stats -> text).
   */
  constructor(spec) {
    this.#spec = spec;
    this.#holder.ariaLabel = `${spec.title}, the last ${HISTORY / 60} minutes`;
    this.#figures = spec.series.map(() => element("b"));
    const legend = spec.series.map((series, i) =>
      element("span", {}, element("i", { className: `swatch s${i + 1}` }), `${series.label} `, this.#figures[i]),
    );
    const head = element(
      "div", { className: "chart-head" }, element("h3", { className: "chart-title", textContent: spec.title }), this.#value,
    );
    this.root = element(
      "section", { className: "chart card" }, head,
      element("div", { className: "chart-legend" }, ...legend), this.#holder, this.#note,
    );
    this.#data = [[], ...spec.series.map(() => [])];
    new ResizeObserver(() => this.#resize()).observe(this.#holder);
    document.addEventListener("themechange", () => this.#draw());
  }

  update(stats, points) {
    const [value, unit] = this.#spec.value(stats);
    this.#value.replaceChildren(value, element("small", { textContent: unit && ` ${unit}` }));
    setText(this.#note, this.#spec.note(stats));
    this.#data = [
      points.map((point) => point.time),
      ...this.#spec.series.map((series) => points.map((point) => series.of(point) ?? null)),
    ];
    this.#plot?.setData(this.#data);
    this.#showFigures(this.#plot?.cursor.idx ?? null);
  }

  /** What the legend says: the values under the pointer, else the latest. */
  #showFigures(index) {
    this.#figures.forEach((figure, i) => {
      const values = this.#data[i + 1];
      setText(figure, this.#spec.format(index === null ? values.at(-1) : values[index]));
    });
  }

  #resize() {
    const { clientWidth: width, clientHeight: height } = this.#holder;
    if (!width) return; // not shown
    if (this.#plot) this.#plot.setSize({ width, height });
    else this.#draw();
  }

  /** Anew, since the library takes colours once. */
  #draw() {
    const { clientWidth: width, clientHeight: height } = this.#holder;
    this.#plot?.destroy();
    this.#plot = width ? new uPlot(this.#options(width, height), this.#data, this.#holder) : null;
  }

  #options(width, height) {
    const { series, format, least, most = Infinity, from = 0, incrs } = this.#spec;
    const axis = { stroke: colour("muted"), grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    return {
      width,
      height,
      padding: [8, 18, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, sync: { key: "console" } },
      hooks: { setCursor: [(plot) => this.#showFigures(plot.cursor.idx ?? null)] },
      scales: {
        x: { time: true, range: (plot, min, max) => [(max ?? Date.now() / 1000) - HISTORY, max ?? Date.now() / 1000] },
        y: { range: (plot, min, max) => [from, Math.min(most, Math.max(least, (max ?? 0) * 1.1))] },
      },
      axes: [
        { ...axis, size: 24, gap: 4, incrs: [60, 120], values: (plot, splits) => splits.map((at) => clock.format(at * 1000)) },
        { ...axis, size: 52, gap: 4, space: 34, ...(incrs && { incrs }), values: (plot, splits) => splits.map(format) },
      ],
      series: [
        {},
        ...series.map(({ label }, i) => ({
          label,
          stroke: colour(`series-${i + 1}`),
          fill: i === 0 ? `${colour("series-1")}1f` : undefined,
          width: 1.75,
          dash: DASHES[i],
          points: { show: false },
        })),
      ],
    };
  }
}
