// The workbench's sliders, and the problem that they say.
import { card, element } from "/page/picture/panel.js";
import { ms } from "/page/picture/words.js";

const NO_LINK = 3;
const ACTIVATION = 1e9; // bytes of one micro-batch on one device

export const SLIDERS = [
  { key: "p", name: "Devices", min: 2, max: 16, step: 1, value: 4, text: String },
  { key: "m", name: "Micro-batches", min: 2, max: 64, step: 1, value: 8, text: String },
  { key: "v", name: "Chunks a device", min: 1, max: 4, step: 1, value: 1, text: String },
  { key: "f", name: "F, forward", min: 1, max: 20, step: 0.5, value: 10, text: ms },
  { key: "b", name: "B, input gradient", min: 1, max: 20, step: 0.5, value: 10, text: ms },
  { key: "w", name: "W, weight gradient", min: 1, max: 20, step: 0.5, value: 8, text: ms },
  { key: "mem", name: "Memory", min: 10, max: 150, step: 1, value: 75, text: (/** @type {number} */ percent) => `${percent}% of what 1F1B needs` },
  { key: "k", name: "Link", min: 0.1, max: NO_LINK, step: 0.05, value: 0.6, text: (/** @type {number} */ k) => (k >= NO_LINK ? "no offload" : `k = ${Number(k.toFixed(2))}`) },
  { key: "p2p", name: "Messages", min: 0, max: 5, step: 0.1, value: 1, text: ms },
];

/** The sliders' values that an address says; the usual ones where it says none.
 * @param {URLSearchParams} query */
export function valuesOf(query) {
  /** @type {Record<string, number>} */
  const values = {};
  for (const { key, value, min, max } of SLIDERS) {
    const asked = query.get(key);
    const given = asked === null ? NaN : Number(asked);
    values[key] = Number.isFinite(given) ? Math.min(max, Math.max(min, given)) : value;
  }
  return values;
}

/** @param {Record<string, number>} values which the reader changes
 * @param {boolean} own whether each schedule has the stages that it is for @param {(own: boolean) => void} changed */
export function sliderCard(values, own, changed) {
  const made = card("Pipeline");
  made.classList.add("sliders");
  const box = element("input", { type: "checkbox" });
  box.checked = own;
  box.addEventListener("change", () => changed(box.checked));
  for (const { key, name, min, max, step, text } of SLIDERS) {
    const slider = element("input", { type: "range", min, max, step, value: values[key] });
    const output = element("span", { class: "value", "aria-hidden": "true" }); // the slider says it
    const tell = () => {
      output.textContent = text(values[key]);
      slider.setAttribute("aria-valuetext", output.textContent ?? "");
    };
    tell();
    slider.addEventListener("input", () => {
      values[key] = Number(slider.value);
      tell();
      changed(box.checked);
    });
    made.append(element("label", "slider", element("span", "", name), output, slider));
  }
  made.append(element("label", "check", box, element("span", "", "Each schedule on stages that it is for")));
  return made;
}

/** The problem that the sliders say. Chunks divide a device's work, so that makespans can be compared.
 * @param {Record<string, number>} of */
export function problemOf({ p, m, v, f, b, w, mem, k, p2p }) {
  const moved = Math.round(ACTIVATION / v);
  const copyMs = (k * (f + b + w)) / 2 / v;
  const link = k >= NO_LINK ? {} : { offload_ms: copyMs, reload_ms: copyMs, offload_bytes: moved };
  return {
    format: "optpipe.problem/3",
    name: `workbench-${p}x${m}`,
    microbatches: m,
    p2p_ms: p2p,
    transfer_mode: "half_duplex",
    devices: Array.from({ length: p }, () => ({ activation_budget_bytes: Math.round((mem / 100) * p * ACTIVATION) })),
    stages: Array.from({ length: p * v }, (_, s) => ({
      device: s % p,
      forward_ms: f / v,
      backward_input_ms: b / v,
      backward_weight_ms: w / v,
      activation_bytes: moved,
      saved_for_weight_bytes: Math.round(moved / 2),
      ...link,
    })),
  };
}
