// The live page: follows the feed, samples the charts, and merges and splits groups on request.

import { change, follow, rememberKey } from "./feed.js";
import {
  Groups, Sparkline, MemoryChart, drawBatches, drawBuckets, drawDecisions, drawModels, drawServices, drawTable, make,
  write,
} from "./draw.js";
import { headline, paddingText, seconds, totals, withoutDrops } from "./text.js";

// The charts show 240 samples, that is two minutes.
const SAMPLE_MS = 500;
const TABLE_MS = 1000;

const element = (id) => document.getElementById(id);
const groups = new Groups(element("groups"));
const lines = {
  waiting: new Sparkline(element("waiting-line")),
  ttft: new Sparkline(element("ttft-line")),
  tokens: new Sparkline(element("tokens-line")),
};
const memoryChart = new MemoryChart(element("tide-chart"), element("tide-text"));
let newest = null;
let live = false;
let busy = false;

function show(state) {
  element("main").hidden = false;
  live = true;
  showLink("live", "live");
  element("lost").hidden = true;
  document.body.classList.remove("stale");
  // Keep showing the last workers and groups while the memory manager does not respond.
  if (state.errors && newest?.workers.length) {
    state = { ...state, workers: newest.workers, groups: newest.groups, decisions: newest.decisions };
    warn(`${capital(state.errors[0])}. Workers and groups below are outdated.`);
  } else if (state.warnings) {
    warn(`${capital(state.warnings[0])}.`);
  }
  newest = state;
  groups.update(state);
  const [title, below] = headline(state);
  write(element("headline"), title);
  write(element("subline"), below);
  write(element("model"), state.model);
  const noDrops = withoutDrops(state);
  element("no-drops").hidden = !noDrops;
  write(element("no-drops"), noDrops);
  const sum = totals(state);
  write(element("waiting"), String(sum.waiting));
  write(element("waiting-note"), `${state.queued ?? "?"} in the scheduler's queue, ${sum.running} running`);
  write(element("ttft"), seconds(state.ttft_s));
  write(element("tokens"), Math.round(state.tokens_per_s).toLocaleString());
  drawDecisions(element("decisions"), state.decisions);
  const several = state.models?.length > 1;
  element("by-model").hidden = !several;
  drawModels(element("models"), several ? state.models : []);
  // With several models, the buckets of the first one with waiting requests.
  const lengths = state.lengths ?? state.models?.find((model) => model.lengths?.buckets.length)?.lengths;
  element("lengths").hidden = !lengths?.buckets.length;
  drawBuckets(element("buckets"), lengths?.buckets ?? []);
  write(element("padding"), paddingText(lengths));
  element("offline").hidden = !state.batches?.length;
  drawBatches(element("batches"), state.batches ?? []);
  drawControls();
}

function showLost(reason) {
  live = false;
  showLink("lost", "feed lost");
  document.body.classList.add("stale");
  warn(`The feed is lost: ${reason}. The page is outdated; reconnecting.`);
}

function warn(text) {
  element("lost").hidden = false;
  write(element("lost"), text);
}

function showLink(state, text) {
  element("link").dataset.state = state;
  write(element("link"), text);
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

/** Shows the login form; resolves once the user has entered a key. */
function askForKey(message) {
  showLink("locked", "locked");
  const form = element("login");
  form.hidden = false;
  write(element("login-message"), message);
  element("key").focus();
  return new Promise((entered) => {
    form.onsubmit = (event) => {
      event.preventDefault();
      rememberKey(element("key").value.trim());
      element("key").value = "";
      form.hidden = true;
      entered();
    };
  });
}

function drawControls() {
  const merge = element("merge");
  const chosen = [...groups.chosen];
  const count = newest?.groups.length ?? 0;
  write(merge, chosen.length > 1 ? `Merge ${chosen.length} groups` : "Merge all groups");
  merge.disabled = busy || count < 2;
  const merged = (newest?.groups ?? []).filter((group) => group.members.length > 1);
  const names = JSON.stringify([merged.map((group) => group.id), busy]);
  const splits = element("splits");
  if (splits.dataset.names === names) return;
  splits.dataset.names = names;
  const buttons = merged.map((group) => {
    const button = make("button", "", `Split ${group.id}`);
    button.type = "button";
    button.disabled = busy;
    button.addEventListener("click", () => confirmChange(`Split ${group.id}? Every member restores its parameters. Requests continue.`, "split", [group.id]));
    return button;
  });
  splits.replaceChildren(...buttons);
}

/** Asks for confirmation, then changes the groups. */
function confirmChange(text, path, ids) {
  const dialog = element("ask");
  write(element("ask-text"), text);
  element("ask-yes").onclick = () => {
    dialog.close();
    changeGroups(path, ids);
  };
  element("ask-no").onclick = () => dialog.close();
  dialog.showModal();
  element("ask-no").focus();
}

async function changeGroups(path, ids) {
  busy = true;
  drawControls();
  const progress = element("progress");
  progress.className = "";
  write(progress, "requested …");
  await change(path, ids, (step) => {
    progress.className = step.phase;
    write(progress, `${step.phase}: ${step.message}`);
  });
  busy = false;
  groups.chosen.clear();
  for (const box of document.querySelectorAll("#groups input")) box.checked = false;
  drawControls();
}

element("merge").addEventListener("click", () => {
  const ids = groups.chosen.size > 1 ? [...groups.chosen] : [];
  const names = ids.length ? ids.join(", ") : "all groups";
  confirmChange(`Merge ${names}? Each member drops layers that other members run. Requests continue.`, "merge", ids);
});
groups.onChoice = drawControls;

setInterval(() => {
  if (!newest || !live) return;
  lines.waiting.push(totals(newest).waiting);
  lines.ttft.push(newest.ttft_s);
  lines.tokens.push(newest.tokens_per_s);
  memoryChart.push(newest);
}, SAMPLE_MS);
setInterval(() => {
  if (!newest) return;
  drawTable(element("rows"), newest);
  drawServices(element("services"), newest.services);
}, TABLE_MS);

follow({ state: show, lost: showLost, key: askForKey });
