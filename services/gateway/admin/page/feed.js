// Talks to the admin port: the feed of states, and changes of groups. The key is sent as a header
// only; that is why the feed is read with fetch, as an EventSource cannot send one.

const EVENTS = "/tideserve/v1/events";
// The gateway says something every two seconds.
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
    return `the gateway answers ${response.status}`;
  }
}

/**
 * Follows the feed for as long as the page is open, and again after every loss.
 *
 * `on.state(object)`, `on.lost(reason)`, and `on.key(sentence)`, which returns a promise that
 * resolves when there is another key.
 */
export async function follow(on) {
  let failures = 0;
  for (;;) {
    const abort = new AbortController();
    let timer = setTimeout(() => abort.abort(), SILENCE_MS);
    let reason = "the gateway ended it";
    try {
      const response = await fetch(EVENTS, { headers: headers(), signal: abort.signal });
      if (response.status === 401) {
        clearTimeout(timer);
        await on.key(sessionStorage.getItem(KEY) ? "This key is not the right one." : "");
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
      if (abort.signal.aborted) reason = "the gateway says nothing";
      else reason = error instanceof TypeError ? "the gateway cannot be reached" : error.message;
    }
    clearTimeout(timer);
    on.lost(reason);
    const pause = RETRY_MS[Math.min(failures, RETRY_MS.length - 1)];
    failures += 1;
    await new Promise((resume) => setTimeout(resume, pause));
  }
}

/** Merges (`path` "merge") or splits groups; `say` is told every step as {phase, message}. */
export async function change(path, groups, say) {
  const query = new URLSearchParams(groups.map((group) => ["group", group]));
  try {
    const response = await fetch(`/tideserve/v1/groups/${path}?${query}`, {
      method: "POST",
      headers: headers(),
    });
    if (!response.ok) {
      say({ phase: "failed", message: await refusal(response) });
      return;
    }
    for await (const step of eventsOf(response)) {
      say(step.error ? { phase: "failed", message: step.error.message } : step);
    }
  } catch {
    say({ phase: "failed", message: "the answer broke off; look at the groups" });
  }
}
