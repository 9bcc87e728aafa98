/** The panel beside the tree: one prefix, who shares it, and what can be done. */

import { byId, el, say, sync } from "./dom.js";
import { brief, count, duration, nodeName, some } from "./format.js";

const PIN_SECONDS = [[60, "1 minute"], [300, "5 minutes"], [3600, "1 hour"]];

/** Show a node as /api/nodes gave it, or, without one, a hint or why there is none. */
export function showDetail(detail, blockSize, tree, why) {
  const panel = byId("detail");
  if (!detail) {
    panel.replaceChildren(el("p", { class: "none" }, why ? `${why[0].toUpperCase()}${why.slice(1)}.` : "Select a prefix to see who shares it, and to pin or flush it."));
    panel.dataset.node = "";
    return;
  }
  if (panel.dataset.node !== detail.node.id) {
    panel.replaceChildren(...frame(detail, tree));
    panel.dataset.node = detail.node.id;
  }
  fill(panel, detail, blockSize, tree);
}

/** What stays while the node does: the focus must not be lost at each update. */
function frame({ node, text }, tree) {
  const seconds = el("select", { "aria-label": "Pin for" }, ...PIN_SECONDS.map(([n, label]) => el("option", { value: n }, label)));
  seconds.value = "300";
  const isRoot = node.blocks === 0;
  const pin = el("button", { type: "button", id: "pin", onclick: () => tree.pin(node.id, Number(seconds.value)) }, "Pin");
  const flush = el("button", { type: "button", class: "danger", id: "flush", onclick: () => tree.flush(node) }, "Flush…");
  return [
    el("h3", { class: "mono" }, nodeName(node)),
    el("dl"),
    ...(text === null ? [] : [el("h4", {}, "Text"), el("pre", { tabindex: 0 }, text)]),
    part("live"), part("kept"), part("pins"), part("children"),
    el("div", { class: "actions" }, ...(isRoot ? [] : [pin, seconds]), flush),
  ];
}

function part(what) {
  return el("section", { "data-part": what, hidden: "" }, el("h4"), el("ul"));
}

function fill(panel, detail, blockSize, tree) {
  const { node } = detail;
  const from = node.start * blockSize;
  const facts = [
    ["Tokens", node.blocks ? `${count(from)} to ${count(from + node.blocks * blockSize)}` : "a tree of its own"],
    ["Blocks", node.blocks ? count(node.blocks) : "–"],
    ["Uses", count(node.uses)],
    ["Continuations", count(node.children)],
    ["Made", `${duration(node.age)} ago`],
    ["Last used", node.sharers || node.pinned ? "now" : `${duration(node.idle)} ago`],
    ["Digest", brief(node.id)],
  ];
  sync(panel.querySelector("dl"), facts.flatMap(([k, v]) => [["dt", k, k], ["dd", k, v]]), ([tag, k]) => tag + k, ([tag]) => el(tag), (cell, [, , text]) => say(cell, text));
  list(panel, "live", `Shared now by ${some(detail.num_live, "sequence")}`, detail.live, (id) => id, (id) => sequence(id, tree));
  list(panel, "kept", `Kept for ${some(detail.num_kept, "sequence")}`, detail.kept, (id) => id, (id) => sequence(id, tree));
  list(panel, "pins", `Held by ${some(detail.pins.length, "pin")}`, detail.pins, (pin) => pin.pin_id, (pin) => pinRow(pin, tree), (row, pin) => say(row.firstChild, `${some(pin.num_blocks, "block")}, ${duration(pin.seconds)} left `));
  list(panel, "children", `Goes on in ${some(node.children, "way")}`, detail.children, (child) => child.id, (child) => childRow(child, tree), (row, child) => say(row.lastChild, ` ${some(child.uses, "use")}`));
}

function list(panel, what, title, items, key, make, update = () => {}) {
  const section = panel.querySelector(`[data-part=${what}]`);
  section.hidden = !items.length;
  say(section.firstChild, title);
  sync(section.lastChild, items, key, make, update);
}

function sequence(id, tree) {
  return el("li", {}, el("button", { type: "button", class: "link mono", title: id, onclick: () => tree.light(id) }, brief(id)));
}

function pinRow(pin, tree) {
  return el("li", {}, el("span"), el("button", { type: "button", class: "link", onclick: () => tree.unpin(pin.pin_id) }, "Unpin"));
}

function childRow(child, tree) {
  return el("li", {}, el("button", { type: "button", class: "link", onclick: () => tree.select(child.id) }, nodeName(child)), el("span"));
}
