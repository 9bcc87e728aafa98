/** Charts over time and the curve of sizes: small SVG, drawn anew at the width that there is. */

import { el, speak, svg, tip } from "./dom.js";

const HEIGHT = 150;
const EDGE = { left: 40, right: 10, top: 10, bottom: 20 };

/** A chart over time, as lines with gaps (`line`) or as stacked columns (`stack`). */
export class TimeChart {
  /**
   * series: [{name, colour, value(bin)}]; format: of values; top(max): end of the axis;
   * none: what to say where there is nothing.
   */
  constructor(parent, { kind, series, format, top, none }) {
    Object.assign(this, { parent, kind, series, format, top, none, data: null, at: -1 });
    this.picture = svg("svg", { height: HEIGHT, role: "img", tabindex: 0 });
    this.legend = el("div", { class: "legend" }, ...series.map((one) => key(one.name, one.colour)));
    this.empty = el("p", { class: "none" }, none);
    parent.append(this.picture, this.legend, this.empty);
    listen(this);
    new ResizeObserver(() => this.draw()).observe(parent);
  }

  /** data: of `Series.bins`. */
  update(data) {
    this.data = data;
    this.draw();
  }

  draw() {
    if (!this.data) return;
    const { bins } = this.data;
    const values = bins.map((bin) => this.series.map((one) => one.value(bin)));
    const heights = values.map((row) =>
      this.kind === "stack" ? row.reduce((a, b) => a + b, 0) : Math.max(...row.map((v) => v ?? 0)),
    );
    const some = values.some((row) => row.some((v) => (this.kind === "stack" ? v > 0 : v !== null)));
    this.empty.hidden = some;
    this.picture.toggleAttribute("hidden", !some);
    this.legend.hidden = !some || this.series.length < 2;
    if (!some) return;
    const width = this.parent.clientWidth;
    this.x = scale(0, bins.length, EDGE.left, width - EDGE.right);
    const max = this.top(Math.max(...heights));
    const y = scale(0, max, HEIGHT - EDGE.bottom, EDGE.top);
    this.picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.picture.replaceChildren(
      ...axes(width, y, max, this.format), ...times(this.x, this.data),
      ...(this.kind === "stack" ? this.columns(values, y) : this.lines(values, y)),
      ...this.cursor(),
    );
    this.picture.setAttribute("aria-label", this.summary(values));
  }

  columns(values, y) {
    const wide = Math.max(1, this.x(1) - this.x(0) - 1);
    return values.flatMap((row, i) => {
      let below = 0;
      return row.map((value, s) => {
        const [low, high] = [y(below), y((below += value))];
        return svg("rect", {
          x: this.x(i) + 0.5, y: high, width: wide, height: Math.max(0, low - high),
          fill: `var(--${this.series[s].colour})`,
        });
      });
    });
  }

  lines(values, y) {
    return this.series.flatMap((one, s) => {
      const points = values.map((row, i) => (row[s] === null ? null : [this.x(i + 0.5), y(row[s])]));
      const path = points.map((p, i) => (p ? `${points[i - 1] ? "L" : "M"}${p[0].toFixed(1)} ${p[1].toFixed(1)}` : ""));
      const stroke = `var(--${one.colour})`;
      const dots = points.filter(Boolean).map(([cx, cy]) => svg("circle", { cx, cy, r: 2.2, fill: stroke }));
      return [svg("path", { d: path.join(""), fill: "none", stroke, "stroke-width": 2, "stroke-linejoin": "round" }), ...dots];
    });
  }

  cursor() {
    if (this.at < 0) return [];
    const x = this.x(this.at + 0.5);
    return [svg("line", { class: "rule", x1: x, x2: x, y1: EDGE.top, y2: HEIGHT - EDGE.bottom })];
  }

  /** What is under the cursor, as text. */
  told() {
    const bin = this.data.bins[this.at];
    const when = new Date(1000 * bin.time).toLocaleTimeString();
    const lines = this.series.map((one) => {
      const value = one.value(bin);
      return `${one.name}: ${value === null ? "no lookup" : this.format(value)}`;
    });
    return [when, ...lines].join("\n");
  }

  summary(values) {
    const last = values.findLast((row) => row.some((v) => v)) ?? values.at(-1);
    const parts = this.series.map((one, s) => `${one.name} ${last[s] === null ? "none" : this.format(last[s])}`);
    return `Latest: ${parts.join(", ")}. The arrow keys go through time.`;
  }
}

function listen(chart) {
  const { picture } = chart;
  const go = (at, x, y) => {
    chart.at = Math.max(0, Math.min(chart.data.bins.length - 1, at));
    chart.draw();
    tip(chart.told(), x, y);
  };
  const leave = () => {
    chart.at = -1;
    tip("");
    chart.draw();
  };
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const share = (event.clientX - box.left - EDGE.left) / (box.width - EDGE.left - EDGE.right);
    go(Math.floor(share * chart.data.bins.length), event.clientX, event.clientY);
  });
  picture.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const box = picture.getBoundingClientRect();
    const from = chart.at < 0 ? chart.data.bins.length : chart.at;
    go(from + by, box.left + chart.x(from + by), box.top + 40);
    speak(chart.told());
  });
  picture.addEventListener("pointerleave", leave);
  picture.addEventListener("blur", leave);
}

/** Hit rates at other sizes of the pool; points: [{scale, blocks, hit_rate}]. */
export class SizeCurve {
  constructor(parent) {
    this.parent = parent;
    this.picture = svg("svg", { height: HEIGHT + 15, role: "img" });
    this.empty = el("p", { class: "none" }, "Known once prompts have been looked up");
    parent.append(this.picture, this.empty);
    new ResizeObserver(() => this.draw()).observe(parent);
  }

  update(points, format, blocks) {
    Object.assign(this, { points, format, blocks });
    this.draw();
  }

  draw() {
    const known = (this.points ?? []).filter((point) => point.hit_rate !== null);
    this.empty.hidden = known.length > 0;
    this.picture.toggleAttribute("hidden", !known.length);
    if (!known.length) return;
    const width = this.parent.clientWidth;
    const bottom = HEIGHT - EDGE.bottom;
    const x = scale(0, known.length - 1, EDGE.left + 18, width - EDGE.right - 18);
    const y = scale(0, 1, bottom, EDGE.top + 12);
    const d = known.map((p, i) => `${i ? "L" : "M"}${x(i)} ${y(p.hit_rate)}`).join("");
    this.picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT + 15}`);
    this.picture.replaceChildren(
      ...axes(width, y, 1, (v) => this.format(v, 0)),
      svg("path", { d, fill: "none", stroke: "var(--cached)", "stroke-width": 2 }),
      ...known.flatMap((point, i) => this.point(point, x(i), y(point.hit_rate), bottom)),
    );
    const told = known.map((p) => `${times_(p.scale)}: ${this.format(p.hit_rate)}`);
    this.picture.setAttribute("aria-label", `Hit rate by size of the pool: ${told.join(", ")}`);
  }

  point(point, x, y, bottom) {
    const today = point.scale === 1;
    return [
      svg("circle", { cx: x, cy: y, r: today ? 5 : 3.5, fill: "var(--cached)", stroke: "var(--card)", "stroke-width": 1.5 }),
      svg("text", { x, y: y - 9, "text-anchor": "middle", class: "value" }, this.format(point.hit_rate, 0)),
      svg("text", { x, y: bottom + 15, "text-anchor": "middle", class: today ? "value" : "" }, times_(point.scale)),
      svg("text", { x, y: bottom + 29, "text-anchor": "middle" }, today ? "today" : this.blocks(point.blocks)),
    ];
  }
}

const times_ = (n) => `${{ 0.25: "¼", 0.5: "½" }[n] ?? n}×`;

/** A legend's entry. */
export function key(name, colour) {
  return el("span", {}, el("i", { class: "swatch", style: { background: `var(--${colour})` } }), name);
}

function scale(low, high, from, to) {
  const by = high === low ? 0 : (to - from) / (high - low);
  return (value) => from + (value - low) * by;
}

function axes(width, y, max, format) {
  return [0, max / 2, max].flatMap((value) => [
    svg("line", { class: "gridline", x1: EDGE.left, x2: width - EDGE.right, y1: y(value), y2: y(value) }),
    svg("text", { x: EDGE.left - 6, y: y(value) + 4, "text-anchor": "end" }, format(value)),
  ]);
}

function times(x, { from, to, step, bins }) {
  const length = to - from;
  const every = [30, 60, 120, 300].find((s) => length / s <= 5) ?? 300;
  const labels = [];
  for (let ago = 0; ago <= length - every / 2; ago += every) {
    const at = x(bins.length - ago / step);
    const text = ago === 0 ? "now" : every < 60 ? `−${ago} s` : `−${ago / 60} min`;
    labels.push(svg("text", { x: at, y: HEIGHT - 4, "text-anchor": ago ? "middle" : "end" }, text));
  }
  return labels;
}

/** The next round number: 1, 2 or 5 times a power of ten. */
export function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return power * ([1, 2, 5, 10].find((n) => n * power >= value) ?? 10);
}
