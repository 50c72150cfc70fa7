// A diagnosis: what a step loses, how slow devices are, and what to change. Each shows what it is about in the picture.
import { pick } from "./data.js";
import { button, card, download, element, region, table, tile } from "./panel.js";
import { show } from "./picture.js";
import { ms, percent } from "./words.js";
/** @import { Document } from "./data.js" */
/** @import { Marked } from "./draw.js" */

/** @typedef {{step: number, replica: number, device: number | null, stage: number | null, microbatch: number | null}} Place */

const HOTTEST = 1.5; // times as long as others with the same work, or more

/** Shows a diagnosis, a document of optpipe.diagnose.page, in an element.
 * @param {HTMLElement} place @param {Document} found */
export async function showDiagnosis(place, found) {
  const { diagnosis } = found;
  const drawing = element("div", "");
  const title = element("h2", { tabindex: -1 });
  const timelines = element("section", "card", title, drawing);
  /** @param {number[]} drawn numbers of schedules @param {string} text @param {Marked | null} marked */
  const draw = async (drawn, text, marked = null) => {
    title.textContent = text;
    await picture.update(pick(found, drawn));
    picture.mark(marked);
    place.dataset.drawn = drawn.join(" ");
  };
  /** @param {HTMLElement} source what was clicked @param {number[]} drawn @param {string} text @param {Marked} [marked] */
  const choose = (source, drawn, text, marked) => {
    for (const each of place.querySelectorAll("[aria-pressed='true']"))
      if (!drawing.contains(each)) each.setAttribute("aria-pressed", "false");
    source.setAttribute("aria-pressed", "true");
    draw(drawn, text, marked);
    timelines.scrollIntoView({ block: "start" });
    title.focus({ preventScroll: true });
  };
  /** @param {HTMLElement} source @param {Place} at @param {string} why */
  const chooseRun = (source, { step, replica, ...marked }, why) => {
    const runs = /** @type {[number, number, number][]} */ (diagnosis.runs);
    const run = runs.find((each) => each[0] === step && each[1] === replica) ?? runs.find((each) => each[0] === step) ?? runs[0];
    choose(source, [run[2]], why, marked);
  };
  const last = `Step ${diagnosis.cures_on_steps.slice(-1)}${diagnosis.replicas > 1 ? ", its slowest replica" : ""}`;
  const cured = (/** @type {number} */ n) => `${last}: as it ran, and cured (${diagnosis.cures[n].what})`;
  const parts = [
    about(found.title, diagnosis),
    card("Causes", list(diagnosis.causes.length ? diagnosis.causes : ["nothing costs more than 3% of a step"])),
    card("What to change", ...cures(diagnosis, (source, n) => choose(source, [0, 1 + n], cured(n)))),
    card("Where the time of a step goes", waterfall(diagnosis, chooseRun)),
    ...(diagnosis.steps.length * diagnosis.replicas > 1 ? [card("Devices by steps: how many times as long as others with the same work", ...heatMap(diagnosis, chooseRun))] : []),
    timelines,
    ...[["Would help", diagnosis.asked], ["Taken to be so", diagnosis.assumed], ["Not used", diagnosis.unused]]
      .filter(([, sentences]) => sentences.length)
      .map(([name, sentences]) => card(name, list(sentences))),
  ];
  place.replaceChildren(...parts);
  const first = diagnosis.cures.length ? [0, 1] : [0];
  const picture = await show(drawing, pick(found, first));
  await draw(first, diagnosis.cures.length ? cured(0) : last);
  return picture;
}

/** @param {string[]} sentences */
function list(sentences) {
  return element("ul", "listed", ...sentences.map((each) => element("li", "", each)));
}

/** @param {string} title @param {any} diagnosis */
function about(title, { steps, replicas, stages, devices, measured_ms, replay_error, cures }) {
  const count = (/** @type {number} */ n, /** @type {string} */ name) => `${n} ${name}${n === 1 ? "" : "s"}`;
  const size = [count(steps.length, "step"), count(replicas, "replica"), count(stages, "stage"), count(devices, "device")];
  const tiles = [
    tile("A step", ms(mean(measured_ms)), steps.length > 1 ? `${ms(Math.min(...measured_ms))} to ${ms(Math.max(...measured_ms))}` : "measured"),
    tile("Best cure", cures.length ? `${percent(cures[0].gain)} less` : "none", cures.length ? `at most ${percent(cures[0].gain_at_most)}` : "that gains 1%"),
    tile("Replay", `${percent(replay_error)} off`, "from the measured step"),
  ];
  const names = element("div", "names", element("h1", "", title), element("p", "", size.join(" · ")));
  return element("header", "", names, element("div", "tiles", ...tiles));
}

/** @param {number[]} values */
function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

/** @param {any} diagnosis @param {(source: HTMLElement, cure: number) => void} choose */
function cures({ cures, held_activations }, choose) {
  if (!cures.length) return [element("p", "", "No cure gains 1% within what is known.")];
  const today = Math.max(...held_activations);
  return cures.map((/** @type {any} */ cure, /** @type {number} */ n) => {
    const go = button(cure.what, () => choose(go, n), "link");
    const bound = `no schedule with the same freedom is below ${ms(mean(cure.bound_ms))}`;
    const memory = `the fullest device holds ${Math.max(...cure.activations)} activations, today ${today}`;
    const figures = `From ${ms(mean(cure.before_ms))} to ${ms(mean(cure.ms))}; ${bound}; ${memory}.`;
    const file = cure.file ? [button(`Save ${cure.file.name}`, () => download(cure.file.name, cure.file.text))] : [];
    const lines = element("pre", "", cure.lines.join("\n"));
    return element("div", "cure", element("h3", "", go, `: ${percent(cure.gain)} less`), element("p", "hint", figures), lines, ...file);
  });
}

/** The parts of the mean step, one below the other: each begins where the one before ends.
 * @param {any} diagnosis @param {(source: HTMLElement, at: Place, why: string) => void} choose */
function waterfall({ losses, measured_ms, places }, choose) {
  const whole = mean(measured_ms);
  const ends = [0]; // some losses are below 0
  for (const { mean_ms } of losses) ends.push(ends[ends.length - 1] + mean_ms);
  const [low, high] = [Math.min(...ends), Math.max(...ends)];
  const rows = losses.map((/** @type {any} */ loss, /** @type {number} */ n) => {
    const bar = element("i", loss.avoidable ? "avoidable" : "");
    bar.style.left = `${(100 * (Math.min(ends[n], ends[n + 1]) - low)) / (high - low)}%`;
    bar.style.width = `${(100 * Math.abs(loss.mean_ms)) / (high - low)}%`;
    const of = loss.ms.map((/** @type {number} */ each, /** @type {number} */ k) => each / measured_ms[k]);
    const share = (/** @type {number} */ each) => percent(Math.abs(each) < 5e-4 ? 0 : each); // no -0.0%
    const figures = `${loss.mean_ms.toFixed(1)} ms, ${share(loss.mean_ms / whole)}`;
    const spread = `by steps ${share(Math.min(...of))} to ${share(Math.max(...of))}`;
    const at = places[n];
    const why = `${loss.what}: step ${at.step}, in which it is largest`;
    const made = button("", () => choose(made, at, why[0].toUpperCase() + why.slice(1)), "loss");
    made.append(element("span", "", loss.what), element("span", "track", bar), element("b", "", figures), element("small", "", spread));
    made.setAttribute("aria-pressed", "false");
    return element("li", "", made);
  });
  return element("ol", "waterfall", ...rows);
}

/** @param {any} diagnosis @param {(source: HTMLElement, at: Place, why: string) => void} choose */
function heatMap({ heat, replicas }, choose) {
  const cells = heat.rows.map((/** @type {[number, number]} */ [replica, device], /** @type {number} */ row) => {
    const label = replicas > 1 ? `replica ${replica}, device ${device}` : `device ${device}`;
    const shown = heat.steps.map((/** @type {number} */ step, /** @type {number} */ column) => {
      const factor = heat.factors[row][column];
      const said = `${label}, step ${step}: ${factor.toFixed(2)} times as long`;
      const at = { step, replica, device, stage: null, microbatch: null };
      const cell = button("", () => choose(cell, at, said[0].toUpperCase() + said.slice(1)), "cell");
      for (const [name, value] of Object.entries({ title: said, "aria-label": said, "aria-pressed": "false", tabindex: row || column ? "-1" : "0" }))
        cell.setAttribute(name, value);
      cell.style.setProperty("--heat", `${100 * Math.min(1, Math.max(0, (factor - 1) / (HOTTEST - 1)))}%`);
      return cell;
    });
    return [label, ...shown];
  });
  const made = table("heat", ["step", ...heat.steps.map(String)], cells);
  made.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -heat.steps.length, ArrowDown: heat.steps.length }[event.key];
    const all = /** @type {HTMLElement[]} */ (Array.from(made.querySelectorAll(".cell")));
    const next = by && all[all.indexOf(/** @type {HTMLElement} */ (event.target)) + by];
    if (!next) return;
    event.preventDefault();
    next.focus();
  });
  const [devices, later] = heat.left_out;
  const more = element("p", "hint", `Left out: ${devices} devices that are less slow, ${later} later steps.`);
  return [region("scrolls", "Devices by steps", made), ...(devices || later ? [more] : [])];
}
