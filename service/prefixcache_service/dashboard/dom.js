/** Small helpers around the document. Text is set as text only: nothing here parses HTML. */

/** The element with this id. */
export const byId = (id) => document.getElementById(id);

/** Make an element: attributes (`on…` are listeners, `style` an object), then children. */
export function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** The same for SVG. */
export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") Object.assign(node.style, value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

/** Set text only where it differs, so that nothing is read out or laid out again for nothing. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Set or remove an attribute, likewise. */
export function mark(node, name, value) {
  if (value === null || value === undefined) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

/**
 * Bring the children of `parent` in line with `items`, keeping the elements of items that stay: the
 * focus and the scroll position stay with them.
 */
export function sync(parent, items, key, make, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let at = parent.firstElementChild;
  for (const item of items) {
    const name = key(item);
    let child = old.get(name);
    old.delete(name);
    if (!child) {
      child = make(item);
      child.dataset.key = name;
    }
    if (child === at) at = at.nextElementSibling;
    else parent.insertBefore(child, at);
    update(child, item);
  }
  for (const child of old.values()) child.remove();
}

/** The colour that a custom property of the style sheet has in the present theme. */
export const colour = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** Show a tooltip near a point of the window, or hide it. */
export function tip(text, x = 0, y = 0) {
  const node = byId("tip");
  node.hidden = !text;
  if (!text) return;
  say(node, text);
  const box = node.getBoundingClientRect();
  const right = x + 14 + box.width > innerWidth;
  node.style.left = `${Math.max(4, right ? x - 14 - box.width : x + 14)}px`;
  node.style.top = `${Math.max(4, Math.min(y - box.height - 10, innerHeight - box.height - 4))}px`;
}

/** Let a screen reader say something once. */
export const speak = (text) => say(byId("said"), text);

let toastTimer = 0;

/** Say what was done, for some seconds. */
export function toast(text) {
  const node = byId("toast");
  node.hidden = false;
  say(node, text);
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => (node.hidden = true), 5000);
}

/** Ask before something is lost; resolves to true for yes. */
export function confirmed(title, text, action) {
  const dialog = byId("confirm");
  say(byId("confirm-title"), title);
  say(byId("confirm-text"), text);
  say(byId("confirm-ok"), action);
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) =>
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "ok"), { once: true }),
  );
}
