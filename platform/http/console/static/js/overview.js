// The charts, and the line of facts above them.

import { Chart } from "./chart.js";
import { byId, setText } from "./dom.js";
import * as format from "./format.js";

const REASONS = {
  capacity: "for room in the batch or the KV cache",
  adapter_loading: "for an adapter to be read",
  adapter_rows: "for adapter rows",
  max_loras: "for one of the adapter places",
};

const SPECS = [
  {
    title: "Throughput",
    format: format.rate,
    least: 10,
    series: [
      { label: "output", of: (point) => point.output_tokens_per_second },
      { label: "prompt", of: (point) => point.prompt_tokens_per_second },
    ],
    value: ({ live }) => [format.rate(live.output_tokens_per_second), "tokens/s"],
    note: ({ live }) => `${format.rate(live.requests_per_second)} requests/s finished`,
  },
  latency("Time to first token", "ttft", "requests"),
  latency("Inter-token latency", "itl", "gaps"),
  {
    title: "Queue",
    format: format.count,
    least: 4,
    incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000],
    series: [
      { label: "running", of: (point) => point.running },
      { label: "waiting", of: (point) => point.waiting },
    ],
    value: ({ queue }) => [format.count(queue.running), "running"],
    note: waitingFor,
  },
  {
    title: "Memory in use",
    format: format.percent,
    least: 1,
    most: 1,
    series: [
      { label: "KV cache", of: (point) => point.kv_cache_usage },
      { label: "adapter rows", of: (point, rows) => share(point.lora_rows_used, rows) },
    ],
    value: ({ kv_cache: cache }) => [format.percent(cache.usage), "of KV blocks"],
    note: memoryNote,
  },
  {
    title: "Speculation",
    format: format.decimal,
    from: 1,
    least: 2,
    series: [{ label: "tokens a round", of: (point) => point.acceptance_length }],
    value: ({ live, speculation }) => [format.decimal(live.acceptance_length ?? speculation?.length), "tokens a round"],
    note: speculationNote,
  },
];

function latency(title, name, what) {
  return {
    title,
    format: format.seconds,
    least: 0.01,
    series: [
      { label: "p50", of: (point) => point[`${name}_p50`] },
      { label: "p99", of: (point) => point[`${name}_p99`] },
    ],
    value: ({ live }) => [format.seconds(live[`${name}_p50`]), "p50"],
    note: ({ live }) =>
      `p90 ${format.seconds(live[`${name}_p90`])} · ${format.count(live[`${name}_count`])} ${what} in 30 s`,
  };
}

const share = (part, all) => (part === null || part === undefined || !all ? null : part / all);

function waitingFor({ queue }) {
  const reasons = Object.entries(queue.waiting_by_reason).filter(([, number]) => number > 0);
  if (reasons.length === 0) return queue.waiting ? `${queue.waiting} waiting` : "none waits";
  return reasons.map(([reason, number]) => `${number} ${REASONS[reason] ?? reason}`).join(" · ");
}

function memoryNote({ kv_cache: cache, lora, server }) {
  const used = Math.round(cache.usage * server.num_kv_blocks);
  const parts = [`${format.count(used)} of ${format.count(server.num_kv_blocks)} blocks`];
  if (lora.rows) parts.push(`${lora.rows_used} of ${lora.rows} rows`);
  if (cache.prefix_queries) parts.push(`${format.percent(cache.prefix_hits / cache.prefix_queries)} prefix hits`);
  return parts.join(" · ");
}

function speculationNote(stats) {
  const { speculation, server } = stats;
  if (server.speculation === "off") return "off";
  if (!speculation) return "nothing drafted yet";
  const positions = speculation.per_position.slice(0, 8).map((value) => Math.round(100 * value));
  const made = Object.entries(stats.tokens_by_drafter).sort((one, other) => other[1] - one[1]);
  const all = made.reduce((sum, [, tokens]) => sum + tokens, 0);
  const shares = made.filter(([, tokens]) => tokens).map(([name, tokens]) => `${name} ${format.percent(tokens / all)}`);
  const accepted = `${format.percent(speculation.rate)} of all drafts accepted · by position ${positions.join(", ")} %`;
  return `${accepted} · tokens by drafter: ${shares.join(", ")}`;
}

export function setUpOverview(live) {
  let rows = 0; // of adapters on the device: what the points' counts are a share of
  const specs = SPECS.map((spec) => ({
    ...spec,
    series: spec.series.map((series) => ({ ...series, of: (point) => series.of(point, rows) })),
  }));
  const charts = specs.map((spec) => new Chart(spec));
  byId("charts").replaceChildren(...charts.map((chart) => chart.root));
  live.listen((stats, points) => {
    if (!stats) return;
    rows = stats.lora.rows;
    for (const chart of charts) chart.update(stats, points);
    setText(byId("facts"), facts(stats.server));
  });
}

function facts(server) {
  const restarts = server.engine_restarts ? [format.plural(server.engine_restarts, "engine restart")] : [];
  return [
    server.model,
    `${format.count(server.num_parameters)} parameters, ${server.dtype} on ${server.device}`,
    `context ${format.count(server.max_model_len)}`,
    `speculation: ${server.speculation}`,
    `up ${format.duration(server.uptime)}`,
    ...restarts,
    `Outrider ${server.version}`,
  ].join(" · ");
}
