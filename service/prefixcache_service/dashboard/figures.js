/** Key figures, misses by cause, and times to the first token. */

import { byId, el, say, sync } from "./dom.js";
import { bytes, compact, count, duration, percent, some } from "./format.js";
import { hitRate, quantile, sum } from "./series.js";

const CAUSES = {
  never_seen: ["Never seen before", "new text"],
  evicted: ["Seen, but evicted", "a larger pool helps"],
  other_namespace: ["Under another cache salt", "tenants are kept apart"],
  bypassed: ["Cache off or bypassed", "as the request asked"],
  remainder: ["Rest that cannot be shared", "less than a block"],
};
const BANDS = { 0: "0 %", "0-50": "up to 50 %", "50-90": "50–90 %", "90-100": "over 90 %" };

/** The four cards on top. */
export function keyFigures(stats, { bins, to }) {
  const recent = hitRate(sum(bins.filter((bin) => bin.time >= to - 60)));
  say(byId("hit-rate"), percent(stats.hit_rate));
  say(byId("hit-rate-sub"), recent === null ? "no lookup in the last minute" : `${percent(recent)} in the last minute`);
  say(byId("saved"), compact(stats.cached_tokens + stats.forked_tokens));
  say(byId("saved-sub"), `${compact(stats.cached_tokens)} cached + ${compact(stats.forked_tokens)} forked, of ${compact(stats.prompt_tokens)}`);
  const used = stats.blocks_in_use / stats.blocks_total;
  say(byId("pool-use"), percent(used, used < 0.1 ? 1 : 0));
  poolBar(stats);
  const saved = stats.bytes_saved ? ` · sharing saves ${bytes(stats.bytes_saved)}` : "";
  say(byId("pool-sub"), `${count(stats.blocks_in_use)} of ${some(stats.blocks_total, "block")}, ${count(stats.blocks_evictable)} more cached${saved}`);
  big(byId("sequences-now"), count(stats.sequences_running), "running");
  say(byId("sequences-sub"), `${count(stats.sequences_waiting)} waiting · ${count(stats.sequences_kept)} kept`);
}

function big(node, value, unit) {
  const text = `${value} ${unit}`;
  if (node.textContent !== text) node.replaceChildren(`${value} `, el("small", {}, unit));
}

function poolBar(stats) {
  const parts = [["b-two", stats.blocks_in_use], ["b-cached", stats.blocks_evictable]];
  sync(
    byId("pool-bar"), parts, ([name]) => name,
    ([name]) => el("span", { style: { background: `var(--${name})` } }),
    (node, [, blocks]) => (node.style.width = `${(100 * blocks) / stats.blocks_total}%`),
  );
}

/** Bars of the computed tokens by cause. */
export function misses(stats) {
  const total = Math.max(1, stats.computed_tokens);
  const rows = Object.entries(CAUSES).map(([key, [name, hint]]) => ({ key, name, hint, tokens: stats.misses[key] ?? 0 }));
  bars(
    byId("misses"), stats.computed_tokens ? rows : [], "Nothing was computed yet",
    (row) => [row.name, `${compact(row.tokens)} · ${percent(row.tokens / total, 0)}`, row.hint],
    (row) => [["computed", row.tokens / total]],
  );
}

/** Medians and 95th percentiles by band of hit rate, on one scale. */
export function firstToken(stats) {
  const rows = stats.histograms
    .filter((one) => one.labels.hit_rate !== undefined)
    .map((one) => ({ key: one.labels.hit_rate, n: one.counts.reduce((a, b) => a + b, 0), half: quantile(one, 0.5), most: quantile(one, 0.95) }))
    .filter((row) => row.n);
  const longest = Math.max(...rows.map((row) => row.most));
  bars(
    byId("ttft"), rows, "Known after the first answers",
    (row) => [BANDS[row.key] ?? row.key, `${duration(row.half)} · ${duration(row.most)}`, some(row.n, "request")],
    (row) => [["b-cached", row.most / longest], ["cached", row.half / longest]],
  );
}

/** Rows of a name, a value, a hint and a meter: `told` gives the texts, `lengths` the bars. */
function bars(parent, rows, none, told, lengths) {
  const list = parent.firstElementChild ?? parent.appendChild(el("div"));
  list.className = rows.length ? "rows" : "none";
  if (!rows.length) return say(list, none);
  if (!list.firstElementChild) list.replaceChildren();
  sync(
    list, rows, (row) => row.key,
    () => el("div", {}, el("div", { class: "name" }, el("span", {}, el("span"), " ", el("small")), el("b")), el("div", { class: "meter" })),
    (node, row) => {
      const [name, value, hint] = told(row);
      const [words, number] = node.children[0].children;
      say(words.children[0], name);
      say(words.children[1], hint);
      say(number, value);
      sync(
        node.children[1], lengths(row), ([colour]) => colour,
        ([colour]) => el("span", { style: { background: `var(--${colour})` } }),
        (bar, [, share]) => (bar.style.width = `${Math.max(100 * share, share ? 0.7 : 0)}%`),
      );
    },
  );
}
