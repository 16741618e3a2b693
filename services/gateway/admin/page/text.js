// The texts of the page, derived from a state of the feed. No DOM access.

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

/** The readiness, groups, waiting requests and rates of a model. */
export function modelText(model) {
  const parts = [model.ready ? "ready" : (model.missing[0] ?? "not ready")];
  parts.push(`${model.workers} workers in ${model.groups} groups`, `${model.queued ?? "?"} waiting`);
  parts.push(`${Math.round(model.tokens_per_s)} tokens/s`, `TTFT ${seconds(model.ttft_s)}`);
  return parts.join(" · ");
}

/** A batch's id, state, lines, rate and time left. */
export function batchText(batch) {
  const parts = [`${batch.id} ${batch.state.replace("_", " ")}`];
  if (batch.total) parts.push(`${batch.ended} of ${batch.total} lines`);
  if (batch.failed) parts.push(`${batch.failed} failed`);
  if (batch.progress) {
    parts.push(`${Math.round(batch.progress.tokens_per_s)} tokens/s`);
    parts.push(`about ${Math.ceil(batch.progress.left_s / 60)} min left`);
  }
  return parts.join(" · ");
}

/** The range of lengths of each bucket, given its greatest length and count. */
export function bucketTexts(buckets) {
  return buckets.map(([length], index) => {
    const above = index ? buckets[index - 1][0] : 0;
    return `${(above + 1).toLocaleString()} to ${length.toLocaleString()} tokens`;
  });
}

/** What padding would cost with these buckets; "" without any. */
export function paddingText(lengths) {
  if (!lengths?.buckets.length) return "";
  const share = (100 * lengths.padding_share).toFixed(1);
  return `${share} % of all tokens would be padding on an engine that pads to the longest of a bucket.`;
}

/** What a worker computes, with the requests that it has handed over; "" if it does everything. */
export function roleText(worker) {
  if (worker.role === "prefill") return `computes prompts · ${worker.handed_over_total} handed over`;
  return worker.role === "decode" ? "computes answers" : "";
}

/** Parameter bytes of the whole model on a worker; 0 if the model's shape is unknown. */
export function wholeModel(worker) {
  const shape = worker.shape;
  if (!shape) return 0;
  return shape.num_layers * shape.layer_bytes + shape.embedding_bytes + shape.head_bytes;
}

/** Sums over the workers; `freed`: parameter bytes that became KV cache. */
export function totals(state) {
  const sum = { parameters: 0, used: 0, free: 0, staging: 0, budget: 0, freed: 0 };
  sum.running = 0;
  sum.waiting = state.queued ?? 0;
  for (const worker of state.workers) {
    sum.parameters += worker.parameter_bytes;
    sum.used += worker.kv_used_bytes;
    sum.free += worker.kv_free_bytes;
    sum.staging += worker.staging_bytes;
    sum.budget += budget(worker);
    sum.freed += Math.max(0, wholeModel(worker) - worker.parameter_bytes);
    sum.running += worker.running;
    sum.waiting += worker.waiting;
  }
  return sum;
}

/** The full height of a worker's column in bytes. The parts may briefly exceed the budget, since
 *  they come from reports of different times. */
export function budget(worker) {
  const parts =
    worker.parameter_bytes + worker.kv_used_bytes + worker.kv_free_bytes + worker.staging_bytes;
  return Math.max(worker.budget_bytes, parts, 1);
}

/** Text for the progress of a group's change; "" without a change. */
export function changing(group, workers) {
  const members = group.members.map((id) => workers.get(id)).filter(Boolean);
  const over = members.filter((worker) => worker.epoch >= group.epoch).length;
  if (over < members.length) return `changing over: ${over} of ${members.length}`;
  if (group.degraded) return "a member was lost; loading its layers";
  return group.changing ? "preparing to change" : "";
}

/** Why workers cannot drop layers, a sentence for each reason; "" if all can. */
export function withoutDrops(state) {
  const names = new Map();
  for (const worker of state.workers) {
    if (!worker.no_drops) continue;
    names.set(worker.no_drops, [...(names.get(worker.no_drops) ?? []), worker.id]);
  }
  return [...names].map(([reason, ids]) => `${ids.join(", ")} cannot drop layers: ${reason}.`).join(" ");
}

/** A headline for the cluster's memory, and a sentence with the figures. */
export function headline(state) {
  if (!state.workers.length) {
    return ["No workers yet.", (state.missing ?? []).join("; ") || "Workers register once they are ready."];
  }
  const sum = totals(state);
  const kv = sum.used + sum.free;
  const share = kv ? Math.round((100 * sum.used) / kv) : 0;
  const load = `${share} % of the KV cache is in use: ${sum.running} requests running, ${sum.waiting} waiting.`;
  const merged = state.groups.filter((group) => group.members.length > 1);
  const change = state.groups.some((group) => group.changing);
  if (merged.length && sum.freed > 0) {
    const subject = merged.length === 1 ? merged[0].members.join(" and ") : `${merged.length} groups`;
    const verb = merged.length === 1 ? "share one model" : "share models";
    const restore = change ? "The group is about to split and restore its parameters. " : "";
    return [
      `Parameters became KV cache: ${subject} ${verb}.`,
      `${restore}${size(sum.freed)} of duplicate parameters became KV cache. ${load}`,
    ];
  }
  if (change) return ["Groups are preparing to change.", load];
  if (sum.waiting > 0 && share > 80) return ["Requests exceed the KV cache.", load];
  return ["Normal: every worker holds the whole model; the rest of its memory is KV cache.", load];
}
