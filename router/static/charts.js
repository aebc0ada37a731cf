// Small areas over time, drawn as SVG. A gap in time is a gap in the line.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300;
const HEIGHT = 48;
const TOP = 4;
export const SPAN_S = 300;
const SHORTEST_S = 60;
const GAP_S = 15;

export function chart(label) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  for (const part of ["area", "line"]) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", part);
    svg.append(path);
  }
  return svg;
}

/** Draw `points` ([at_s, value or null]); the scale ends at `least`, or above the highest value. */
export function draw(svg, points, nowS, least) {
  const spanS = Math.min(SPAN_S, Math.max(SHORTEST_S, points.length ? nowS - points[0][0] : 0));
  const values = points.map((point) => point[1]).filter((value) => value !== null);
  const top = Math.max(least, ...values.map((value) => value * 1.06));
  const x = (atS) => WIDTH * (1 - (nowS - atS) / spanS);
  const y = (value) => HEIGHT - (HEIGHT - TOP) * Math.min(1, value / top);
  const [area, line] = svg.children;
  let areas = "";
  let lines = "";
  for (const run of runs(points)) {
    const path = run.map(([atS, value]) => `${x(atS).toFixed(1)},${y(value).toFixed(1)}`).join("L");
    lines += `M${path}`;
    areas += `M${x(run[0][0]).toFixed(1)},${HEIGHT}L${path}L${x(run.at(-1)[0]).toFixed(1)},${HEIGHT}Z`;
  }
  line.setAttribute("d", lines);
  area.setAttribute("d", areas);
}

function runs(points) {
  const found = [];
  let run = [];
  for (const point of points) {
    const isApart = run.length && point[0] - run.at(-1)[0] > GAP_S;
    if (point[1] === null || isApart) {
      if (run.length) found.push(run);
      run = [];
    }
    if (point[1] !== null) run.push(point);
  }
  if (run.length) found.push(run);
  return found;
}
