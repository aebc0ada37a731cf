// The one request of this page, and the key it needs where the fleet has keys.

const STORED = "lorafleet-key";
const TIMEOUT_MS = 15000;

export class Refused extends Error {}
export class Silent extends Error {}

export const key = {
  get: () => sessionStorage.getItem(STORED),
  set: (value) => sessionStorage.setItem(STORED, value),
  forget: () => sessionStorage.removeItem(STORED),
};

/** The report. Throws Refused when a key is missing or will not do, Silent when nothing sensible answers. */
export async function fetchFleet(parameters) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value));
  const headers = key.get() ? { Authorization: `Bearer ${key.get()}` } : {};
  let response;
  try {
    response = await fetch(`v1/fleet?${query}`, { headers, cache: "no-store", credentials: "omit", signal: AbortSignal.timeout(TIMEOUT_MS) });
  } catch {
    throw new Silent("nothing answers");
  }
  const body = await response.json().catch(() => null);
  if (response.status === 401 || response.status === 403) throw new Refused(why(response.status, body));
  if (!response.ok || body === null || !body.totals) throw new Silent(body?.error?.message ?? `HTTP ${response.status}`);
  return body;
}

function why(status, body) {
  const message = body?.error?.message ?? "the gateway refuses";
  if (status === 403) return `This key is known, but ${message.replace(/^this key /, "it ")}.`;
  return key.get() ? `Refused: ${message}.` : "";
}
