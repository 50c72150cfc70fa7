// A new job: a problem from a file, or of a known model on known GPUs.
import { button, card, element } from "/page/picture/panel.js";
import { bytes, ms } from "/page/picture/words.js";
import { get, post } from "./api.js";
import { choice, drop, fault, field, number, onlyLast, title, trying } from "./parts.js";

const ESTIMATE_AFTER_MS = 250;

/** @param {HTMLElement} place @param {AbortSignal} signal */
export async function showSubmit(place, signal) {
  const { models, gpus } = await get("/v1/presets", signal);
  const limit = number({ value: 60, min: 1, max: 3600 });
  const lengths = { makespan: "the whole iteration", span: "the busiest device" };
  const objective = choice(Object.entries(lengths), "makespan");
  const changeable = { layers: "the stages, where layers are known", keep: "nothing", all: "the stages" };
  const stages = choice(Object.entries(changeable), "layers");
  const told = element("div", "");
  const submit = async (/** @type {any} */ problem) => {
    const free = problem.layers?.length ? "all" : "keep";
    const placements = stages.value === "layers" ? free : stages.value;
    const options = { time_limit_s: Number(limit.value), objective: objective.value, placements };
    const job = await post("/v1/jobs", { problem, ...options }, signal);
    location.hash = `#/jobs/${job.id}`;
  };

  const fields = [field("Time limit in s", limit), field("What is to be short", objective), field("May be changed", stages)];
  const how = card("How it is searched", element("div", "controls", ...fields));
  how.classList.add("wide");
  const ways = element("div", "cards", fromFile(submit, told), fromPreset(models, gpus, submit, signal));
  place.replaceChildren(title("Submit a problem"), told, how, ways);
  place.dataset.drawn = "true";
}

/** @param {(problem: any) => Promise<void>} submit @param {HTMLElement} told */
function fromFile(submit, told) {
  const about = element("p", "quiet", "A problem as optpipe profile, optpipe model or optpipe problem from write it.");
  /** @type {any} */
  let problem = null;
  const go = button("Submit the file", () => trying(told, () => submit(problem)), "primary");
  go.disabled = true;
  const take = (/** @type {File[]} */ [file]) =>
    trying(told, async () => {
      go.disabled = true;
      if (!file) return;
      problem = problemIn(await file.text(), file.name);
      about.textContent = `${problem.name || file.name}: ${problem.devices?.length} devices, ${problem.stages?.length} stages, ${problem.microbatches} micro-batches`;
      go.disabled = false;
    });
  const place = drop("Choose a file, or drop it here", { accept: ".json,application/json" }, take);
  return card("From a file", place, about, element("div", "actions", go));
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

/** @param {any[]} models @param {any[]} gpus @param {(problem: any) => Promise<void>} submit
 * @param {AbortSignal} signal */
function fromPreset(models, gpus, submit, signal) {
  const model = choice(models.map(({ name }) => [name, name]), "llama-3-8b", () => ask());
  const gpu = choice(gpus.map(({ name, memory_bytes }) => [name, `${name}, ${bytes(memory_bytes)}`]), "H100", () => ask());
  const recomputed = { none: "nothing", selective: "attention's scores", cheap: "what is cheap", full: "whole layers" };
  const recompute = choice(Object.entries(recomputed), "none", () => ask());
  const sizes = {
    pp: number({ value: 4, min: 1, max: 64 }),
    chunks: number({ value: 1, min: 1, max: 8 }),
    tp: number({ value: 2, min: 1, max: 64 }),
    dp: number({ value: 8, min: 1, max: 4096 }),
    microbatches: number({ value: 16, min: 1, max: 512 }),
    size: number({ value: 1, min: 1, max: 64 }),
  };
  for (const size of Object.values(sizes)) size.addEventListener("input", () => ask());
  const told = element("div", { class: "estimate", "aria-live": "polite" });
  const wrong = element("div", "");
  /** @type {any} */
  let problem = null;
  const go = button("Submit the estimate", () => trying(wrong, () => submit(problem)), "primary");
  go.disabled = true;
  const asking = onlyLast(signal);
  const ask = () => asking.soon(estimate, ESTIMATE_AFTER_MS);
  const estimate = async () => {
    const own = asking.next();
    const value = (/** @type {keyof typeof sizes} */ name) => Number(sizes[name].value);
    const parallelism = { pp: value("pp"), tp: value("tp"), dp: value("dp"), chunks: value("chunks"), zero: 1 };
    const run = { microbatches: value("microbatches"), microbatch_size: value("size"), recompute: recompute.value };
    try {
      const found = await post("/v1/estimate", { model: model.value, gpu: gpu.value, parallelism, run }, own);
      problem = found.problem;
      told.replaceChildren(...estimated(found));
      go.disabled = false;
    } catch (error) {
      if (own.aborted) return;
      problem = null;
      go.disabled = true;
      told.replaceChildren(fault(error));
    }
  };
  estimate();
  const fields = [
    field("Model", model),
    field("GPU", gpu),
    field("Pipeline stages", sizes.pp),
    field("Chunks a device", sizes.chunks),
    field("Tensor parallel", sizes.tp),
    field("Replicas, ZeRO-1", sizes.dp),
    field("Micro-batches", sizes.microbatches),
    field("Sequences in each", sizes.size),
    field("Recomputed", recompute),
  ];
  return card("From a model and a GPU", element("div", "controls", ...fields), told, wrong, element("div", "actions", go));
}

/** @param {number} value */
function short(value) {
  return ms(Number(value.toPrecision(3)));
}

const KINDS = {
  state: "weights, gradients, optimizer",
  workspace: "workspace",
  reserved: "driver",
  budget: "left for activations",
};

/** What an estimate says.
 * @param {any} found */
function estimated({ problem, parameters, state_bytes, workspace_bytes, reserved_bytes }) {
  const stage = problem.stages[Math.floor(problem.stages.length / 2)];
  const rows = problem.devices.map((/** @type {any} */ { activation_budget_bytes }, /** @type {number} */ d) => {
    const sizes = [state_bytes[d], workspace_bytes[d], reserved_bytes[d], activation_budget_bytes];
    const parts = Object.keys(KINDS).map((kind, i) => element("i", { class: kind, style: `flex-grow: ${sizes[i] / 1e6}` }));
    const budget = element("span", "", bytes(activation_budget_bytes));
    return element("li", "", element("span", "", `device ${d}`), element("span", "stack", ...parts), budget);
  });
  const billions = `${Number((parameters / 1e9).toPrecision(3))} billion parameters`;
  const times = `a stage's F ${short(stage.forward_ms)}, B ${short(stage.backward_input_ms)}, W ${short(stage.backward_weight_ms)}`;
  return [
    element("p", "", `${billions}; ${times}; an activation has ${bytes(stage.activation_bytes)}.`),
    element("ul", "memory", ...rows),
    element("p", "legend-line", ...Object.entries(KINDS).flatMap(([kind, name]) => [element("i", kind), name])),
  ];
}
