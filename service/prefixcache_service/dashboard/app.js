/** The live page: asks once a second, hands each snapshot to the parts, and says how it stands. */

import * as api from "./api.js";
import { roundUp, SizeCurve, TimeChart } from "./charts.js";
import { byId, mark, say } from "./dom.js";
import { firstToken, keyFigures, misses } from "./figures.js";
import { compact, percent } from "./format.js";
import { PoolMap } from "./pool.js";
import { Sequences } from "./sequences.js";
import { hitRate, Series } from "./series.js";
import { Tree } from "./tree.js";

const INTERVAL = 1000;
const LONGEST_WAIT = 8000;

const series = new Series();
const sequences = new Sequences();
const tree = new Tree((id) => sequences.light(id));
const map = new PoolMap();
const curve = new SizeCurve(byId("curve"));
const rates = new TimeChart(byId("chart-rate"), {
  kind: "line",
  series: [{ name: "Hit rate", colour: "cached", value: hitRate }],
  format: (v) => percent(v, 0),
  top: () => 1,
  none: "No prompt was looked up in the last minutes",
});
const sources = new TimeChart(byId("chart-source"), {
  kind: "stack",
  series: ["cached", "forked", "computed"].map((name) => ({
    name: name[0].toUpperCase() + name.slice(1), colour: name, value: (bin) => bin[name] / bin.seconds,
  })),
  format: (v) => (v > 0 && v < 10 ? v.toFixed(1) : compact(v)),
  top: roundUp,
  none: "No request was admitted in the last minutes",
});

let paused = false;
let timer = 0;
let failures = 0;
let stale = true; // what the server kept of the past is to be loaded (again)

function show(snapshot) {
  const { stats, model } = snapshot;
  series.add(snapshot);
  const data = series.bins();
  say(byId("model"), `${model.name} · version ${model.version}`);
  byId("empty").hidden = stats.prompt_tokens > 0;
  keyFigures(stats, data);
  rates.update(data);
  sources.update(data);
  misses(stats);
  curve.update(stats.size_curve, percent, compact);
  firstToken(stats);
  map.update(snapshot.blocks);
  tree.update(snapshot);
  sequences.update(snapshot);
  say(byId("footer"), footer(stats));
}

function footer(stats) {
  const bits = stats.same_bits ? "Results do not depend on the cache, to the bit." : "";
  return `${compact(stats.requests_finished)} requests finished, ${compact(stats.requests_aborted)} aborted, ${compact(stats.requests_failed)} failed · ${compact(stats.preemptions)} preemptions · ${compact(stats.forks)} forks · ${compact(stats.evicted_blocks)} blocks evicted. ${bits}`;
}

async function poll() {
  clearTimeout(timer);
  if (paused || document.hidden) return;
  try {
    if (stale) series.load(await api.history());
    stale = false;
    const snapshot = await api.snapshot();
    failures = 0;
    connection("live", "Live");
    show(snapshot);
  } catch (error) {
    failures += 1;
    stale = true;
    connection("lost", "Reconnecting", error.message);
  }
  clearTimeout(timer);
  timer = setTimeout(poll, Math.min(LONGEST_WAIT, INTERVAL * 2 ** Math.min(failures, 3)));
}

/** state: live, paused or lost; why: told in a banner, the figures below it being old. */
function connection(state, text, why = "") {
  mark(byId("connection"), "data-state", state);
  say(byId("connection-text"), text);
  byId("main").classList.toggle("stale", state === "lost");
  byId("notice").hidden = !why;
  if (why) say(byId("notice"), `No news from the server: ${why}. The page goes on by itself.`);
}

function togglePause() {
  paused = !paused;
  mark(byId("pause"), "aria-pressed", paused);
  say(byId("pause"), paused ? "Resume" : "Pause");
  if (paused) connection("paused", "Paused");
  else {
    stale = true;
    poll();
  }
}

byId("pause").addEventListener("click", togglePause);
document.addEventListener("visibilitychange", () => {
  stale = stale || !document.hidden;
  poll();
});
for (const id of ["main", "pause", "connection"]) byId(id).hidden = false;
poll();
