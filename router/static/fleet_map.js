// Replicas and their slots: who sits where, how busy, in which state.

import { byId, empty, follow, make, mark, say } from "./dom.js";
import { hue, percent, plural, rate } from "./format.js";

const FEW = 8;
const COLUMNS = 4;
const MANY = 24;
let marked = null;

export function showFleet(report) {
  const { replicas, totals } = report;
  say(byId("fleet-note"), replicas.length ? `${plural(replicas.length, "replica")}, ${totals.num_slots_used} of ${plural(totals.num_slots, "slot")} taken` : "");
  const parent = byId("replicas");
  if (!replicas.length) {
    parent.replaceChildren(empty("No replicas have joined yet. See what is missing: ", "lorafleet doctor"));
    return;
  }
  if (parent.firstElementChild?.classList.contains("empty")) parent.replaceChildren();
  const busiest = Math.max(0.5, ...replicas.flatMap((replica) => replica.slots.map((slot) => slot[4])));
  follow(parent, replicas, (replica) => replica.replica_id, buildReplica, (element, replica) => updateReplica(element, replica, busiest));
}

/** Bring out the slots of one adapter; null brings all back. */
export function markAdapter(name) {
  marked = name;
  byId("fleet").classList.toggle("has-mark", name !== null);
  for (const slot of document.querySelectorAll(".slot")) slot.classList.toggle("marked", name !== null && slot.adapter === name);
}

function buildReplica(replica) {
  const parts = Object.fromEntries(["state", "running", "waiting", "tokens", "hits", "swaps", "staged"].map((name) => [name, make("span", name)]));
  const kv = make("progress");
  kv.max = 1;
  kv.setAttribute("aria-label", "KV cache in use");
  const kvText = make("span");
  const title = make("h3", "", `Replica ${replica.ring_id}`);
  title.title = `${replica.replica_id} on node ${replica.node_id}`;
  const about = make("div", "about", title, parts.state, parts.running, parts.waiting, parts.tokens, make("span", "kv", "KV", kv, kvText), parts.hits, parts.swaps, parts.staged);
  const slots = make("ol", "slots");
  slots.setAttribute("aria-label", `Slots of replica ${replica.ring_id}`);
  return Object.assign(make("article", "replica", about, slots), { parts, kv, kvText, slots });
}

function updateReplica(element, replica, busiest) {
  const { parts, kv, kvText, slots } = element;
  say(parts.state, stateOf(replica));
  say(parts.running, `${replica.running} running`);
  say(parts.waiting, `${replica.waiting} waiting`);
  say(parts.tokens, `${rate(replica.tokens_per_s)} tokens/s`);
  say(parts.hits, `${percent(replica.hit_rate)} hits`);
  say(parts.swaps, `${rate(replica.swaps_per_s)} swaps/s`);
  say(parts.staged, `${replica.num_staged} staged`);
  kv.value = replica.kv_used ?? 0;
  say(kvText, percent(replica.kv_used));
  slots.classList.toggle("many", replica.slots.length > MANY);
  slots.classList.toggle("few", replica.slots.length <= FEW);
  slots.style.setProperty("--count", Math.min(COLUMNS, replica.slots.length));
  follow(slots, replica.slots, (_, index) => index, buildSlot, (slot, row) => updateSlot(slot, row, busiest));
}

function stateOf(replica) {
  if (!replica.answers) return "does not answer";
  if (replica.drained) return `takes no requests: ${replica.drained}`;
  return replica.behind > 20 ? `${replica.behind} changes behind` : "";
}

function buildSlot() {
  const name = make("span", "name");
  const more = make("span", "rate");
  const pins = make("span", "pins");
  return Object.assign(make("li", "slot", name, more, pins), { name, more, pins, adapter: null });
}

function updateSlot(element, [use, adapter, number, pins, starts], busiest) {
  mark(element, "use", use);
  if (element.adapter !== adapter) {
    element.adapter = adapter;
    element.style.setProperty("--hue", adapter === null ? 0 : hue(adapter));
    element.classList.toggle("marked", marked !== null && adapter === marked);
  }
  element.style.setProperty("--heat", Math.sqrt(Math.min(1, starts / busiest)).toFixed(2));
  say(element.name, adapter ?? "free");
  say(element.more, detail(use, number, starts));
  say(element.pins, pins || "");
  const title = adapter === null ? use : `${adapter}${number === null ? "" : `@${number}`}: ${use}, ${plural(pins, "sequence")} use it, ${rate(starts)} requests/s`;
  if (element.title !== title) element.title = title;
}

function detail(use, number, starts) {
  if (use === "free") return "";
  const version = number === null ? "" : `@${number} · `;
  if (use === "loading") return `${version}loading`;
  return `${version}${rate(starts)}/s`;
}
