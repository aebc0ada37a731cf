// The table of adapters: sorted and filtered here, and only the rows in sight are in the document.

import { byId, empty, make, say } from "./dom.js";
import { count, hue, plural, rate, seconds } from "./format.js";
import { markAdapter } from "./fleet_map.js";

const ROW_HEIGHT = 34;
const MARGIN = 8;
const COLUMNS = [
  { field: "name", title: "Adapter" },
  { field: "num_slots", title: "Slots", show: count },
  { field: "in_flight", title: "In flight", show: count },
  { field: "requests_per_s", title: "Calls/s", show: rate },
  { field: "failures_per_s", title: "Fail/s", show: rate, alarm: (value) => value > 0 },
  { field: "tokens_per_s", title: "Tokens/s", show: rate },
  { field: "first_token_p50_s", title: "First p50", show: seconds },
  { field: "first_token_p99_s", title: "First p99", show: seconds },
  { field: "latency_p99_s", title: "Total p99", show: seconds },
  { field: "requests", title: "Calls", show: count },
];

let table = { num_total: 0, num_matching: 0, adapters: [] };
let shown = [];
let sort = { field: "tokens_per_s", down: true };
let active = 0;
let entry = 0;
let drawn = 0;
let marked = null;
let onSearch = () => {};

export function setUpAdapters(search) {
  onSearch = search;
  byId("adapter-head").append(...COLUMNS.map(header));
  byId("adapter-scroll").addEventListener("scroll", onScroll, { passive: true });
  byId("adapter-body").addEventListener("keydown", onKey);
  byId("adapter-body").addEventListener("focusin", (event) => {
    const row = event.target.closest("tr.row");
    if (row) active = row.index;
  });
  byId("adapter-body").addEventListener("click", (event) => {
    const row = event.target.closest("tr.row");
    if (row) choose(row.index);
  });
  byId("filter").addEventListener("input", () => {
    byId("adapter-scroll").scrollTop = 0;
    active = 0;
    arrange();
    if (table.num_total > table.adapters.length || table.num_matching !== table.num_total) onSearch();
  });
}

export const wanted = () => byId("filter").value.trim();

export function showAdapters(report) {
  const { columns, rows } = report.adapters;
  const adapters = rows.map((row) => Object.fromEntries(columns.map((name, index) => [name, row[index]])));
  table = { ...report.adapters, adapters };
  arrange();
}

/** Let go of the marked adapter. */
export function unmark() {
  marked = null;
  markAdapter(null);
  render();
}

function arrange() {
  const text = wanted().toLowerCase();
  const direction = sort.down ? -1 : 1;
  shown = table.adapters
    .filter((adapter) => !text || adapter.name.toLowerCase().includes(text) || (adapter.owner ?? "").toLowerCase().includes(text))
    .sort((a, b) => direction * compare(a[sort.field], b[sort.field]) || compare(a.name, b.name));
  active = Math.min(active, Math.max(0, shown.length - 1));
  note();
  render();
}

/** What is unknown counts as less than anything. */
function compare(a, b) {
  if (a === b) return 0;
  if (a === null || b === null) return a === null ? -1 : 1;
  return a < b ? -1 : 1;
}

function note() {
  const of = shown.length === table.num_total ? "" : `${count(shown.length)} of `;
  say(byId("adapters-note"), table.num_total ? `${of}${plural(table.num_total, "adapter")}` : "");
  const parent = byId("adapter-empty");
  if (shown.length) parent.replaceChildren();
  else if (!table.num_total) parent.replaceChildren(empty("No adapters yet. Push the first one: ", "lorafleet push NAME DIR"));
  else parent.replaceChildren(empty(`No adapter has “${wanted()}” in its name or owner.`));
}

function header(column) {
  const button = make("button", "", column.title);
  button.type = "button";
  const cell = make("th", "", button);
  cell.scope = "col";
  button.addEventListener("click", () => {
    sort = { field: column.field, down: sort.field === column.field ? !sort.down : column.field !== "name" };
    arrange();
    arrows();
  });
  cell.column = column;
  queueMicrotask(arrows);
  return cell;
}

function arrows() {
  for (const cell of byId("adapter-head").children) {
    const isSorted = cell.column.field === sort.field;
    if (isSorted) cell.setAttribute("aria-sort", sort.down ? "descending" : "ascending");
    else cell.removeAttribute("aria-sort");
    say(cell.firstChild, cell.column.title + (isSorted ? (sort.down ? " ↓" : " ↑") : ""));
  }
}

function render() {
  const scroll = byId("adapter-scroll");
  const body = byId("adapter-body");
  const first = Math.max(0, Math.floor(scroll.scrollTop / ROW_HEIGHT) - MARGIN);
  const last = Math.min(shown.length, first + Math.ceil((scroll.clientHeight || 560) / ROW_HEIGHT) + 2 * MARGIN);
  byId("adapter-table").setAttribute("aria-rowcount", shown.length + 1);
  const rows = [...body.querySelectorAll("tr.row")];
  while (rows.length < last - first) {
    const row = buildRow();
    rows.push(row);
    body.append(row);
  }
  for (const row of rows.splice(last - first)) row.remove();
  spacer(body, "before", first * ROW_HEIGHT);
  spacer(body, "after", (shown.length - last) * ROW_HEIGHT);
  entry = active >= first && active < last ? active : Math.min(last - 1, Math.ceil(scroll.scrollTop / ROW_HEIGHT));
  rows.forEach((row, offset) => updateRow(row, shown[first + offset], first + offset));
  drawn = first;
}

/** A scroll within the rows that are drawn changes nothing. */
function onScroll() {
  const first = Math.max(0, Math.floor(byId("adapter-scroll").scrollTop / ROW_HEIGHT) - MARGIN);
  if (first !== drawn) render();
}

function spacer(body, place, height) {
  let row = body.querySelector(`tr.${place}`);
  if (!row) {
    row = make("tr", `space ${place}`, make("td"));
    row.setAttribute("aria-hidden", "true");
    row.firstChild.colSpan = COLUMNS.length;
  }
  if (place === "before" && body.firstElementChild !== row) body.prepend(row);
  if (place === "after" && body.lastElementChild !== row) body.append(row);
  row.firstChild.style.height = `${height}px`;
}

function buildRow() {
  const row = make("tr", "row");
  const chip = make("span", "chip");
  const name = make("span");
  const owner = make("span", "owner");
  row.append(make("td", "", chip, name, owner), ...COLUMNS.slice(1).map(() => make("td")));
  return Object.assign(row, { chip, adapterName: name, owner });
}

function updateRow(row, adapter, index) {
  row.index = index;
  row.setAttribute("aria-rowindex", index + 2);
  row.tabIndex = index === entry ? 0 : -1;
  row.classList.toggle("marked", adapter.name === marked);
  row.setAttribute("aria-selected", adapter.name === marked);
  row.chip.style.setProperty("--hue", hue(adapter.name));
  say(row.adapterName, adapter.live === null ? adapter.name : `${adapter.name}@${adapter.live}`);
  say(row.owner, adapter.owner ?? "base model");
  row.cells[0].title = `${adapter.name}, ${adapter.owner ? `of ${adapter.owner}, ${plural(adapter.num_versions, "version")}` : "the base model"}`;
  COLUMNS.forEach((column, at) => {
    if (at === 0) return;
    const value = adapter[column.field];
    say(row.cells[at], column.show(value));
    row.cells[at].className = column.alarm?.(value) ? "alarm" : value ? "" : "quiet";
  });
}

function onKey(event) {
  const page = Math.max(1, Math.floor(byId("adapter-scroll").clientHeight / ROW_HEIGHT) - 2);
  const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
  if (event.key in steps) {
    event.preventDefault();
    go(Math.min(shown.length - 1, Math.max(0, active + steps[event.key])));
  } else if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    choose(active);
  }
}

function go(index) {
  active = index;
  const scroll = byId("adapter-scroll");
  const head = byId("adapter-head").offsetHeight;
  const top = index * ROW_HEIGHT;
  if (top < scroll.scrollTop) scroll.scrollTop = top;
  else if (top + ROW_HEIGHT + head > scroll.scrollTop + scroll.clientHeight) scroll.scrollTop = top + ROW_HEIGHT + head - scroll.clientHeight;
  render();
  byId("adapter-body").querySelector('tr.row[tabindex="0"]')?.focus({ preventScroll: true });
}

function choose(index) {
  active = index;
  const { name } = shown[index];
  marked = marked === name ? null : name;
  markAdapter(marked);
  render();
}
