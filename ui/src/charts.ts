// Curves over the last minutes, and bars.

import uPlot from "uplot";
import { colour, make } from "./dom";

export interface Curve {
  label: string;
  colour: string; // a name of the style sheet
  dash?: number[];
}

type Value = number | null;

/** Draws curves over seconds; keeps `keep_s` of them. */
export class Curves {
  readonly element = make("figure");
  private readonly plot: uPlot;
  private readonly data: [number[], ...Value[][]];
  private readonly sizes: ResizeObserver;
  private readonly onTheme = () => this.plot.redraw(false, true);

  constructor(
    title: string,
    curves: Curve[],
    format: (value: number) => string,
    private readonly keep_s: number,
    top = 0, // of the scale at least
  ) {
    this.element.append(make("figcaption", {}, title));
    this.data = [[], ...curves.map(() => [])];
    const axis = { stroke: () => colour("faint"), grid: { stroke: () => colour("line"), width: 1 } };
    const shown = (_: uPlot, value: Value) => (value === null ? "-" : format(value));
    this.plot = new uPlot(
      {
        width: 320,
        height: 150,
        cursor: { drag: { x: false, y: false } },
        scales: { y: { range: (_, __, max) => [0, Math.max(max ?? 0, top) || 1] } },
        axes: [axis, { ...axis, size: 64, values: (_, ticks) => ticks.map(format) }],
        series: [
          {},
          ...curves.map((curve) => ({
            label: curve.label,
            stroke: () => colour(curve.colour),
            width: 1.5,
            dash: curve.dash,
            points: { show: false },
            value: shown,
          })),
        ],
      },
      this.data,
      this.element,
    );
    this.sizes = new ResizeObserver(() => {
      const width = this.element.clientWidth;
      if (width > 0) this.plot.setSize({ width, height: 150 });
    });
    this.sizes.observe(this.element);
    addEventListener("themechange", this.onTheme);
  }

  /** Add a point; `draw` shows it. */
  add(at_s: number, values: Value[]): void {
    this.data[0].push(at_s);
    values.forEach((value, index) => (this.data[index + 1] as Value[]).push(value));
    let num_old = 0;
    while (this.data[0][num_old]! < at_s - this.keep_s) num_old += 1;
    if (num_old > 0) for (const column of this.data) column.splice(0, num_old);
  }

  draw(): void {
    this.plot.setData(this.data);
  }

  close(): void {
    this.sizes.disconnect();
    removeEventListener("themechange", this.onTheme);
    this.plot.destroy();
  }
}

/** A bar of how much of something is used, with words beside it. */
export class Meter {
  readonly element: HTMLElement;
  private readonly bar = make("meter", { min: 0, max: 1 });
  private readonly words = make("span");

  constructor(name: string) {
    this.bar.setAttribute("aria-label", name);
    this.element = make("div", { class: "meter" }, make("b", {}, name), this.bar, this.words);
  }

  show(num_used: number, num_all: number, words: string): void {
    this.element.hidden = num_all <= 0;
    this.bar.value = num_all > 0 ? num_used / num_all : 0;
    if (this.words.textContent !== words) this.words.textContent = words;
  }
}
