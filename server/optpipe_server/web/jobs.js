// @ts-check
// All jobs with state, age and gap, and the queue.
import { button, element, filledBar, region, table } from "/page/picture/panel.js";
import { ms, percent } from "/page/picture/words.js";
import { get, pause, repeat } from "./api.js";
import { age, badge, card, duration, empty, link, nameOf } from "./parts.js";

/** @typedef {import("./api.js").Job} Job */

const AGAIN_MS = 2000;
const LISTED = 50;

/** @param {HTMLElement} place @param {AbortSignal} signal */
export async function showJobs(place, signal) {
  const list = element("div", "");
  const aside = element("div", "side");
  place.replaceChildren(
    element("div", "title", element("h1", "", "Jobs")),
    element("div", "with-side", list, aside),
  );
  let known = "";
  let more = 1; // pages
  const step = async () => {
    const [found, queue] = await Promise.all([pages(more, signal), get("/v1/queue", signal)]);
    const now = JSON.stringify([found, queue]);
    if (now !== known) {
      known = now;
      const focused = document.activeElement?.getAttribute("href");
      const older = button("Show older jobs", () => {
        more += 1;
        step();
      });
      list.replaceChildren(found.jobs.length ? jobTable(found.jobs) : none());
      if (found.next) list.append(element("div", "actions", older));
      aside.replaceChildren(queueCard(queue, found.jobs));
      if (focused) /** @type {HTMLElement | null} */ (list.querySelector(`a[href="${focused}"]`))?.focus();
    }
    place.dataset.drawn = "true";
  };
  await repeat(signal, async () => {
    await step();
    await pause(AGAIN_MS, signal);
  });
}

/** The newest jobs, as many pages as asked for.
 * @param {number} count @param {AbortSignal} signal @returns {Promise<{jobs: Job[], next: string | null}>} */
async function pages(count, signal) {
  /** @type {Job[]} */
  const jobs = [];
  let next = /** @type {string | null} */ (`/v1/jobs?limit=${LISTED}`);
  for (let i = 0; i < count && next; i++) {
    const found = await get(next, signal);
    jobs.push(...found.jobs);
    next = found.next;
  }
  return { jobs, next };
}

function none() {
  return empty(
    "No jobs yet",
    "Submit a problem, and its first schedule is there at once; better ones follow while you watch. " +
      "Or see in the workbench what the published schedules make of a pipeline.",
    link("#/submit", "Submit a problem", "button primary"),
    link("#/workbench", "Open the workbench", "button"),
  );
}

/** @param {Job[]} jobs */
function jobTable(jobs) {
  const rows = jobs.map((job) => [
    element("span", "two", link(`#/jobs/${job.id}`, nameOf(job), "job"), element("small", "", job.id.slice(0, 8))),
    badge(job),
    job.value_ms === null ? "–" : ms(job.value_ms),
    gapBar(job.gap),
    `${job.options.method} · ${duration(job.options.time_limit_s)}`,
    age(job.created_at),
  ]);
  const made = table("jobs", ["Job", "State", "Best", "Gap", "Search", "Submitted"], rows, (row, index) =>
    row.addEventListener("click", (event) => {
      const text = event.target instanceof HTMLAnchorElement || String(getSelection());
      if (!text) location.hash = `#/jobs/${jobs[index].id}`;
    }),
  );
  return region("scrolls-x", "Jobs", made);
}

/** A gap as a number and a bar, of which a tenth is the whole width.
 * @param {number | null} gap */
export function gapBar(gap) {
  if (gap === null) return "–";
  return element("span", "gap", element("span", "", gap ? percent(gap) : "proven"), filledBar("gap-bar", gap / 0.1));
}

/** @param {{waiting: number, ahead: number, most_waiting: number, running: number, solves: number,
 *   workers: {worker: string, jobs: string[]}[]}} queue
 * @param {Job[]} jobs */
function queueCard(queue, jobs) {
  const figures = [
    ["searching", String(queue.running)],
    ["waiting", `${queue.waiting} of at most ${queue.most_waiting}`],
    ["before yours, of others", String(queue.ahead)],
    ["searches at a time here", queue.solves ? String(queue.solves) : "none: workers search"],
  ];
  const entries = figures.flatMap(([name, value]) => [element("dt", "", name), element("dd", "", value)]);
  const list = element("dl", "figures", ...entries);
  const names = new Map(jobs.map((job) => [job.id, nameOf(job)]));
  const workers = queue.workers.map(({ worker, jobs: ids }) => {
    const links = ids.map((id) => link(`#/jobs/${id}`, names.get(id) ?? `job ${id.slice(0, 8)}`));
    return element("li", "", element("strong", "", worker), ...links);
  });
  const none = element("p", "quiet", "None searches at the moment.");
  const held = workers.length ? element("ul", "workers", ...workers) : none;
  return card("Queue", list, element("h3", "", "Workers with your jobs"), held);
}
