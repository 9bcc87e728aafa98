/** The prefix tree: which prefixes are used most, and what can be done with one. */

import * as api from "./api.js";
import { showDetail } from "./detail.js";
import { byId, confirmed, el, mark, say, sync, toast } from "./dom.js";
import { compact, count, duration, nodeName, some } from "./format.js";

/** The tree as the pattern of WAI-ARIA has it: one tab stop, arrows inside, Enter selects. */
export class Tree {
  /** light(ids): show these sequences elsewhere. */
  constructor(light) {
    this.light = light;
    this.root = byId("tree");
    this.nodes = [];
    this.closed = new Set();
    this.selected = null;
    this.focused = null;
    this.blockSize = 16;
    this.root.addEventListener("keydown", (event) => this.key(event));
    this.root.addEventListener("click", (event) => this.click(event));
    showDetail(null);
  }

  update(snapshot) {
    this.blockSize = snapshot.stats.block_size;
    this.nodes = arrange(snapshot.nodes);
    this.shown = this.nodes.filter((node) => node.path.every((id) => !this.closed.has(id)));
    if (!this.shown.some((node) => node.id === this.focused)) this.focused = this.shown[0]?.id ?? null;
    this.draw();
    if (this.selected) this.refresh();
  }

  draw() {
    if (!this.shown.length) {
      this.root.replaceChildren(el("p", { class: "none" }, "Nothing cached yet: send a request with prefixcache generate"));
      return;
    }
    sync(this.root, this.shown, (node) => node.id, makeRow, (row, node) => this.fill(row, node));
    for (const stray of this.root.querySelectorAll(".none")) stray.remove();
  }

  fill(row, node) {
    const inner = node.below.length > 0;
    mark(row, "aria-level", node.level);
    mark(row, "aria-expanded", inner ? !this.closed.has(node.id) : null);
    mark(row, "aria-selected", node.id === this.selected);
    mark(row, "tabindex", node.id === this.focused ? 0 : -1);
    const tokens = node.blocks * this.blockSize;
    mark(row, "aria-label", told(node, tokens));
    const [label, uses, sharers, fan, blocks, length, age] = row.children;
    label.style.paddingLeft = `${Math.min(node.level - 1, 9) * 0.9}rem`;
    say(label.children[0], inner ? (this.closed.has(node.id) ? "▸" : "▾") : "·");
    say(label.children[1], nodeName(node));
    badges(label.children[2], node);
    say(uses, compact(node.uses));
    say(sharers, node.sharers ? count(node.sharers) : "–");
    const hidden = node.children - node.below.length;
    say(fan, hidden > 0 && inner ? `${compact(node.below.length)} of ${compact(node.children)}` : node.children ? compact(node.children) : "–");
    say(blocks, node.blocks ? compact(node.blocks) : "–");
    say(length, node.blocks ? compact(tokens) : "–");
    say(age, duration(node.age));
  }

  // ---------------------------------------------------------------- moving about

  click(event) {
    const row = event.target.closest("[role=treeitem]");
    if (!row) return;
    this.focus(row.dataset.key);
    if (event.target.closest(".fold") && row.hasAttribute("aria-expanded")) this.fold(row.dataset.key);
    else this.select(row.dataset.key);
  }

  key(event) {
    const at = this.shown.findIndex((node) => node.id === this.focused);
    const node = this.shown[at];
    if (!node) return;
    const open = node.below.length > 0 && !this.closed.has(node.id);
    const act = {
      ArrowDown: () => this.focus(this.shown[at + 1]?.id),
      ArrowUp: () => this.focus(this.shown[at - 1]?.id),
      Home: () => this.focus(this.shown[0].id),
      End: () => this.focus(this.shown.at(-1).id),
      ArrowRight: () => (open ? this.focus(this.shown[at + 1]?.id) : node.below.length && this.fold(node.id)),
      ArrowLeft: () => (open ? this.fold(node.id) : this.focus(node.path.at(-1))),
      Enter: () => this.select(node.id),
      " ": () => this.select(node.id),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  focus(id) {
    if (!id) return;
    this.focused = id;
    this.draw();
    [...this.root.children].find((row) => row.dataset.key === id)?.focus();
  }

  fold(id) {
    if (!this.closed.delete(id)) this.closed.add(id);
    this.shown = this.nodes.filter((node) => node.path.every((above) => !this.closed.has(above)));
    this.draw();
  }

  // ---------------------------------------------------------------- the selected node

  async select(id) {
    this.selected = id;
    this.draw();
    await this.refresh();
  }

  /** Show the selected node as it is now. */
  async refresh() {
    const id = this.selected;
    try {
      const detail = await api.node(id);
      if (id !== this.selected) return;
      this.selected = detail.node.id; // a run that was split goes on under another name
      showDetail(detail, this.blockSize, this);
    } catch (error) {
      if (id !== this.selected) return;
      this.selected = null;
      this.draw();
      showDetail(null, 0, null, error.message);
    }
  }

  async pin(id, seconds) {
    await this.act(async () => {
      const pin = await api.pin(id, seconds);
      return `Pinned ${some(pin.num_blocks, "block")} for ${duration(pin.seconds)}`;
    });
  }

  async unpin(pinId) {
    await this.act(async () => {
      const pin = await api.unpin(pinId);
      return `Unpinned ${some(pin.num_blocks, "block")}`;
    });
  }

  async flush(node) {
    const text = "Blocks that running sequences or pins use stay. All others at and below this prefix are dropped, and computed again when they are needed.";
    if (!(await confirmed(`Flush ${nodeName(node)}?`, text, "Flush"))) return;
    await this.act(async () => `Flushed ${some((await api.flush(node.id)).blocks_freed, "block")}`);
  }

  async act(work) {
    try {
      toast(await work());
    } catch (error) {
      toast(`That failed: ${error.message}`);
    }
    if (this.selected) await this.refresh();
  }
}

function told(node, tokens) {
  const parts = [nodeName(node), some(node.uses, "use"), `shared by ${count(node.sharers)} now`];
  if (node.blocks) parts.push(some(tokens, "token"));
  if (node.pinned) parts.push("pinned");
  if (node.leased) parts.push("kept");
  return parts.join(", ");
}

function badges(parent, node) {
  const wanted = [node.sharers && ["live", "in use"], node.pinned && ["pin", "pinned"], node.leased && ["keep", "kept"]].filter(Boolean);
  sync(parent, wanted, ([kind]) => kind, ([kind, text]) => el("span", { class: `badge ${kind}` }, text), () => {});
}

function makeRow() {
  const cell = (wide) => el("span", { class: wide ? "n wide" : "n" });
  const label = el("span", { class: "label" }, el("span", { class: "fold" }), el("span", { class: "text" }), el("span", { class: "label" }));
  return el("div", { role: "treeitem", class: "node" }, label, cell(), cell(), cell(true), cell(true), cell(), cell(true));
}

/** The nodes in the order of the tree, each with its level, the ids above it and those below it. */
function arrange(nodes) {
  const all = nodes.map((node) => ({ ...node, below: [] }));
  const roots = [];
  for (const node of all) (node.parent < 0 ? roots : all[node.parent].below).push(node);
  const ordered = [];
  const visit = (node, level, path) => {
    ordered.push(Object.assign(node, { level, path }));
    for (const child of node.below) visit(child, level + 1, [...path, node.id]);
  };
  for (const root of roots) visit(root, 1, []);
  return ordered;
}
