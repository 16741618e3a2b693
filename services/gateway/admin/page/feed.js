// Client of the admin port: the feed of states, and changes of groups. Reads the feed with fetch,
// since an EventSource cannot send the key in a header.

const EVENTS = "/tideserve/v1/events";
// The gateway sends a state or a heartbeat at least every two seconds.
const SILENCE_MS = 6000;
const RETRY_MS = [500, 1000, 2000, 5000];
const KEY = "tideserve-admin-key";

export function rememberKey(key) {
  sessionStorage.setItem(KEY, key);
}

function headers() {
  const key = sessionStorage.getItem(KEY);
  return { "X-Tideserve-Admin": "1", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

/** The objects in a response of server-sent events; `alive` is called whenever bytes arrive. */
async function* eventsOf(response, alive = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    alive();
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const data = part.startsWith("data: ") ? part.slice(6) : "";
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function refusal(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the gateway returned status ${response.status}`;
  }
}

/**
 * Follows the feed while the page is open, and reconnects after every failure.
 *
 * Calls `on.state(object)`, `on.lost(reason)`, and `on.key(message)`, which returns a promise that
 * resolves once the user has entered a key.
 */
export async function follow(on) {
  let failures = 0;
  for (;;) {
    const abort = new AbortController();
    let timer = setTimeout(() => abort.abort(), SILENCE_MS);
    let reason = "the gateway closed the connection";
    try {
      const response = await fetch(EVENTS, { headers: headers(), signal: abort.signal });
      if (response.status === 401) {
        clearTimeout(timer);
        await on.key(sessionStorage.getItem(KEY) ? "This key is not valid." : "");
        continue;
      }
      if (!response.ok) throw new Error(await refusal(response));
      const alive = () => {
        clearTimeout(timer);
        timer = setTimeout(() => abort.abort(), SILENCE_MS);
      };
      for await (const state of eventsOf(response, alive)) {
        failures = 0;
        on.state(state);
      }
    } catch (error) {
      if (abort.signal.aborted) reason = "the gateway does not respond";
      else reason = error instanceof TypeError ? "the gateway cannot be reached" : error.message;
    }
    clearTimeout(timer);
    on.lost(reason);
    const pause = RETRY_MS[Math.min(failures, RETRY_MS.length - 1)];
    failures += 1;
    await new Promise((resume) => setTimeout(resume, pause));
  }
}

/** Merges (`path` "merge") or splits groups; calls `report({phase, message})` for every step. */
export async function change(path, groups, report) {
  const query = new URLSearchParams(groups.map((group) => ["group", group]));
  try {
    const response = await fetch(`/tideserve/v1/groups/${path}?${query}`, {
      method: "POST",
      headers: headers(),
    });
    if (!response.ok) {
      report({ phase: "failed", message: await refusal(response) });
      return;
    }
    for await (const step of eventsOf(response)) {
      report(step.error ? { phase: "failed", message: step.error.message } : step);
    }
  } catch {
    report({ phase: "failed", message: "the connection was lost; check the groups above" });
  }
}
