/** The server's data and actions. Every refusal becomes an Error with the server's sentence. */

async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, { signal: AbortSignal.timeout(20_000), ...options });
  } catch {
    throw new Error("the server does not answer");
  }
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(body.error ?? `the server answered ${response.status}`);
  return body;
}

const get = (path) => ask(path, {});

/** What changes something bears a header that no other site can send. */
const post = (path, body = {}) =>
  ask(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Prefixcache": "page" },
    body: JSON.stringify(body),
  });

export const snapshot = () => get("/api/snapshot");
export const history = () => get("/api/history");
export const node = (id) => get(`/api/nodes/${id}`);
export const pin = (id, seconds) => post(`/api/nodes/${id}/pin`, { seconds });
export const unpin = (id) => post(`/api/pins/${id}/unpin`);
export const flush = (id) => post(`/api/nodes/${id}/flush`);
export const release = (id, subtree) => post(`/api/sequences/${id}/release`, { subtree });
