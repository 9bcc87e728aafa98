/** Sequences that run, wait or are kept, each below the one it was forked from. */

import * as api from "./api.js";
import { byId, confirmed, el, mark, say, sync, toast } from "./dom.js";
import { brief, count, duration, some } from "./format.js";

const HEAD = [["Sequence"], ["State"], ["Tokens", 1], ["Forked at", 1], ["Own blocks", 1], ["Shared blocks", 1], ["Kept for", 1], [""]];

/** The table. */
export class Sequences {
  constructor() {
    this.parent = byId("sequences");
    this.body = el("tbody");
    this.none = el("p", { class: "none" }, "No sequence runs, waits or is kept");
    const head = el("tr", {}, ...HEAD.map(([text, n]) => el("th", { scope: "col", class: n ? "n" : "" }, text || el("span", { class: "hidden" }, "Action"))));
    this.table = el("table", { "aria-labelledby": "h-seq" }, el("thead", {}, head), this.body);
    this.parent.append(this.table, this.none);
  }

  update(snapshot) {
    const rows = arrange(snapshot.sequences);
    const more = snapshot.num_sequences - snapshot.sequences.length;
    say(byId("seq-hint"), `Each below the one it was forked from${more > 0 ? `; ${count(more)} more are not shown` : ""}`);
    this.table.hidden = !rows.length;
    this.none.hidden = rows.length > 0;
    sync(this.body, rows, (row) => row.id, (row) => this.make(row), fill);
  }

  make(row) {
    const cells = HEAD.map(([, n]) => el("td", { class: n ? "n" : "" }));
    cells[0].append(el("span", { class: "mono", title: row.id }));
    cells[1].append(el("span", { class: "state" }, el("i"), el("span")));
    if (!row.group && !row.hypothesis) {
      cells.at(-1).append(el("button", { type: "button", onclick: () => this.release(row.id) }, "Release", el("span", { class: "hidden" }, ` ${brief(row.id)}`)));
    }
    return el("tr", { tabindex: -1 }, ...cells);
  }

  async release(id) {
    const text = "It and all that were forked from it end now; their blocks stay cached until room is needed.";
    if (!(await confirmed(`Release ${brief(id)}?`, text, "Release"))) return;
    try {
      const receipt = await api.release(id, true);
      toast(`Released ${some(receipt.sequence_ids.length, "sequence")}`);
    } catch (error) {
      toast(`That failed: ${error.message}`);
    }
  }

  /** Go to a sequence's row. */
  light(id) {
    for (const row of this.body.children) row.classList.toggle("lit", row.dataset.key === id);
    const row = [...this.body.children].find((one) => one.dataset.key === id);
    if (!row) return toast("That sequence has ended, or is not among those shown");
    row.scrollIntoView({ block: "center" });
    row.focus({ preventScroll: true });
  }
}

function fill(node, row) {
  const [name, state, tokens, at, own, shared, kept] = node.children;
  name.style.paddingLeft = `${Math.min(row.level, 8) * 1.1}rem`;
  say(name.firstChild, (row.level ? "└ " : "") + (row.group ? row.title : brief(row.id)));
  state.firstChild.className = `state ${row.state}`;
  say(state.firstChild.lastChild, row.state);
  const orphan = row.parent && !row.level && !row.group;
  mark(name, "title", orphan ? `forked from ${row.parent}, which has ended` : null);
  say(tokens, row.group ? "" : count(row.tokens));
  say(at, row.parent && !row.group ? count(row.fork_position) : "");
  say(own, row.group ? "" : count(row.own_blocks));
  say(shared, row.group ? "" : count(row.shared_blocks));
  say(kept, row.state === "kept" ? duration(row.kept_seconds) : "");
}

/** Rows in the order of the tree; the beams of a search stand below a row for the search. */
function arrange(sequences) {
  const ids = new Set(sequences.map((one) => one.id));
  const below = new Map();
  const tops = [];
  const add = (parent, row) => (below.has(parent) ? below.get(parent).push(row) : below.set(parent, [row]));
  for (const one of sequences) {
    const search = `search ${one.request}`;
    if (one.hypothesis) {
      if (!below.has(search)) tops.push({ id: search, group: true, request: one.request, state: one.state });
      add(search, one);
    } else if (ids.has(one.parent)) add(one.parent, one);
    else tops.push(one);
  }
  const rows = [];
  const visit = (row, level) => {
    const children = below.get(row.id) ?? [];
    const title = row.group ? `beam search, ${some(children.length, "beam")}` : "";
    rows.push({ ...row, level, title });
    for (const child of children) visit(child, level + 1);
  };
  for (const top of tops) visit(top, 0);
  return rows;
}
