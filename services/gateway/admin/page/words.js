// What the page says, from a state of the feed. No drawing here.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function size(bytes) {
  let value = bytes;
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value.toFixed(unit < 2 || value >= 100 ? 0 : 1)} ${UNITS[unit]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(1)} s`;
}

/** Bytes of all parameters of the model at one worker, 0 if nobody knows. */
export function wholeModel(worker) {
  const shape = worker.shape;
  if (!shape) return 0;
  return shape.num_layers * shape.layer_bytes + shape.embedding_bytes + shape.head_bytes;
}

/** Sums over the workers; `ebbed` is what parameters have given to the KV cache. */
export function totals(state) {
  const sum = { parameters: 0, used: 0, free: 0, staging: 0, budget: 0, ebbed: 0 };
  sum.running = 0;
  sum.waiting = state.queued ?? 0;
  for (const worker of state.workers) {
    sum.parameters += worker.parameter_bytes;
    sum.used += worker.kv_used_bytes;
    sum.free += worker.kv_free_bytes;
    sum.staging += worker.staging_bytes;
    sum.budget += budget(worker);
    sum.ebbed += Math.max(0, wholeModel(worker) - worker.parameter_bytes);
    sum.running += worker.running;
    sum.waiting += worker.waiting;
  }
  return sum;
}

/** The height of a worker's column. Two reports of one moment may together be more than it. */
export function budget(worker) {
  const parts =
    worker.parameter_bytes + worker.kv_used_bytes + worker.kv_free_bytes + worker.staging_bytes;
  return Math.max(worker.budget_bytes, parts, 1);
}

/** How far a change of a group is, in words; "" if there is none. */
export function changing(group, workers) {
  const members = group.members.map((id) => workers.get(id)).filter(Boolean);
  const over = members.filter((worker) => worker.epoch >= group.epoch).length;
  if (over < members.length) return `changing over: ${over} of ${members.length}`;
  if (group.degraded) return "a member was lost; loading its layers";
  return group.changing ? "getting ready to change" : "";
}

/** The state of the tide in one sentence, and what it rests on in another. */
export function headline(state) {
  if (!state.workers.length) {
    return ["No worker yet.", (state.missing ?? []).join("; ") || "They register when they are ready."];
  }
  const sum = totals(state);
  const kv = sum.used + sum.free;
  const share = kv ? Math.round((100 * sum.used) / kv) : 0;
  const load = `${share} % of the KV cache is in use: ${sum.running} requests run, ${sum.waiting} wait.`;
  const merged = state.groups.filter((group) => group.members.length > 1);
  const change = state.groups.some((group) => group.changing);
  if (merged.length && sum.ebbed > 0) {
    const who = merged.length === 1 ? merged[0].members.join(" and ") : `${merged.length} groups`;
    const verb = merged.length === 1 ? "share one model" : "share models";
    const news = change ? "Parameters are coming back: the group is about to split. " : "";
    return [
      `Parameters ebbed, KV rose: ${who} ${verb}.`,
      `${news}${size(sum.ebbed)} of parameters became KV cache. ${load}`,
    ];
  }
  if (change) return ["The tide turns: groups get ready to change.", load];
  if (sum.waiting > 0 && share > 80) return ["Requests flood the KV cache.", load];
  return ["Calm: every worker holds the whole model; KV takes what is left.", load];
}
