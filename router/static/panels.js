// What stands out, what is on its way, and what the registry did last.

import { byId, empty, follow, make, mark, say } from "./dom.js";
import { ago, percent, plural, rate, seconds } from "./format.js";

const WORDS = { bad: "Trouble", warn: "Look", info: "Note", good: "Calm" };

export function showFindings(report) {
  const calm = { severity: "good", text: report.totals.requests_per_s > 0 ? "Nothing stands out." : "Nothing stands out. Nobody is calling.", code: "calm" };
  const found = report.findings.length ? report.findings : [calm];
  follow(byId("findings"), found, (finding) => `${finding.code} ${finding.subject}`, buildFinding, (element, finding) => {
    mark(element, "severity", finding.severity);
    say(element.word, WORDS[finding.severity]);
    say(element.text, finding.text);
  });
}

function buildFinding() {
  const word = make("b");
  const text = make("span");
  return Object.assign(make("p", "finding", word, text), { word, text });
}

export function showRollouts(report) {
  const parent = byId("rollout-list");
  say(byId("rollouts-note"), report.rollouts.length ? `${report.rollouts.length} in progress` : "");
  if (!report.rollouts.length) {
    parent.replaceChildren(empty("Nothing is on its way. Start one: ", "lorafleet push", " or ", "lorafleet canary"));
    return;
  }
  if (parent.firstElementChild?.classList.contains("empty")) parent.replaceChildren();
  follow(parent, report.rollouts, (one) => `${one.kind} ${one.name} ${one.number} ${one.alias}`, buildRollout, (element, one) => updateRollout(element, one, report.at_s));
}

function buildRollout(rollout) {
  const kind = make("p", "kind");
  const progress = make("progress");
  const detail = make("p", "detail");
  const compare = make("p", "detail");
  const element = make("article", "rollout", make("h3", "", `${rollout.name}@${rollout.number}`), kind, progress, detail, compare);
  mark(element, "kind", rollout.kind);
  return Object.assign(element, { kind, progress, detail, compare });
}

function updateRollout(element, one, nowS) {
  const staged = `${one.num_staged} of ${plural(one.num_replicas, "replica")}`;
  const since = one.since_s === null ? "" : `, since ${ago(one.since_s, nowS).replace(" ago", "")}`;
  const alias = one.alias ?? "an alias";
  const is = {
    activation: () => {
      setProgress(element.progress, one.num_staged, one.num_replicas, `staged on ${staged}`);
      say(element.kind, one.weight === null ? `becoming ${alias}` : `canary of ${alias}, ${percent(one.weight)}`);
      say(element.detail, `staged on ${staged}${since}${one.waiting_for.length ? `; waiting for ${one.waiting_for.join(", ")}` : ""}`);
    },
    canary: () => {
      setProgress(element.progress, one.weight, 1, `${percent(one.weight)} of the keys`);
      say(element.kind, `canary of ${alias}`);
      say(element.detail, `takes ${percent(one.weight)} of the keys${since}`);
    },
    draining: () => {
      setProgress(element.progress, null, 1, "draining");
      say(element.kind, "draining");
      say(element.detail, one.until_s === null ? "what runs may end" : `what runs may end within ${Math.max(0, Math.round(one.until_s - nowS))} s`);
    },
  };
  is[one.kind]();
  say(element.compare, one.new && one.old ? `${traffic(one.new)} — against ${traffic(one.old)}` : "");
}

function setProgress(progress, value, max, label) {
  progress.max = max || 1;
  if (value === null) progress.removeAttribute("value");
  else progress.value = value;
  progress.setAttribute("aria-label", label);
}

function traffic(version) {
  const failing = version.failures_per_s > 0 ? `, ${rate(version.failures_per_s)}/s fail` : "";
  return `@${version.number}: ${rate(version.requests_per_s)} calls/s, first token p99 ${seconds(version.first_token_p99_s)}${failing}`;
}

const SENTENCES = {
  version_pushed: () => "was pushed",
  activation_requested: (d) => (d.weight ? `is to take ${percent(Number(d.weight))} of ${d.alias}` : `is to become ${d.alias}`),
  activation_failed: (d) => `did not become ${d.alias}: ${d.error}`,
  alias_moved: (d) => `is now ${d.alias}`,
  canary_set: (d) => `takes ${percent(Number(d.weight))} of ${d.alias}`,
  canary_halted: (d) => `takes nothing of ${d.alias} any more`,
  version_draining: () => "takes no new calls, what runs may end",
};

/** What happened, and to whom. */
function sentence({ kind, name, number, detail }) {
  const words = SENTENCES[kind]?.(detail) ?? kind.split("_").slice(1).join(" ");
  const about = name ? `${name}${number === null ? "" : `@${number}`}` : kind.split("_")[0];
  const which = name ? "" : ` ${detail.replica_id ?? detail.tenant ?? detail.key_id ?? ""}`;
  return [`${about}${which} `, `${words} `];
}

export function showEvents(report) {
  const parent = byId("event-list");
  say(byId("events-note"), `revision ${report.revision}${report.registry_answers ? "" : ", does not answer"}`);
  if (report.events === null) {
    parent.replaceChildren(empty("The change log is for keys with the scope ", "admin", "."));
    return;
  }
  if (!report.events.length) {
    parent.replaceChildren(empty("Nothing has changed yet. Push the first adapter: ", "lorafleet push NAME DIR"));
    return;
  }
  if (parent.firstElementChild?.classList.contains("empty")) parent.replaceChildren();
  const newest = [...report.events].reverse();
  follow(parent, newest, (event) => event.revision, buildEvent, (element, event) => say(element.time, ago(event.at_s, report.at_s)));
}

function buildEvent(event) {
  const time = make("time");
  time.dateTime = new Date(event.at_s * 1000).toISOString();
  time.title = new Date(event.at_s * 1000).toLocaleString();
  const [about, words] = sentence(event);
  const text = make("p", "", make("b", "", about), words, make("span", "who", `by ${event.actor}`));
  const element = Object.assign(make("article", "event", time, text), { time });
  mark(element, "tone", /failed|quarantined/.test(event.kind) ? "bad" : "");
  return element;
}
