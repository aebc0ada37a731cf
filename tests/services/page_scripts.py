"""JavaScript that the tests of the dashboard run in its page."""

FEED = """
async (change) => {
  const url = new URL("dashboard/", location.href);
  const headers = { Authorization: `Bearer ${sessionStorage.getItem("lorafleet-key")}` };
  const report = await (await fetch("v1/fleet", { headers })).json();
  change(report);
  const part = async (name) => import(new URL(name, url));
  const panels = await part("panels.js");
  const shows = [panels.showFindings, panels.showRollouts, panels.showEvents];
  shows.push((await part("fleet_map.js")).showFleet, (await part("tenants.js")).showTenants);
  shows.push((await part("adapters.js")).showAdapters);
  const began = performance.now();
  for (const show of shows) show(report);
  document.body.offsetHeight;
  return performance.now() - began;
}
"""
"""Show a report of the test's making through the page's own modules; returns the milliseconds that it took."""

THOUSAND = """
(report) => {
  const name = (i) => "tenant-" + String(i).padStart(4, "0");
  report.adapters.rows = Array.from({ length: 1000 }, (_, i) => [
    name(i), "team-" + (i % 40), 1, 1, i % 3, 0, i, (i * 37) % 101, 0, i,
    (i * 53) % 997, 0.05, ((i * 71) % 89) / 10, 0.5, 1,
  ]);
  report.adapters.num_total = report.adapters.num_matching = 1000;
  const slots = Array.from({ length: 64 }, (_, i) => ["resident", name(i), 1, 0, i % 7]);
  report.replicas = report.replicas.map((one) => ({ ...one, num_slots: 64, slots }));
}
"""
"""A thousand adapters, and 64 slots a replica."""

TIMED = """
((work) => {
  const began = performance.now();
  work();
  document.body.offsetHeight;
  return performance.now() - began;
})
"""
"""Milliseconds of some work with the layout after it."""

SCROLL = """
(async () => {
  const scroll = document.querySelector("#adapter-scroll");
  const times = [];
  for (let top = 0; top < 30000; top += 1500) {
    scroll.scrollTop = top;
    const began = performance.now();
    scroll.dispatchEvent(new Event("scroll"));
    document.body.offsetHeight;
    times.push(performance.now() - began);
    await new Promise(requestAnimationFrame);
  }
  times.sort((a, b) => a - b);
  return [times[times.length >> 1], times.at(-1)];
})()
"""
"""The table from top to bottom; the median and the worst milliseconds of a screen."""

CONTRAST = """
(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = rgba(getComputedStyle(at).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255, 255];
  };
  const poor = new Set();
  for (const element of document.querySelectorAll("header *, main *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.checkVisibility()) continue;
    const [a, b] = [light(rgba(getComputedStyle(element).color)), light(ground(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.add(`${element.className || element.tagName} ${ratio.toFixed(2)}`);
  }
  return [...poor];
})()
"""
"""Texts whose colour is less than 4.5 to 1 against what is behind them (WCAG 2, level AA)."""
