// Requests to the service: with the reader's key, and again while it does not answer.
import { read } from "/page/picture/data.js";

/**
 * @typedef {{seq: number, source: string, method: string, makespan_ms: number, span_ms: number, value_ms: number,
 *   problem_version: number, found_at: string, url: string,
 *   adoption: {step: number, measured_iteration_ms: number | null, adopted_at: string} | null}} Incumbent
 * @typedef {{problem_version: number, lower_bound_ms: number, found_at: string}} Bound
 * @typedef {{id: string, version: number, state: string, key_name: string | null, reason: string | null,
 *   problem_name: string, problem_version: number, options: Record<string, any>, priority: number, status: string,
 *   value_ms: number | null, lower_bound_ms: number | null, gap: number | null, attempt: number, created_at: string,
 *   started_at: string | null, ended_at: string | null, spent_s: number | null, url: string, best: any}} Job
 */

export const STORED_KEY = "optpipe-key"; // in the tab's storage, so that it is gone with the tab
const AGAIN_MS = 1000;

/** A request that was answered by an error. */
export class Refused extends Error {
  /** @param {number} status @param {string} detail */
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

/** Nobody answers. */
export class Away extends Error {}

/** Whether the service answers: `changed` is called whenever a request has shown it. */
export const connection = { changed: (/** @type {boolean} */ _away) => {} };

/** The reply to a request. Throws `Refused` for one that is an error, `Away` if there is none.
 * @param {string} method @param {string} path
 * @param {{body?: unknown, text?: string | Blob, headers?: Record<string, string>, signal?: AbortSignal}} [more]
 * @returns {Promise<Response>} */
export async function ask(method, path, { body, text, headers = {}, signal } = {}) {
  const key = sessionStorage.getItem(STORED_KEY);
  const content = text ?? (body === undefined ? undefined : JSON.stringify(body));
  if (key) headers = { Authorization: `Bearer ${key}`, ...headers };
  if (content !== undefined) headers = { "Content-Type": "application/json", ...headers };
  let reply;
  try {
    reply = await whole(await fetch(path, { method, signal, body: content, headers }));
  } catch (error) {
    if (signal?.aborted) throw error;
    connection.changed(true);
    throw new Away("The service does not answer.");
  }
  connection.changed(reply.status === 503 && method === "GET"); // a computation that it is too busy for has a reply of its own
  if (reply.ok || reply.status === 304) return reply;
  const document = await reply.json().catch(() => ({})); // of a proxy it may be a page
  throw new Refused(reply.status, document.detail ?? (reply.statusText || `status ${reply.status}`));
}

/** The reply once all of it is there: of a service that is killed only a part may come.
 * @param {Response} reply @returns {Promise<Response>} */
async function whole(reply) {
  const body = await reply.blob();
  return new Response(body.size ? body : null, reply);
}

/** @param {string} path @param {AbortSignal} [signal] @returns {Promise<any>} */
export async function get(path, signal) {
  return (await ask("GET", path, { signal })).json();
}

/** @param {string} path @param {unknown} body @param {AbortSignal} [signal] @returns {Promise<any>} */
export async function post(path, body, signal) {
  return (await ask("POST", path, { body, signal })).json();
}

/** What the interactive picture draws at an address.
 * @param {string} path @param {AbortSignal} signal */
export async function getFigure(path, signal) {
  return read(await (await ask("GET", path, { signal })).text());
}

/** Resolves after a time, or when the signal comes.
 * @param {number} ms @param {AbortSignal} signal @returns {Promise<void>} */
export function pause(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}

/** Runs a step again and again until the signal comes, but not in a hidden tab. While the service is away or about to
 * end it is tried every second.
 * @param {AbortSignal} signal @param {() => Promise<void>} step */
export async function repeat(signal, step) {
  while (!signal.aborted) {
    try {
      await (document.hidden ? pause(AGAIN_MS, signal) : step());
    } catch (error) {
      if (signal.aborted) return;
      if (!(error instanceof Away || (error instanceof Refused && error.status === 503))) throw error;
      await pause(AGAIN_MS, signal);
    }
  }
}

/** Follows a job: calls back with it at once and after each change, until it is over, and on if it is opened again.
 * What was missed while the service was away comes with the next change.
 * @param {string} url @param {AbortSignal} signal @param {(job: Job) => Promise<void>} changed */
export async function follow(url, signal, changed) {
  let etag = "";
  await repeat(signal, async () => {
    const headers = etag ? { "If-None-Match": etag } : undefined;
    const reply = await ask("GET", etag ? `${url}?wait=50` : url, { headers, signal });
    if (reply.status === 304) return;
    const job = await reply.json();
    await changed(job);
    etag = reply.headers.get("ETag") ?? ""; // once it is shown, so that nothing is left out
  });
}
