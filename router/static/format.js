// Numbers as people read them.

export const NOTHING = "–";

export function count(value) {
  if (value === null || value === undefined) return NOTHING;
  if (value >= 1e6) return `${(value / 1e6).toFixed(value >= 1e7 ? 0 : 1)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(value >= 1e5 ? 0 : 1)} k`;
  return String(Math.round(value));
}

export function rate(value) {
  if (value === null || value === undefined) return NOTHING;
  if (value === 0) return "0";
  if (value < 10) return value.toFixed(value < 1 ? 2 : 1);
  return count(value);
}

export function percent(share) {
  return share === null || share === undefined ? NOTHING : `${Math.round(share * 100)} %`;
}

export function seconds(value) {
  if (value === null || value === undefined) return NOTHING;
  if (value < 0.0995) return `${Math.round(value * 1000)} ms`;
  if (value < 10) return `${value.toFixed(2)} s`;
  return value < 100 ? `${value.toFixed(1)} s` : `${Math.round(value)} s`;
}

export function ago(thenS, nowS) {
  const age = Math.max(0, nowS - thenS);
  if (age < 60) return `${Math.floor(age)} s ago`;
  if (age < 3600) return `${Math.floor(age / 60)} min ago`;
  return age < 86400 ? `${Math.floor(age / 3600)} h ago` : `${Math.floor(age / 86400)} d ago`;
}

export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

/** A hue for a name, the same on every page and after every reload. Neighbouring names differ. */
export function hue(name) {
  let hash = 2166136261;
  for (const character of name) hash = Math.imul(hash ^ character.codePointAt(0), 16777619);
  return Math.round(((hash >>> 0) * 137.508) % 360);
}
