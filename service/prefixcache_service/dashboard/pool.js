/** The pool as a map: one cell a block, or some blocks where the pool is large. */

import { byId, colour, el, say, speak, tip } from "./dom.js";
import { count, some } from "./format.js";

// A block's byte, as the engine packs it.
const SHARERS = 0x1f;
const HELD = 0x20;
const LEASED = 0x40;
const PINNED = 0x80;

const KINDS = [
  { name: "Free", colour: "b-free" },
  { name: "Cached, idle", colour: "b-cached" },
  { name: "Kept for later (leased)", colour: "b-leased" },
  { name: "In use by one", colour: "b-one" },
  { name: "Shared by 2–3", colour: "b-two" },
  { name: "Shared by 4 or more", colour: "b-many" },
  { name: "Pinned", colour: "b-pinned" },
];
const LARGEST_CELL = 14;
const SMALLEST_CELL = 4;
const MOST_AREA_HEIGHT = 300;

/** Index in KINDS of a block's byte. */
function kindOf(state) {
  const sharers = state & SHARERS;
  if (state & PINNED) return 6;
  if (sharers) return sharers === 1 ? 3 : sharers < 4 ? 4 : 5;
  if (state & LEASED) return 2;
  return state & HELD ? 1 : 0;
}

const KIND_OF = Uint8Array.from({ length: 256 }, (_, state) => kindOf(state));

/** What a block's byte says, in words. */
function words(state) {
  if (!(state & HELD)) return "free";
  const sharers = state & SHARERS;
  const more = sharers === SHARERS ? " or more" : "";
  const use = sharers > 1 ? `shared by ${sharers}${more} sequences` : sharers ? "in use by one sequence" : "cached, idle";
  return [use, state & PINNED && "pinned", state & LEASED && "kept for later"].filter(Boolean).join(", ");
}

/** The map on a canvas. */
export class PoolMap {
  constructor() {
    this.canvas = byId("pool-map");
    this.states = new Uint8Array();
    this.at = -1;
    this.counts = KINDS.map((kind) => el("b"));
    byId("pool-legend").append(
      ...KINDS.map((kind, i) =>
        el("span", {}, el("i", { class: "swatch", style: { background: `var(--${kind.colour})` } }), kind.name, this.counts[i]),
      ),
    );
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.leave());
    this.canvas.addEventListener("blur", () => this.leave());
    this.canvas.addEventListener("keydown", (event) => this.step(event));
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  /** encoded: the states in base64. */
  update(encoded) {
    this.states = Uint8Array.from(atob(encoded), (letter) => letter.charCodeAt(0));
    const counts = new Array(KINDS.length).fill(0);
    for (const state of this.states) counts[KIND_OF[state]] += 1;
    this.counts.forEach((node, i) => say(node, count(counts[i])));
    const told = KINDS.map((kind, i) => `${kind.name}: ${count(counts[i])}`).filter((_, i) => counts[i]);
    this.canvas.setAttribute("aria-label", `Map of ${some(this.states.length, "block")}. ${told.join(", ")}`);
    this.draw();
  }

  /** Choose cells so that all fit: smaller ones first, then several blocks in one. */
  layout() {
    const width = this.canvas.parentElement.clientWidth - 32;
    const room = (width * MOST_AREA_HEIGHT) / Math.max(1, this.states.length);
    this.cell = Math.max(SMALLEST_CELL, Math.min(LARGEST_CELL, Math.floor(Math.sqrt(room))));
    this.columns = Math.max(1, Math.floor(width / this.cell));
    const rows = Math.floor(MOST_AREA_HEIGHT / this.cell);
    this.each = Math.max(1, Math.ceil(this.states.length / (this.columns * rows)));
    this.cells = Math.ceil(this.states.length / this.each);
    this.height = Math.ceil(this.cells / this.columns) * this.cell;
  }

  draw() {
    if (!this.states.length) return;
    this.layout();
    const hint = this.each === 1 ? "Each cell is a block of the KV cache" : `Each cell is ${this.each} blocks of the KV cache, their colours mixed`;
    say(byId("pool-hint"), `${hint}; ${some(this.states.length, "block")} in all`);
    const ratio = devicePixelRatio || 1;
    this.canvas.width = this.columns * this.cell * ratio;
    this.canvas.height = this.height * ratio;
    Object.assign(this.canvas.style, { width: `${this.columns * this.cell}px`, height: `${this.height}px` });
    const brush = this.canvas.getContext("2d");
    brush.scale(ratio, ratio);
    const palette = KINDS.map((kind) => rgb(colour(kind.colour)));
    const gap = this.cell > 5 ? 1 : 0;
    for (let i = 0; i < this.cells; i += 1) {
      brush.fillStyle = this.mixed(i, palette);
      brush.fillRect((i % this.columns) * this.cell, Math.floor(i / this.columns) * this.cell, this.cell - gap, this.cell - gap);
    }
    if (this.at >= 0) this.frame(brush);
  }

  /** The mean colour of a cell's blocks. */
  mixed(cell, palette) {
    const from = cell * this.each;
    const to = Math.min(from + this.each, this.states.length);
    const sum = [0, 0, 0];
    for (let i = from; i < to; i += 1) palette[KIND_OF[this.states[i]]].forEach((part, c) => (sum[c] += part));
    return `rgb(${sum.map((part) => Math.round(part / (to - from))).join(" ")})`;
  }

  frame(brush) {
    brush.strokeStyle = colour("text");
    brush.lineWidth = 2;
    brush.strokeRect((this.at % this.columns) * this.cell - 0.5, Math.floor(this.at / this.columns) * this.cell - 0.5, this.cell, this.cell);
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.cell);
    const cell = Math.floor((event.clientY - box.top) / this.cell) * this.columns + column;
    if (column >= this.columns || cell >= this.cells) return this.leave();
    this.at = cell;
    this.draw();
    tip(this.told(), event.clientX, event.clientY);
  }

  step(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns }[event.key];
    if (!by) return;
    event.preventDefault();
    const next = this.at < 0 ? 0 : this.at + by;
    if (next >= 0 && next < this.cells) this.at = next;
    this.draw();
    const box = this.canvas.getBoundingClientRect();
    tip(this.told(), box.left + (this.at % this.columns) * this.cell, box.top + Math.floor(this.at / this.columns) * this.cell);
    speak(this.told());
  }

  leave() {
    if (this.at < 0) return;
    this.at = -1;
    tip("");
    this.draw();
  }

  told() {
    const from = this.at * this.each;
    const states = this.states.subarray(from, from + this.each);
    if (states.length === 1) return `Block ${count(from)}: ${words(states[0])}`;
    const counts = new Map();
    for (const state of states) counts.set(words(state), (counts.get(words(state)) ?? 0) + 1);
    const lines = [...counts].map(([what, n]) => `${n} ${what}`);
    return [`Blocks ${count(from)} to ${count(from + states.length - 1)}`, ...lines].join("\n");
  }
}

function rgb(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}
