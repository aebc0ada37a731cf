// Who holds the queue and who gets the service.

import { byId, empty, follow, make, say } from "./dom.js";
import { percent, plural, rate, seconds } from "./format.js";

const QUEUE = 8;

export function showTenants(report) {
  const parent = byId("tenant-list");
  const noisy = new Set(report.findings.filter((finding) => finding.code === "noisy_tenant").map((finding) => finding.subject));
  say(byId("tenants-note"), report.num_tenants > report.tenants.length ? `${report.tenants.length} of ${report.num_tenants}` : "");
  if (!report.tenants.length) {
    parent.replaceChildren(empty("Nobody has called yet."));
    return;
  }
  if (parent.firstElementChild?.classList.contains("empty")) parent.replaceChildren();
  const queued = report.tenants.reduce((sum, tenant) => sum + tenant.waiting, 0);
  follow(parent, inOrder(report.tenants, queued), (tenant) => tenant.tenant, build, (element, tenant) => update(element, tenant, queued, noisy.has(tenant.tenant)));
}

/** Those who hold a queue worth the name first; the others by name, so that nobody jumps about. */
function inOrder(tenants, queued) {
  const weight = (tenant) => (queued >= QUEUE ? Math.round(tenant.queue_share * 10) : 0);
  return [...tenants].sort((a, b) => weight(b) - weight(a) || (a.tenant < b.tenant ? -1 : 1));
}

function build(tenant) {
  const badge = make("span", "badge", "noisy");
  const numbers = make("p", "numbers");
  const waits = make("p", "waits");
  const queue = bar("queue", `${tenant.tenant}: share of the queue`);
  const service = bar("service", `${tenant.tenant}: share of the service`);
  const bars = make("div", "bars", queue.bar, queue.text, service.bar, service.text);
  const element = make("article", "tenant", make("h3", "", tenant.tenant, badge), numbers, bars, waits);
  return Object.assign(element, { badge, numbers, waits, queue, service });
}

function bar(kind, label) {
  const element = make("progress", kind);
  element.max = 1;
  element.setAttribute("aria-label", label);
  return { bar: element, text: make("span") };
}

function update(element, tenant, queued, isNoisy) {
  element.classList.toggle("noisy", isNoisy);
  element.badge.hidden = !isNoisy;
  element.numbers.replaceChildren(make("b", "", plural(tenant.waiting, "call")), ` wait, ${tenant.in_flight} in flight`);
  show(element.queue, tenant.waiting / Math.max(queued, QUEUE), queued >= QUEUE ? percent(tenant.queue_share) : "");
  show(element.service, tenant.service_share, percent(tenant.service_share));
  say(element.waits, waits(tenant));
}

function show({ bar: element, text }, part, words) {
  element.value = part;
  say(text, words);
}

function waits(tenant) {
  const parts = [`${rate(tenant.requests_per_s)} calls/s`, `first token p50 ${seconds(tenant.first_token_p50_s)}, p99 ${seconds(tenant.first_token_p99_s)}`];
  if (tenant.waiting) parts.push(`oldest waits ${seconds(tenant.oldest_wait_s)}`);
  if (tenant.limited_per_s > 0) parts.push(`${rate(tenant.limited_per_s)}/s refused by its limits`);
  return parts.join(" · ");
}
