// A new job: a problem from a file.
import { button, card, element } from "/page/picture/panel.js";
import { post } from "./api.js";
import { choice, drop, field, number, title, trying } from "./parts.js";

/** @param {HTMLElement} place @param {AbortSignal} signal */
export function showSubmit(place, signal) {
  const limit = number({ value: 60, min: 1, max: 3600 });
  const lengths = { makespan: "the whole iteration", span: "the busiest device" };
  const objective = choice(Object.entries(lengths), "makespan");
  const changeable = { layers: "the stages, where layers are known", keep: "nothing", all: "the stages" };
  const stages = choice(Object.entries(changeable), "layers");
  const told = element("div", "");
  const submit = async () => {
    const free = problem.layers?.length ? "all" : "keep";
    const placements = stages.value === "layers" ? free : stages.value;
    const options = { time_limit_s: Number(limit.value), objective: objective.value, placements };
    const job = await post("/v1/jobs", { problem, ...options }, signal);
    location.hash = `#/jobs/${job.id}`;
  };

  /** @type {any} */
  let problem = null;
  const about = element("p", "quiet", "A problem as optpipe profile, optpipe model or optpipe problem from write it.");
  const go = button("Submit the file", () => trying(told, submit), "primary");
  go.disabled = true;
  const take = (/** @type {File[]} */ [file]) =>
    trying(told, async () => {
      go.disabled = true;
      if (!file) return;
      problem = problemIn(await file.text(), file.name);
      about.textContent = `${problem.name || file.name}: ${problem.devices?.length} devices, ${problem.stages?.length} stages, ${problem.microbatches} micro-batches`;
      go.disabled = false;
    });
  const file = drop("Choose a file, or drop it here", { accept: ".json,application/json" }, take);
  const fields = [field("Time limit in s", limit), field("What is to be short", objective), field("May be changed", stages)];
  const how = card("How it is searched", element("div", "controls", ...fields));
  const from = card("Problem", file, about, element("div", "actions", go));
  place.replaceChildren(title("Submit a problem"), told, element("div", "cards", from, how));
  place.dataset.drawn = "true";
}

/** The problem in a file: itself, or that of a schedule or a submission.
 * @param {string} text @param {string} name */
function problemIn(text, name) {
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    throw new Error(`${name} is not JSON; expected a problem file.`);
  }
  const problem = found?.problem ?? found;
  if (typeof problem !== "object" || problem === null || !("stages" in problem))
    throw new Error(`${name} has no stages; expected a problem file.`);
  return problem;
}
