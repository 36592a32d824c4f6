// Chart of one metric with uPlot: smoothed curves of several runs over steps. All charts zoom together.

import { element } from "./dom.js";
import { number } from "./format.js";

const HEIGHT = 210;
const DASHES = [[], [6, 4], [2, 3], [10, 3, 2, 3]];

/**
 * Smooth a curve: the mean of each value and its neighbors within `reach` steps.
 *
 * Each mean has equally many values before and after its center. It has fewer values near the ends
 * of the curve and next to a gap. A curve with values at fewer than half of its steps, such as an
 * evaluation, is not smoothed, because its neighbors are other policies.
 */
export function smoothed(steps, values, reach) {
  if (reach === 0 || isSparse(steps)) return values;
  return steps.map((step, i) => {
    const before = i - placeOf(steps, step - reach);
    const after = placeOf(steps, step + reach + 1) - 1 - i;
    const near = Math.min(before, after);
    const window = values.slice(i - near, i + near + 1);
    return window.reduce((sum, value) => sum + value, 0) / window.length;
  });
}

/** Index of the first step that is at least `limit`. The steps are in ascending order. */
function placeOf(steps, limit) {
  let low = 0;
  let high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < limit) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** True for a curve with values at fewer than half of its steps, or with one value. */
export function isSparse(steps) {
  return steps.length === 1 || 2 * steps.length <= steps[steps.length - 1] - steps[0] + 1;
}

/** Leave out the steps at which a curve has no value. */
function measured(curve) {
  const places = curve.values.flatMap((value, place) => (value === null ? [] : [place]));
  return {
    ...curve,
    steps: places.map((place) => curve.steps[place]),
    values: places.map((place) => curve.values[place]),
  };
}

export function themeColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Colors of runs, by index in the list of runs. */
export const runColor = (place) => `--run-${place % 6}`;

export class Chart {
  /**
   * @param {string} title
   * @param {object} options {log: boolean, zoom: Zoom, open: function of a curve and a step}
   */
  constructor(title, options) {
    this.title = title;
    this.options = options;
    this.plot = null;
    this.curves = [];
    this.canvas = element("div.plot", { role: "img" });
    this.legend = element("div.legend");
    this.node = element("figure.chart.card", {}, element("figcaption", {}, title), this.canvas, this.legend);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.canvas);
  }

  /**
   * Show curves.
   * @param {Array<{label, run, metric, color, dash, steps, values}>} curves color: a CSS variable
   * @param {number} reach of the smoothing, in steps
   */
  show(curves, reach) {
    this.curves = curves.map(measured).filter((curve) => curve.values.length > 0);
    this.reach = reach;
    this.node.hidden = this.curves.length === 0;
    if (this.node.hidden || this.canvas.clientWidth === 0) return;

    const { data, drawn } = this.tables();
    const layout = JSON.stringify([drawn.map(({ curve, faint }) => [curve.label, curve.color, faint])]);
    if (this.plot && layout === this.layout) this.plot.setData(data);
    else this.build(data, drawn);
    this.layout = layout;
    this.options.zoom.apply(this.plot);
    this.showValues(null);
  }

  /** Align the curves on the union of their steps, as uPlot requires. */
  tables() {
    const drawn = [];
    const columns = [];
    for (const curve of this.curves) {
      const bold = smoothed(curve.steps, curve.values, this.reach);
      if (bold !== curve.values) {
        drawn.push({ curve, faint: true });
        columns.push([curve.steps, curve.values]);
      }
      drawn.push({ curve, faint: false });
      columns.push([curve.steps, bold]);
    }
    return { data: uPlot.join(columns), drawn };
  }

  build(data, drawn) {
    this.plot?.destroy();
    const series = drawn.map(({ curve, faint }) => ({
      label: curve.label,
      stroke: themeColor(curve.color),
      // A line between rare measurements shows no values, so the points are stronger.
      width: faint || isSparse(curve.steps) ? 1 : 2,
      alpha: faint ? 0.3 : 1,
      dash: DASHES[curve.dash % DASHES.length],
      spanGaps: true,
      points: { show: (data[0].length < 30 || isSparse(curve.steps)) && !faint, size: isSparse(curve.steps) ? 8 : 5 },
    }));
    const axis = {
      stroke: themeColor("--soft"),
      grid: { stroke: themeColor("--line"), width: 1 },
      ticks: { stroke: themeColor("--line"), width: 1 },
      font: "12px system-ui, sans-serif",
      size: 34,
    };
    const valueAxis = { ...axis, size: 58, values: (_, ticks) => ticks.map(tickName) };
    // A logarithmic axis cannot show 0, for example the mismatch of an engine with equal results.
    const isLog = this.options.log && data.slice(1).flat().every((v) => v === null || v === undefined || v > 0);

    this.plot = new uPlot(
      {
        width: this.canvas.clientWidth,
        height: HEIGHT,
        scales: { x: { time: false }, y: isLog ? { distr: 3 } : { range: rangeOf } },
        series: [{ label: "step" }, ...series],
        axes: [axis, isLog ? { ...valueAxis, splits: (_, side, min, max) => logTicks(min, max) } : valueAxis],
        legend: { show: false },
        cursor: {
          sync: { key: "steps" },
          drag: { x: true, y: false },
          points: { size: 7 },
          // A click opens episodes, so a second click must not do something else.
          bind: { dblclick: () => null },
        },
        hooks: {
          setCursor: [(plot) => this.showValues(plot.cursor.idx)],
          setSelect: [(plot) => plot.select.width > 0 && this.options.zoom.take(plot)],
        },
      },
      data,
      this.canvas,
    );
    this.openOnClick();
  }

  /** Open the episodes of a point that is clicked. A drag selects a range instead. */
  openOnClick() {
    const { over } = this.plot;
    let pressed = 0;
    over.addEventListener("mousedown", (event) => (pressed = event.clientX));
    over.addEventListener("click", (event) => {
      const { idx } = this.plot.cursor;
      if (Math.abs(event.clientX - pressed) > 3 || idx === null || idx === undefined) return;
      const step = this.plot.data[0][idx];
      const value = this.plot.posToVal(this.plot.cursor.top, "y");
      const distance = (curve) => Math.abs(valueAt(curve, step).value - value);
      const measured = this.curves.filter((curve) => curve.steps.includes(step));
      measured.sort((a, b) => distance(a) - distance(b));
      if (measured.length > 0) this.options.open(measured[0], step);
    });
  }

  /** Write the values at the cursor below the chart, or the newest values without a cursor. */
  showValues(index) {
    const step = index === null || index === undefined ? null : this.plot.data[0][index];
    const entries = this.curves.map((curve) => {
      const { value, from } = step === null ? { value: newest(curve), from: null } : valueAt(curve, step);
      const line = element("span.line");
      line.style.setProperty("--curve", `var(${curve.color})`);
      if (curve.dash > 0) line.classList.add("dashed");
      const where = step === null || from === step ? "" : ` (step ${number(from)})`;
      return element("span", {}, line, `${curve.label} `, element("b", {}, number(value)), where);
    });
    if (step !== null) entries.unshift(element("span.at", {}, `step ${number(step)}`));
    this.legend.replaceChildren(...entries);
    const words = this.curves.map((curve) => `${curve.label} ${number(newest(curve))}`);
    this.canvas.setAttribute("aria-label", `${this.title} over steps; newest: ${words.join(", ")}`);
  }

  resize() {
    const width = this.canvas.clientWidth;
    if (width === 0) return;
    if (this.plot === null) this.show(this.curves, this.reach ?? 0);
    else if (this.plot.width !== width) this.plot.setSize({ width, height: HEIGHT });
  }

  recolor() {
    this.layout = null;
    this.show(this.curves, this.reach);
  }

  close() {
    this.observer.disconnect();
    this.plot?.destroy();
  }
}

/** Range of the axis. A constant curve has a margin on both sides. */
function rangeOf(_, min, max) {
  if (min === null || min === undefined) return [0, 1];
  if (min === max) return [min - 0.5, max + 0.5];
  return uPlot.rangeNum(min, max, 0.1, true);
}

const tickName = (value) => (value === null ? "" : number(value, 3).replace(/\.?0+e/, "e"));

/** Ticks of a logarithmic axis: powers of ten for many decades, and 1, 2 and 5 for few. */
export function logTicks(min, max) {
  const first = Math.floor(Math.log10(min));
  const decades = Math.ceil(Math.log10(max)) - first;
  const stride = Math.max(1, Math.ceil(decades / 6));
  const factors = decades <= 2 ? [1, 2, 5] : [1];
  const ticks = [];
  for (let i = 0; i <= decades; i += stride) {
    for (const factor of factors) ticks.push(Number(`${factor}e${first + i}`));
  }
  return ticks.filter((tick) => min <= tick && tick <= max);
}

/** Value of a curve at a step: {value, from}. `from` is the nearest step that has a value. */
function valueAt(curve, step) {
  const after = Math.min(placeOf(curve.steps, step), curve.steps.length - 1);
  const before = Math.max(0, after - 1);
  const place = step - curve.steps[before] < curve.steps[after] - step ? before : after;
  return { value: curve.values[place], from: curve.steps[place] };
}

const newest = (curve) => curve.values[curve.values.length - 1];

/** Range of steps of all charts. The user drags in a chart or types numbers. */
export class Zoom {
  constructor(changed) {
    this.from = null;
    this.to = null;
    this.changed = changed;
  }

  take(plot) {
    this.from = Math.max(0, Math.floor(plot.posToVal(plot.select.left, "x")));
    this.to = Math.ceil(plot.posToVal(plot.select.left + plot.select.width, "x"));
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.changed();
  }

  reset() {
    this.from = null;
    this.to = null;
    this.changed();
  }

  apply(plot) {
    const steps = plot.data[0];
    if (steps.length === 0) return;
    const min = this.from ?? steps[0];
    const max = this.to ?? steps[steps.length - 1];
    plot.setScale("x", { min, max: Math.max(max, min + 1) });
  }
}
