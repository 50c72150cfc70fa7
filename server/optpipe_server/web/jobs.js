// All jobs with state, age and gap, and the queue.
import { button, card, download, element, region, table } from "/page/picture/panel.js";
import { ms, percent } from "/page/picture/words.js";
import { ask, get, pause, repeat } from "./api.js";
import { age, apart, badge, choice, duration, empty, field, link, nameOf, refill, title } from "./parts.js";
/** @import { Job } from "./api.js" */

const AGAIN_MS = 2000;
const LISTED = 50;
const WITHOUT = ["failed", "infeasible"]; // a schedule, as the job's reason says

const ORDERS = {
  newest: () => 0,
  name: (/** @type {Job} */ a, /** @type {Job} */ b) => nameOf(a).localeCompare(nameOf(b)),
  state: (/** @type {Job} */ a, /** @type {Job} */ b) => a.state.localeCompare(b.state),
  best: (/** @type {Job} */ a, /** @type {Job} */ b) => (a.value_ms ?? Infinity) - (b.value_ms ?? Infinity),
  gap: (/** @type {Job} */ a, /** @type {Job} */ b) => (b.gap ?? -1) - (a.gap ?? -1),
};

/** @param {HTMLElement} place @param {AbortSignal} signal */
export async function showJobs(place, signal) {
  const list = element("div", "");
  const aside = element("div", "side");
  /** @type {{jobs: Job[], next: string | null}} */
  let found = { jobs: [], next: null };
  const filter = element("input", { type: "search", placeholder: "Name, state or method" });
  const names = Object.keys(ORDERS).map((name) => /** @type {[string, string]} */ ([name, name]));
  const order = choice(names, "newest", () => fillList());
  filter.addEventListener("input", () => fillList());
  const together = button("Side by side", () => (location.hash = `#/jobs/${chosen[0]}?beside=${chosen[1]}`));
  /** @type {string[]} */
  let chosen = [];
  const choose = (/** @type {string} */ id, /** @type {boolean} */ on) => {
    chosen = chosen.filter((each) => each !== id).concat(on ? [id] : []).slice(-2);
    fillList();
  };
  const older = button("Show older jobs", () => ((pagesShown += 1), step()));
  const tools = element("div", "controls", field("Filter", filter), field("Order", order));
  place.replaceChildren(title("Jobs", together), tools, element("div", "with-side", list, aside));
  const none = empty(
    "No jobs yet",
    "Submit a problem, and its first schedule is there at once; better ones follow while you watch. " +
      "Or see in the workbench what the published schedules make of a pipeline.",
    link("#/submit", "Submit a problem", "button primary"),
    link("#/workbench", "Open the workbench", "button"),
  );
  let known = "";
  let pagesShown = 1;
  const fillList = () => {
    const { jobs, next } = found;
    const text = (/** @type {Job} */ job) => `${nameOf(job)} ${job.id} ${job.state} ${job.status} ${job.options.method}`.toLowerCase();
    const words = filter.value.toLowerCase().split(/\s+/);
    const kept = jobs.filter((job) => words.every((word) => text(job).includes(word)));
    kept.sort(ORDERS[/** @type {keyof typeof ORDERS} */ (order.value)]);
    tools.hidden = !jobs.length;
    together.hidden = chosen.length < 2;
    const nothing = jobs.length ? element("p", "quiet", "No job has all these words.") : none;
    const more = next ? [element("div", "actions", older)] : [];
    refill(list, kept.length ? jobTable(kept, apart(jobs), chosen, choose) : nothing, ...more);
  };
  const step = async () => {
    const [newest, queue] = await Promise.all([pages(pagesShown, signal), get("/v1/queue", signal)]);
    const now = JSON.stringify([newest, queue]);
    if (now !== known) {
      known = now;
      found = newest;
      fillList();
      aside.replaceChildren(queueCard(queue, found.jobs));
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

/** @param {Job[]} jobs @param {Map<string, string>} differences @param {string[]} chosen
 * @param {(id: string, on: boolean) => void} choose */
function jobTable(jobs, differences, chosen, choose) {
  const rows = jobs.map((job) => {
    const name = link(`#/jobs/${job.id}`, nameOf(job), "job");
    const box = element("input", { type: "checkbox", "aria-label": `Choose ${nameOf(job)}`, "data-focus": `box ${job.id}` });
    box.checked = chosen.includes(job.id);
    box.disabled = job.value_ms === null;
    box.addEventListener("change", () => choose(job.id, box.checked));
    name.dataset.focus = job.id;
    return [
      element("span", "name", box, element("span", "two", name, element("small", "", differences.get(job.id) ?? ""))),
      element("span", "two", badge(job), element("span", "why quiet", WITHOUT.includes(job.state) ? (job.reason ?? "") : "")),
      job.value_ms === null ? "–" : ms(job.value_ms),
      job.gap === null ? "–" : job.gap ? percent(job.gap) : "proven",
      `${job.options.method} · ${duration(job.options.time_limit_s)}`,
      age(job.created_at),
    ];
  });
  const made = table("jobs", ["Job", "State", "Best", "Gap", "Search", "Submitted"], rows, (row, index) =>
    row.addEventListener("click", (event) => {
      const own = event.target instanceof HTMLAnchorElement || event.target instanceof HTMLInputElement;
      if (!own && !String(getSelection())) location.hash = `#/jobs/${jobs[index].id}`;
    }),
  );
  return region("scrolls-x", "Jobs", made);
}

/** @param {{waiting: number, running: number, most_open: number, solves: number,
 *   workers: {worker: string, jobs: string[]}[]}} queue
 * @param {Job[]} jobs */
function queueCard(queue, jobs) {
  const figures = {
    searching: queue.running,
    waiting: queue.waiting,
    "searches at a time here": queue.solves || "none: workers search",
  };
  const entries = Object.entries(figures).flatMap(([name, value]) => [element("dt", "", name), element("dd", "", `${value}`)]);
  const list = element("dl", "figures", ...entries);
  const names = new Map(jobs.map((job) => [job.id, nameOf(job)]));
  const workers = queue.workers.map(({ worker, jobs: ids }) => {
    const links = ids.map((id) => link(`#/jobs/${id}`, names.get(id) ?? `job ${id.slice(0, 8)}`));
    return element("li", "", element("strong", "", worker), ...links);
  });
  const none = element("p", "quiet", "None searches at the moment.");
  const held = workers.length ? element("ul", "workers", ...workers) : none;
  const described = button("openapi.json", async () => download("openapi.json", await (await ask("GET", "/openapi.json")).text()), "link");
  const api = element("p", "hint", "All of this by REST: ", described);
  return card("Queue", list, element("h3", "", "Workers with your jobs"), held, api);
}
