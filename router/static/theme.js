// Dark or light: as the system says, unless somebody chose.

import { byId, say } from "./dom.js";

const STORED = "lorafleet-theme";
const NEXT = { auto: "dark", dark: "light", light: "auto" };
const WORDS = { auto: "Auto", dark: "Dark", light: "Light" };
const system = matchMedia("(prefers-color-scheme: dark)");

const chosen = () => (localStorage.getItem(STORED) in NEXT ? localStorage.getItem(STORED) : "auto");

export function applyTheme() {
  const choice = chosen();
  document.documentElement.dataset.theme = choice === "auto" ? (system.matches ? "dark" : "light") : choice;
  say(byId("theme"), WORDS[choice]);
  byId("theme").setAttribute("aria-label", `Colours: ${WORDS[choice]}`);
}

export function nextTheme() {
  localStorage.setItem(STORED, NEXT[chosen()]);
  applyTheme();
}

system.addEventListener("change", applyTheme);
