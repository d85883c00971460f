// Numbers for people. null and undefined are "–".

const NONE = "–";
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

const orNone = (format) => (value) => (value === null || value === undefined ? NONE : format(value));

export const count = orNone((value) => (value < 100_000 ? whole.format(value) : compact.format(value)));

export const rate = orNone((value) => (value > 0 && value < 10 ? value.toFixed(1) : count(value)));

export const percent = orNone((value) => {
  if (value > 0 && value < 0.0005) return "< 0.1 %";
  return `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
});

export const decimal = orNone((value) => value.toFixed(2));

export const seconds = orNone((value) => {
  if (value === 0) return "0";
  if (value < 0.01) return `${(1000 * value).toFixed(1)} ms`;
  if (value < 1) return `${(1000 * value).toFixed(0)} ms`;
  return value < 100 ? `${value.toFixed(1)} s` : `${value.toFixed(0)} s`;
});

export const bytes = orNone((value) => {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) [value, unit] = [value / 1000, unit + 1];
  return `${value.toFixed(value < 10 && unit > 0 ? 1 : 0)} ${units[unit]}`;
});

export const duration = orNone((value) => {
  if (value < 120) return `${Math.floor(value)} s`;
  if (value < 7200) return `${Math.floor(value / 60)} min`;
  return value < 172_800 ? `${Math.floor(value / 3600)} h` : `${Math.floor(value / 86_400)} days`;
});

/** "3 adapters", "1 adapter". */
export const plural = (value, one, many = `${one}s`) => `${count(value)} ${value === 1 ? one : many}`;
