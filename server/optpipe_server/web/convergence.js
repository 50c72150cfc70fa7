// The best schedule and the bound over the time of a search.
import { theme } from "/page/picture/theme.js";
import { ms } from "/page/picture/words.js";
/** @import { Bound, Incumbent } from "./api.js" */

const HEIGHT = 230;

/** Draws incumbents as a line of steps, and the bound.
 * @param {HTMLElement} plot @param {Incumbent[]} incumbents of the job's current problem @param {Bound[]} bounds of it
 * @param {number} until in s since `since` @param {number} since ms, as `Date.parse` has it
 * @param {number | null} chosen an incumbent's number */
export async function drawConvergence(plot, incumbents, bounds, until, since, chosen) {
  const colours = theme();
  if (!plot.classList.contains("js-plotly-plot")) plot.replaceChildren();
  const seconds = (/** @type {{found_at: string}} */ { found_at }) => Math.max(0, (Date.parse(found_at) - since) / 1000);
  const at = incumbents.map(seconds);
  const values = incumbents.map(({ value_ms }) => value_ms);
  const least = Math.min(...values, Infinity);
  const known = bounds.map(({ lower_bound_ms }) => Math.min(lower_bound_ms, least)); // a proven one may round above it
  const end = Math.max(until, ...at, 1);
  const [low, high] = [Math.min(...known, ...values), Math.max(...known, ...values)];
  const margin = Math.max(0.06 * (high - low), 0.005 * high, 1e-3);
  const last = values.length ? [values[values.length - 1]] : [];
  const traces = [
    {
      type: "scatter",
      mode: "lines",
      name: "bound",
      x: [...bounds.map(seconds), ...(bounds.length ? [end] : [])],
      y: [...known, ...known.slice(-1)],
      line: { shape: "hv", color: colours.limit, dash: "dash", width: 1.6 },
      hovertemplate: "bound %{y:.6g} ms<extra></extra>",
    },
    {
      type: "scatter",
      mode: "lines+markers",
      name: "best",
      x: [...at, ...last.map(() => end)],
      y: [...values, ...last],
      line: { shape: "hv", color: colours.accent, width: 2 },
      marker: {
        size: [...incumbents.map(({ seq }) => (seq === chosen ? 11 : 7)), ...last.map(() => 0)],
        color: colours.accent,
        line: { color: colours.ground, width: 1.5 },
      },
      text: incumbents.map(({ seq, method }) => `#${seq} ${method}`.replace(/&/g, "&amp;").replace(/</g, "&lt;")),
      hovertemplate: "%{text}<br>%{y:.6g} ms after %{x:.3g} s<extra></extra>",
    },
  ];
  const axis = { gridcolor: colours.line, zeroline: false, linecolor: colours.line, tickfont: { size: 11 } };
  const layout = {
    width: Math.max(240, plot.clientWidth),
    height: HEIGHT,
    margin: { l: 30, r: 12, t: 8, b: 34 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: colours.quiet },
    showlegend: false,
    hovermode: "closest",
    dragmode: false,
    xaxis: { ...axis, range: [0, end * 1.02], ticksuffix: " s", nticks: 6, showgrid: false, tickangle: 0 },
    yaxis: { ...axis, range: [low - margin, high + margin], ticksuffix: " ms", nticks: 5, automargin: true, separatethousands: true },
  };
  const bound = bounds.length ? `, bound ${ms(known[known.length - 1])}` : "";
  const best = last.length ? `, the best takes ${ms(last[0])}` : "";
  plot.setAttribute("role", "img");
  plot.setAttribute("aria-label", `Best schedule over time: ${incumbents.length} found${best}${bound}.`);
  await Plotly.react(plot, traces, layout, { displayModeBar: false });
}
