// The five figures on top, each with its last five minutes.

import { chart, draw, SPAN_S } from "./charts.js";
import { byId, make, mark, say } from "./dom.js";
import { percent, plural, rate, seconds, count } from "./format.js";

const TILES = [
  {
    title: "Tokens", unit: "/s", column: "tokens_per_s", least: 20,
    value: (t) => count(t.tokens_per_s),
    more: (t) => `${plural(t.running, "sequence")} running`,
  },
  {
    title: "Calls", unit: "/s", column: "requests_per_s", least: 2,
    value: (t) => rate(t.requests_per_s),
    more: (t) => (t.failures_per_s > 0 ? `${rate(t.failures_per_s)}/s fail` : `first token p99 ${seconds(t.first_token_p99_s)}`),
    alarm: (t) => t.failures_per_s > 0.05 * t.requests_per_s,
  },
  {
    title: "Queue", unit: " waiting", column: "waiting", least: 10,
    value: (t) => count(t.waiting),
    more: (t) => (t.loading ? `${t.loading} wait for their adapter` : "nobody waits for an adapter"),
    alarm: (t, codes) => codes.has("noisy_tenant"),
  },
  {
    title: "Slot hits", unit: "", column: "hit_rate", least: 1.06,
    value: (t) => percent(t.hit_rate),
    more: (t) => `${rate(t.lookups_per_s)} look-ups/s`,
    alarm: (t, codes) => codes.has("thrashing"),
  },
  {
    title: "Swaps", unit: "/s", column: "swaps_per_s", least: 2,
    value: (t) => rate(t.swaps_per_s),
    more: (t) => `${t.num_slots_used} of ${plural(t.num_slots, "slot")} taken`,
    alarm: (t, codes) => codes.has("thrashing"),
  },
];

const history = new Map();

/** Keep what the gateway remembers of the last minutes; another gateway may remember other moments. */
export function remember({ columns, points }, nowS) {
  for (const point of points) history.set(point[0], point);
  for (const atS of history.keys()) if (nowS - atS > SPAN_S) history.delete(atS);
  return columns;
}

export function showTiles(report) {
  const columns = remember(report.history, report.at_s);
  const points = [...history.values()].sort((a, b) => a[0] - b[0]);
  const codes = new Set(report.findings.map((finding) => finding.code));
  const parent = byId("tiles");
  if (!parent.children.length) parent.append(...TILES.map(build));
  TILES.forEach((tile, index) => {
    const element = parent.children[index];
    const column = columns.indexOf(tile.column);
    say(element.number, tile.value(report.totals));
    say(element.more, tile.more(report.totals));
    mark(element, "alarm", Boolean(tile.alarm?.(report.totals, codes)));
    element.chart.setAttribute("aria-label", `${tile.title} over the last five minutes, now ${tile.value(report.totals)}${tile.unit}`);
    draw(element.chart, points.map((point) => [point[0], point[column]]), report.at_s, tile.least);
  });
}

function build(tile) {
  const number = make("span");
  const more = make("p", "more");
  const drawn = chart(tile.title);
  const value = make("p", "value", number, make("small", "", tile.unit));
  return Object.assign(make("article", "tile", make("h2", "", tile.title), value, more, drawn), { number, more, chart: drawn });
}
