// Asks the gateway once a second while somebody looks, and shows what it says.

import { setUpAdapters, showAdapters, unmark, wanted } from "./adapters.js";
import { fetchFleet, key, Refused } from "./api.js";
import { byId, mark, say } from "./dom.js";
import { showFleet } from "./fleet_map.js";
import { plural } from "./format.js";
import { showEvents, showFindings, showRollouts } from "./panels.js";
import { setUpShortcuts } from "./shortcuts.js";
import { showTenants } from "./tenants.js";
import { applyTheme, nextTheme } from "./theme.js";
import { showTiles } from "./tiles.js";

const MAX_PAUSE_S = 10;
let report = null;
let heardAt = 0;
let numFailures = 0;
let isPaused = false;
let timer = null;
let isAsking = false;

async function ask() {
  clearTimeout(timer);
  if (isAsking || document.hidden || byId("key-dialog").open) return;
  isAsking = true;
  let pauseS = 1;
  try {
    show(await fetchFleet({ since: report ? report.at_s : 0, search: wanted() }));
    pauseS = report.period_s;
  } catch (error) {
    pauseS = fail(error);
  }
  isAsking = false;
  if (!isPaused) timer = setTimeout(ask, pauseS * 1000);
}

function show(found) {
  report = found;
  heardAt = Date.now();
  numFailures = 0;
  byId("trouble").hidden = true;
  byId("forget").hidden = !key.get();
  byId("main").setAttribute("aria-busy", "false");
  document.body.classList.remove("is-stale");
  const missing = report.num_gateways - report.num_gateways_counted;
  const gateways = missing > 0 ? `, calls of ${report.num_gateways_counted} of ${report.num_gateways} gateways` : "";
  say(byId("base"), `${report.base ?? "no base model yet"} · ${plural(report.totals.num_adapters, "adapter")}${gateways}`);
  for (const part of [showFindings, showTiles, showFleet, showTenants, showRollouts, showEvents, showAdapters]) part(report);
  status();
}

/** Say what is wrong; returns the seconds until the next try. */
function fail(error) {
  if (error instanceof Refused) {
    say(byId("key-why"), error.message);
    key.forget();
    if (!byId("key-dialog").open) byId("key-dialog").showModal();
    mark(byId("live"), "state", "lost");
    say(byId("live-text"), "no key");
    return MAX_PAUSE_S;
  }
  numFailures += 1;
  const pauseS = Math.min(MAX_PAUSE_S, numFailures);
  const last = heardAt ? ` What you see is ${Math.round((Date.now() - heardAt) / 1000)} s old.` : "";
  say(byId("trouble-title"), "The gateway does not answer.");
  say(byId("trouble-text"), `${error.message.replace(/[.]$/, "")}; trying again in ${pauseS} s.${last}`);
  byId("trouble").hidden = false;
  document.body.classList.toggle("is-stale", heardAt > 0);
  mark(byId("live"), "state", "lost");
  say(byId("live-text"), "not connected");
  return pauseS;
}

function status() {
  const every = report && report.period_s > 1 ? `, every ${report.period_s.toFixed(1)} s` : "";
  mark(byId("live"), "state", isPaused ? "paused" : "live");
  say(byId("live-text"), isPaused ? "paused" : `live${every}`);
}

function pause() {
  isPaused = !isPaused;
  byId("pause").setAttribute("aria-pressed", isPaused);
  say(byId("pause"), isPaused ? "Go on" : "Pause");
  clearTimeout(timer);
  status();
  if (!isPaused) ask();
}

function clear() {
  byId("filter").value = "";
  byId("filter").dispatchEvent(new Event("input"));
  unmark();
}

applyTheme();
setUpAdapters(ask);
setUpShortcuts({ pause, theme: nextTheme, clear });
byId("pause").addEventListener("click", pause);
byId("theme").addEventListener("click", nextTheme);
byId("help-button").addEventListener("click", () => byId("help").showModal());
byId("forget").addEventListener("click", () => {
  key.forget();
  location.reload();
});
byId("key-dialog").addEventListener("cancel", (event) => event.preventDefault());
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(byId("key-input").value.trim());
  byId("key-input").value = "";
  byId("key-dialog").close();
  ask();
});
document.addEventListener("visibilitychange", () => {
  if (!isPaused) ask();
});
ask();
