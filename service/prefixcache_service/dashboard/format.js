/** Numbers and times as they are read: with separators, few digits and a unit. */

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 });

/** 12345 as 12,345. */
export const count = (n) => whole.format(n);

/** 1234567 as 1.2M; small numbers in full. */
export const compact = (n) => (Math.abs(n) < 10_000 ? whole.format(n) : short.format(n));

/** 0.734 as 73.4 %; nothing yet as a dash. */
export const percent = (share, digits = 1) =>
  share === null || share === undefined ? "–" : `${(100 * share).toFixed(digits)} %`;

/** Bytes with a binary unit. */
export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (n >= 1024 && at < units.length - 1) {
    n /= 1024;
    at += 1;
  }
  return `${n < 10 && at ? n.toFixed(1) : Math.round(n)} ${units[at]}`;
}

/** Seconds as 40 ms, 3.2 s, 4 min, 2 h. */
export function duration(s) {
  if (s < 0.9995) return `${(1000 * s).toFixed(s < 0.01 ? 1 : 0)} ms`;
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 90) return `${Math.round(s)} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  return s < 129_600 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86_400)} d`;
}

/** "1 block", "2 blocks". */
export const some = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;

/** An id or digest short enough to read out. */
export const brief = (id) => id.slice(0, 8);

/** How a node of the tree is called: by its text where prompts are shown, else by its digest. */
export function nodeName(node) {
  if (!node.blocks) return `namespace ${brief(node.id)}`;
  return node.text === null ? `${brief(node.id)} · depth ${count(node.start)}` : node.text.replace(/\s+/g, " ");
}
