/** The past as the charts need it: counters in, rates by equal spans of time out. */

const LONGEST = 900;
const SPANS = [4, 8, 15];
const MOST_BINS = 60;

/** Samples of counters, oldest first. The server keeps some from before the page was opened. */
export class Series {
  constructor() {
    this.rows = [];
    this.columns = [];
  }

  /** Take the server's samples over. */
  load({ columns, rows }) {
    this.columns = columns;
    this.rows = rows;
  }

  /** Add the figures of a snapshot. */
  add(snapshot) {
    const last = this.rows.at(-1);
    if (last && snapshot.time <= last[0]) return;
    this.rows.push(this.columns.map((name) => (name === "time" ? snapshot.time : snapshot.stats[name])));
    const first = this.rows.findIndex((row) => row[0] > snapshot.time - LONGEST);
    if (first > 0) this.rows.splice(0, first);
  }

  /**
   * Equal spans up to now: {from, to, step, bins: [{time, seconds, cached, computed, forked}]}, the last
   * three in tokens; seconds: how much of the last span has passed. A counter that fell belongs to a server started anew: that span is left empty.
   */
  bins() {
    const to = this.rows.at(-1)?.[0] ?? Date.now() / 1000;
    const age = this.rows.length ? to - this.rows[0][0] : 0;
    const length = Math.min(LONGEST, Math.max(120, age));
    const step = SPANS.find((span) => length / span <= MOST_BINS) ?? SPANS.at(-1);
    const from = (Math.floor(to / step) + 1) * step - Math.ceil(length / step) * step;
    const bins = Array.from({ length: Math.ceil(length / step) }, (_, i) => ({
      time: from + i * step, seconds: Math.max(1, Math.min(step, to - from - i * step)), cached: 0, computed: 0, forked: 0,
    }));
    const at = Object.fromEntries(this.columns.map((name, i) => [name, i]));
    for (let i = 1; i < this.rows.length; i += 1) {
      const [before, after] = [this.rows[i - 1], this.rows[i]];
      for (const name of ["cached", "computed", "forked"]) {
        const column = at[`${name}_tokens`];
        const more = Math.max(0, after[column] - before[column]);
        if (more) spread(bins, name, more, (before[0] - from) / step, (after[0] - from) / step);
      }
    }
    return { from, to: from + bins.length * step, step, bins };
  }
}

/** Share what came between two samples out among the bins that they span; low, high: in bins. */
function spread(bins, name, amount, low, high) {
  for (let i = Math.max(0, Math.floor(low)); i < Math.min(high, bins.length); i += 1) {
    bins[i][name] += (amount * (Math.min(high, i + 1) - Math.max(low, i))) / (high - low);
  }
}

/** Cached of looked-up tokens; null where none was looked up. */
export function hitRate({ cached, computed }) {
  return cached + computed ? cached / (cached + computed) : null;
}

/** The sums of several bins. */
export function sum(bins) {
  const total = { cached: 0, computed: 0, forked: 0 };
  for (const bin of bins) for (const name in total) total[name] += bin[name];
  return total;
}

/**
 * The value below which a share of a histogram lies, by interpolation in its bucket; null without
 * values. counts: one a bound, up to and including it, and one for all above the last.
 */
export function quantile({ bounds, counts }, share) {
  const total = counts.reduce((a, b) => a + b, 0);
  let left = share * total;
  if (!total) return null;
  for (let i = 0; i < bounds.length; i += 1) {
    if (left <= counts[i] && counts[i]) {
      const low = i ? bounds[i - 1] : 0;
      return low + (bounds[i] - low) * (left / counts[i]);
    }
    left -= counts[i];
  }
  return bounds.at(-1);
}
