// Pieces that several pages have: notices, fields, ages, dialogs. All text is text.
import { button, element } from "/page/picture/panel.js";
/** @import { Job } from "./api.js" */

/** @param {string} href @param {string} text @param {string} [className] */
export function link(href, text, className = "") {
  return element("a", { class: className, href }, text);
}

/** The heading of a page, with what can be done there.
 * @param {string} text @param {...Node} actions */
export function title(text, ...actions) {
  return element("div", "title", element("h1", "", text), ...actions);
}

/** Replaces what an element has. What had the focus has it again: the piece with the same `data-focus`, or text.
 * @param {HTMLElement} place @param {...Node} children */
export function refill(place, ...children) {
  const nameOf = (/** @type {HTMLElement | SVGElement} */ each) => each.dataset.focus ?? each.textContent;
  const focused = /** @type {HTMLElement | null} */ (place.contains(document.activeElement) ? document.activeElement : null);
  const name = focused && nameOf(focused);
  place.replaceChildren(...children);
  const pieces = /** @type {HTMLElement[]} */ (Array.from(place.querySelectorAll("a, button, input, summary")));
  if (name) pieces.find((each) => nameOf(each) === name)?.focus();
}

/** What is said in place of something that is not there.
 * @param {string} title @param {string} text @param {...Node} actions */
export function empty(title, text, ...actions) {
  return element("div", "empty", element("h2", "", title), element("p", "", text), element("div", "actions", ...actions));
}

/** A sentence that stands out. `kind` is wrong, good or plain.
 * @param {string} kind @param {string} text */
export function notice(kind, text) {
  return element("p", { class: `notice ${kind}`, role: kind === "wrong" ? "alert" : "status" }, text);
}

/** @param {string} label @param {HTMLElement} input @param {string} [hint] */
export function field(label, input, hint) {
  const made = element("label", "field", element("span", "", label), input);
  if (hint) made.append(element("small", "", hint));
  return made;
}

/** A place to drop files on, which the keyboard reaches, too.
 * @param {string} label @param {Record<string, string>} attributes of its input @param {(files: File[]) => void} take */
export function drop(label, attributes, take) {
  const chosen = element("input", { type: "file", ...attributes });
  chosen.addEventListener("change", () => take(Array.from(chosen.files ?? [])));
  const made = element("label", "drop", element("span", "button", label), chosen);
  for (const name of ["dragover", "dragleave", "drop"])
    made.addEventListener(name, (event) => {
      event.preventDefault();
      made.classList.toggle("over", name === "dragover");
      if (name === "drop") take(Array.from(/** @type {DragEvent} */ (event).dataTransfer?.files ?? []));
    });
  return made;
}

/** @param {{value: string | number, min: number, max: number, step?: number | "any"}} of */
export function number(of) {
  return element("input", { type: "number", step: 1, ...of });
}

/** @param {[string, string][]} options values and texts
 * @param {string} chosen @param {(value: string) => void} [changed] */
export function choice(options, chosen, changed) {
  const made = element("select", "");
  fill(made, options, chosen);
  if (changed) made.addEventListener("change", () => changed(made.value));
  return made;
}

/** Gives a choice other options; what the reader has open stays as it is if they are the same.
 * @param {HTMLSelectElement} select @param {[string, string][]} options @param {string} chosen */
export function fill(select, options, chosen) {
  const known = JSON.stringify(options);
  if (select.dataset.options !== known) {
    select.dataset.options = known;
    select.replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
  }
  select.value = chosen;
}

const STATES = { queued: "waiting", running: "searching" };

/** A job's state. A proven answer is told apart from one that ran out of time.
 * @param {{state: string, status: string}} job */
export function badge({ state, status }) {
  const text = state === "done" && status === "optimal" ? "optimal" : (STATES[/** @type {never} */ (state)] ?? state);
  return element("span", `badge ${state}`, text);
}

/** The name of a job, or what stands for it.
 * @param {{problem_name: string, id: string}} job */
export function nameOf({ problem_name, id }) {
  return problem_name || `job ${id.slice(0, 8)}`;
}

/** What tells jobs of one name apart: the options that differ, and the beginning of each one's number.
 * @param {Job[]} jobs @returns {Map<string, string>} by number */
export function apart(jobs) {
  return new Map(
    jobs.map((job) => {
      const named = jobs.filter((each) => nameOf(each) === nameOf(job));
      const words = [job.id.slice(0, 8)];
      for (const [key, value] of Object.entries(job.options).reverse()) {
        if (new Set(named.map(({ options }) => JSON.stringify(options[key]))).size === 1) continue;
        if (key === "placements") words.unshift(value === "all" ? "any stages" : "stages as given");
        else if (key === "time_limit_s") words.unshift(duration(value));
        else words.unshift(typeof value === "string" ? value : `${key.replace(/_/g, " ")} ${value}`);
      }
      return [job.id, words.join(" · ")];
    }),
  );
}

/** @param {number} seconds */
export function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  const [large, small, unit, part] =
    whole < 3600 ? [60, 1, "min", "s"] : whole < 86400 ? [3600, 60, "h", "min"] : [86400, 3600, "d", "h"];
  const rest = Math.floor((whole % Number(large)) / Number(small));
  return `${Math.floor(whole / Number(large))} ${unit}${rest ? ` ${rest} ${part}` : ""}`;
}

/** How long ago a moment was; it is kept up to date.
 * @param {string} at @param {string} [after] */
export function age(at, after = " ago") {
  const made = element("time", { datetime: at, title: new Date(at).toLocaleString(), "data-after": after });
  tick(made);
  return made;
}

/** @param {HTMLTimeElement} time */
function tick(time) {
  const seconds = (Date.now() - Date.parse(time.dateTime)) / 1000;
  time.textContent = duration(seconds < 120 ? seconds : Math.round(seconds / 60) * 60) + (time.dataset.after ?? "");
}

setInterval(() => {
  for (const time of document.querySelectorAll("time[data-after]")) tick(/** @type {HTMLTimeElement} */ (time));
}, 1000);

/** Asks something in a dialog; `act` is done if the reader agrees, and its error is told there.
 * @param {string} title @param {Node[]} content @param {string} agree @param {() => Promise<void>} act */
export function dialog(title, content, agree, act) {
  const made = element("dialog", { "aria-label": title });
  const told = element("div", "");
  const agreed = async () => {
    go.disabled = true;
    await trying(told, async () => {
      await act();
      made.close();
    });
    go.disabled = false;
  };
  const go = button(agree, agreed, "primary");
  const actions = element("div", "actions", button("Back", () => made.close()), go);
  made.append(element("h2", "", title), ...content, told, actions);
  made.addEventListener("close", () => made.remove());
  document.body.append(made);
  made.showModal();
}

/** Shows what an action answers if it fails.
 * @param {HTMLElement} place @param {() => Promise<void>} act */
export async function trying(place, act) {
  place.replaceChildren();
  try {
    await act();
  } catch (error) {
    place.replaceChildren(fault(error));
  }
}

/** @param {unknown} error */
export function fault(error) {
  return notice("wrong", String(/** @type {Error} */ (error).message));
}

/** Gives a signal at each call, and ends the one before: of requests, of which the last one counts. `soon` does
 * something after a time without another call.
 * @param {AbortSignal} [signal] ends all of it */
export function onlyLast(signal) {
  let latest = new AbortController();
  let timer = 0;
  signal?.addEventListener("abort", () => (clearTimeout(timer), latest.abort()));
  return {
    next: () => (latest.abort(), (latest = new AbortController()).signal),
    soon: (/** @type {() => void} */ act, /** @type {number} */ ms) => {
      clearTimeout(timer);
      timer = window.setTimeout(act, ms);
    },
  };
}
