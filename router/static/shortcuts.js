// What keys do, and the list that `?` shows.

import { byId, make } from "./dom.js";

const SECTIONS = { 1: "fleet", 2: "tenants", 3: "rollouts", 4: "events", 5: "adapters" };

export function setUpShortcuts({ pause, theme, clear }) {
  const actions = {
    "?": ["This list", () => byId("help").showModal()],
    "/": ["Filter adapters", () => byId("filter").focus()],
    p: ["Pause or go on", pause],
    t: ["Colours: auto, dark, light", theme],
    Escape: ["Clear the filter and the mark", clear],
  };
  for (const [digit, id] of Object.entries(SECTIONS)) {
    const title = byId(id).querySelector("h2").textContent;
    actions[digit] = [`Go to ${title}`, () => byId(id).focus()];
  }
  const more = { "↑ ↓ Home End": "Move in the table of adapters", Enter: "Mark an adapter in the fleet" };
  byId("shortcuts").append(
    ...Object.entries(actions).flatMap(([name, [text]]) => row(name, text)),
    ...Object.entries(more).flatMap(([name, text]) => row(name, text)),
  );
  document.addEventListener("keydown", (event) => {
    const isTyping = event.target instanceof HTMLInputElement;
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (isTyping && event.key !== "Escape") return;
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    action[1]();
  });
}

const row = (name, text) => [make("dt", "", make("kbd", "", name)), make("dd", "", text)];
