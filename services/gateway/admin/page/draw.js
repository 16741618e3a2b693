// Draws a state of the feed: a column of memory per worker, by group; charts and tables.

import {
  batchText, bucketTexts, budget, changing, modelText, roleText, size, totals, wholeModel,
} from "./text.js";

const SVG = "http://www.w3.org/2000/svg";
const PARTS = ["parameters", "used", "free", "changing", "staging"];
const NAMES = { parameters: "parameters", used: "KV in use", free: "KV free" };
const SAMPLES = 240;
// Minimum share of the column that a part needs for a label.
const LABEL_SHARES = { parameters: 0.15, used: 0.15, free: 0.18 };
const calm = matchMedia("(prefers-reduced-motion: reduce)");

export function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

function makeSvg(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** Sets a text only if it differs, so that screen readers do not repeat it. */
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Draws a worker: a column of its memory, with its layers and load below. */
class WorkerColumn {
  constructor(id) {
    this.root = make("div", "tank");
    this.column = make("div", "column");
    this.column.setAttribute("role", "img");
    this.parts = {};
    for (const part of PARTS) {
      const element = make("div", `part ${part}`);
      element.append(make("span", "label"));
      this.parts[part] = element;
    }
    // Reversed: the first part is at the bottom of the column.
    this.column.append(...PARTS.map((part) => this.parts[part]).reverse());
    const wave = makeSvg("svg", { class: "wave", viewBox: "0 0 240 10", preserveAspectRatio: "none" });
    wave.append(makeSvg("path", { d: waves() }));
    this.parts.used.prepend(wave);
    this.mark = make("div", "mark");
    this.mark.append(make("span"));
    this.column.append(this.mark);
    this.layers = make("p", "layers");
    this.load = make("p", "load");
    this.role = make("p", "role");
    this.root.append(this.column, make("p", "name", id), this.layers, this.load, this.role);
  }

  update(worker, layerRange, isChanging) {
    const whole = budget(worker);
    const bytes = {
      parameters: worker.parameter_bytes,
      used: worker.kv_used_bytes,
      free: worker.kv_free_bytes,
      staging: worker.staging_bytes,
    };
    const rest = whole - bytes.parameters - bytes.used - bytes.free - bytes.staging;
    // Outside a change of groups, the rest is too small for another chunk of memory: count it as staging.
    bytes.changing = isChanging ? rest : 0;
    if (!isChanging) bytes.staging += rest;
    for (const part of PARTS) {
      const share = bytes[part] / whole;
      this.parts[part].style.height = `${100 * share}%`;
      this.parts[part].classList.toggle("none", share === 0);
      const named = NAMES[part] && share > LABEL_SHARES[part];
      write(this.parts[part].lastChild, named ? `${NAMES[part]}\n${size(bytes[part])}` : "");
    }
    const full = wholeModel(worker);
    const freed = full > bytes.parameters * 1.02;
    this.mark.hidden = !freed;
    this.mark.style.bottom = `${(100 * full) / whole}%`;
    write(this.mark.firstChild, `${size(full - bytes.parameters)} became KV`);
    const layers = worker.shape ? worker.shape.num_layers : 0;
    const [first, end] = layerRange ?? [0, layers];
    this.column.style.setProperty("--held", String(Math.max(1, Math.min(48, end - first))));
    const all = end - first >= layers;
    write(this.layers, all ? `all ${layers || ""} layers` : `layers ${first}–${end - 1} of ${layers}`);
    const slots = worker.adapter_slots;
    const adapters = slots ? ` · ${worker.adapters_loaded} of ${slots} adapters` : "";
    write(this.load, `${worker.running} running · ${worker.waiting} waiting${adapters}`);
    write(this.role, roleText(worker));
    const text = PARTS.filter((part) => NAMES[part]).map((part) => `${NAMES[part]} ${size(bytes[part])}`);
    this.column.setAttribute("aria-label", `${worker.id}: ${text.join(", ")} of ${size(whole)}`);
  }
}

function waves() {
  let path = "M0 5";
  for (let x = 0; x < 240; x += 40) path += ` q10 -6 20 0 t20 0`;
  return `${path} V10 H0 Z`;
}

/** Draws all groups. When a worker joins another group, its column slides to the new position. */
export class Groups {
  constructor(root) {
    this.root = root;
    this.columns = new Map();
    this.shape = "";
    this.chosen = new Set();
    this.onChoice = () => {};
  }

  update(state) {
    const workers = new Map(state.workers.map((worker) => [worker.id, worker]));
    const grouped = new Set(state.groups.flatMap((group) => group.members));
    const ungrouped = [...workers.keys()].filter((id) => !grouped.has(id));
    const shape = JSON.stringify([state.groups.map((group) => [group.id, group.members]), ungrouped]);
    if (shape !== this.shape) {
      this.shape = shape;
      this.rebuild(state.groups, workers, ungrouped);
    }
    this.root.classList.toggle("few", workers.size < 5);
    this.root.classList.toggle("many", workers.size > 10);
    const layerRanges = new Map();
    const changingIds = new Set();
    for (const group of state.groups) {
      group.members.forEach((id, index) => layerRanges.set(id, group.layers[index]));
      const note = this.notes.get(group.id);
      const change = changing(group, workers);
      note.classList.toggle("turning", change !== "");
      if (change) for (const id of group.members) changingIds.add(id);
      write(note, change || (group.members.length > 1 ? `one model across ${group.members.length} workers` : "the whole model"));
    }
    for (const [id, worker] of workers) this.columns.get(id).update(worker, layerRanges.get(id), changingIds.has(id));
  }

  rebuild(groups, workers, ungrouped) {
    const before = new Map();
    for (const [id, column] of this.columns) before.set(id, column.root.getBoundingClientRect());
    const focused = document.activeElement?.id;
    this.notes = new Map();
    this.chosen = new Set(groups.map((group) => group.id).filter((id) => this.chosen.has(id)));
    const boxes = groups.map((group) => this.box(group, workers));
    if (ungrouped.length) boxes.push(this.ungroupedBox(ungrouped));
    this.root.replaceChildren(...boxes);
    for (const id of this.columns.keys()) if (!workers.has(id)) this.columns.delete(id);
    if (focused) document.getElementById(focused)?.focus();
    this.onChoice();
    if (calm.matches) return;
    for (const [id, column] of this.columns) {
      const old = before.get(id);
      if (!old) continue;
      const now = column.root.getBoundingClientRect();
      const shift = `translate(${old.left - now.left}px, ${old.top - now.top}px)`;
      column.root.animate([{ transform: shift }, { transform: "none" }], { duration: 700, easing: "ease-in-out" });
    }
  }

  box(group, workers) {
    const joined = group.members.length > 1;
    const box = make("section", joined ? "group joined" : "group");
    const head = make("h3");
    const label = make("label");
    const choice = make("input");
    choice.type = "checkbox";
    choice.id = `choose-${group.id}`;
    choice.checked = this.chosen.has(group.id);
    choice.addEventListener("change", () => {
      if (choice.checked) this.chosen.add(group.id);
      else this.chosen.delete(group.id);
      this.onChoice();
    });
    label.append(choice, group.id);
    head.append(label);
    const note = make("p", "note");
    this.notes.set(group.id, note);
    const row = make("div", "row");
    for (const id of group.members.filter((member) => workers.has(member))) row.append(this.workerColumn(id).root);
    box.append(head, row, note);
    return box;
  }

  ungroupedBox(ids) {
    const box = make("section", "group");
    const row = make("div", "row");
    for (const id of ids) row.append(this.workerColumn(id).root);
    box.append(make("h3", "", "without a group"), row);
    return box;
  }

  workerColumn(id) {
    if (!this.columns.has(id)) this.columns.set(id, new WorkerColumn(id));
    return this.columns.get(id);
  }
}

/** The last samples of a figure as a line; null is a gap. */
export class Sparkline {
  constructor(svg) {
    this.values = [];
    this.area = makeSvg("path", { class: "area" });
    this.line = makeSvg("path", { class: "line" });
    svg.append(this.area, this.line);
  }

  push(value) {
    this.values.push(value);
    if (this.values.length > SAMPLES) this.values.shift();
    const top = Math.max(1e-9, ...this.values.map((sample) => sample ?? 0)) * 1.1;
    const begin = SAMPLES - this.values.length;
    let line = "";
    let area = "";
    let start = null;
    this.values.forEach((sample, index) => {
      const x = begin + index;
      if (sample === null) {
        if (start !== null) area += ` L${x - 1} 40 Z`;
        start = null;
        return;
      }
      const y = (39 - (37 * sample) / top).toFixed(2);
      line += start === null ? `M${x} ${y}` : ` L${x} ${y}`;
      area += start === null ? `M${x} 40 L${x} ${y}` : ` L${x} ${y}`;
      start ??= x;
    });
    if (start !== null) area += ` L${begin + this.values.length - 1} 40 Z`;
    this.line.setAttribute("d", line);
    this.area.setAttribute("d", area);
  }
}

/** Memory of all workers over time: parameters at the bottom, then KV in use, KV free, staging. */
export class MemoryChart {
  constructor(svg, text) {
    this.samples = [];
    this.text = text;
    this.paths = ["staging", "free", "used", "parameters"].map((part) => {
      const path = makeSvg("path", { class: part });
      svg.append(path);
      return [part, path];
    });
  }

  push(state) {
    this.samples.push(totals(state));
    if (this.samples.length > SAMPLES) this.samples.shift();
    const begin = SAMPLES - this.samples.length;
    const below = {
      parameters: (sum) => sum.parameters,
      used: (sum) => sum.parameters + sum.used,
      free: (sum) => sum.budget - sum.staging,
      staging: (sum) => sum.budget,
    };
    for (const [part, path] of this.paths) {
      const points = this.samples.map((sum, index) => {
        const y = 100 - (100 * below[part](sum)) / Math.max(1, sum.budget);
        return `L${begin + index} ${y.toFixed(2)}`;
      });
      path.setAttribute("d", `M${begin} 100 ${points.join(" ")} L${SAMPLES - 1} 100 Z`);
    }
    const now = this.samples.at(-1);
    write(this.text, `now: parameters ${size(now.parameters)}, KV in use ${size(now.used)}, KV free ${size(now.free)}`);
  }
}

/** Draws a bar and a line of text per batch. */
export function drawBatches(root, batches) {
  while (root.children.length > batches.length) root.lastChild.remove();
  batches.forEach((batch, index) => {
    let row = root.children[index];
    if (!row) {
      row = make("li");
      row.append(make("progress"), make("span"));
      root.append(row);
    }
    const [bar, text] = row.children;
    bar.max = Math.max(1, batch.total);
    bar.value = batch.ended;
    bar.setAttribute("aria-label", batch.id);
    write(text, batchText(batch));
  });
}

/** Draws a bar per bucket of waiting requests, as long as its share of the fullest. */
export function drawBuckets(root, buckets) {
  while (root.children.length > buckets.length) root.lastChild.remove();
  const most = Math.max(1, ...buckets.map(([, count]) => count));
  bucketTexts(buckets).forEach((text, index) => {
    let row = root.children[index];
    if (!row) {
      row = make("li");
      const track = make("span", "track");
      track.append(make("span", "bar"));
      row.append(make("span", "range"), track, make("span", "count"));
      root.append(row);
    }
    const [range, track, count] = row.children;
    write(range, text);
    track.firstChild.style.width = `${(100 * buckets[index][1]) / most}%`;
    write(count, buckets[index][1].toLocaleString());
  });
}

export function drawDecisions(list, decisions) {
  const shown = JSON.stringify(decisions);
  if (list.dataset.shown === shown) return;
  list.dataset.shown = shown;
  const rows = decisions.toReversed().map((decision) => {
    const row = make("li", decision.action);
    const time = make("time", "", new Date(decision.unix_s * 1000).toLocaleTimeString());
    time.dateTime = new Date(decision.unix_s * 1000).toISOString();
    row.append(time, make("p", "", decision.sentence));
    if (decision.outcome) row.append(make("p", "outcome", decision.outcome));
    return row;
  });
  if (!rows.length) rows.push(make("li", "none", "No decisions yet: all requests fit the KV cache."));
  list.replaceChildren(...rows);
}

/** Draws a line per model. */
export function drawModels(list, models) {
  const rows = models.map((model) => {
    const row = make("li", model.ready ? "ready" : "away");
    row.append(make("span", "", model.name), make("span", "", modelText(model)));
    return row;
  });
  list.replaceChildren(...rows);
}

export function drawServices(list, services) {
  const rows = services.map((service) => {
    const row = make("li", service.ready ? "ready" : "away");
    row.append(make("span", "", service.name), make("span", "", service.ready ? size(service.rss_bytes) : "not ready"));
    return row;
  });
  list.replaceChildren(...rows);
}

export function drawTable(body, state) {
  const rows = state.workers.map((worker) => {
    const group = state.groups.find((candidate) => candidate.members.includes(worker.id));
    const layerRange = group?.layers[group.members.indexOf(worker.id)];
    const cells = [
      group?.id ?? "none",
      layerRange ? `${layerRange[0]}–${layerRange[1] - 1}` : "all",
      size(worker.parameter_bytes),
      size(worker.kv_used_bytes),
      size(worker.kv_free_bytes),
      size(worker.staging_bytes),
      worker.running,
      worker.waiting,
      worker.preemptions_total,
      worker.host_blocks_total ? size(worker.host_bytes) : "none",
      worker.recalled_tokens_total ?? 0,
    ];
    const row = make("tr");
    const name = make("th", "", worker.id);
    name.scope = "row";
    row.append(name, ...cells.map((cell) => make("td", "", String(cell))));
    return row;
  });
  body.replaceChildren(...rows);
}

