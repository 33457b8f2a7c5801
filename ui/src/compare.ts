// Results of `evenflow simulate --json` and `evenflow bench --save-result`, beside each other. Files stay in the browser.

import uPlot from "uplot";
import { colour, make, say } from "./dom";

type Row = Record<string, unknown>;

interface Opened {
  name: string;
  content: Row;
}

interface Line {
  label: string;
  points: [number, number][];
}

const COLOURS = ["accent", "second", "good", "offloaded", "restoring", "bad"];
const DASHES = [undefined, [6, 3], [2, 2]];
const WHICH = ["policy", "rate_per_s", "slo_tbt_s", "slo_scale", "seed"]; // a cell is, beside its figures
const DISTRIBUTIONS = [
  ["ttfts", "Share of first tokens that came by then", "time to first token, s"],
  ["itls", "Share of gaps that were no longer", "gap between two tokens, s"],
] as const;
const MAX_POINTS = 500; // of a distribution

export function compareView(into: HTMLElement): () => void {
  const input = make("input", { type: "file", id: "results", accept: ".json,application/json", multiple: true });
  const figure = make("select", { id: "figure", "aria-label": "figure", hidden: true });
  const note = make("p", { role: "status", class: "bad" });
  const shown = make("div");
  const label = make("label", { for: "results" }, "Results of evenflow simulate (--json) or evenflow bench (--save-result): ");
  const hint = make("p", { class: "facts" }, "Drag over a curve to zoom, double-click to see all of it again.");
  into.append(make("p", {}, label, input, " ", figure), hint, note, shown);
  let opened: Opened[] = [];
  let plots: Plot[] = [];

  function show(): void {
    for (const plot of plots) plot.close();
    const cells = opened.flatMap(({ content }) => (Array.isArray(content.cells) ? (content.cells as Row[]) : []));
    const runs = opened.filter(({ content }) => !Array.isArray(content.cells));
    plots = [];
    if (cells.length > 0) plots.push(new Plot(figure.value, "requests/s", overRates(cells, figure.value)));
    for (const [name, title, x] of DISTRIBUTIONS) {
      const lines = runs.map((run) => ({ label: run.name, points: distribution(run.content[name]) }));
      const drawn = lines.filter((line) => line.points.length > 0);
      if (drawn.length > 0) plots.push(new Plot(title, x, drawn));
    }
    const tables = cells.length > 0 ? [table(cells.map((cell) => [cell.policy, cell.rate_per_s, cell[figure.value]]), ["policy", "requests/s", figure.value])] : [];
    if (runs.length > 0) tables.push(scalars(runs));
    shown.replaceChildren(...plots.map((plot) => plot.element), ...tables);
    for (const plot of plots) plot.fit();
  }

  input.addEventListener("change", async () => {
    opened = [];
    const failed: string[] = [];
    for (const file of input.files ?? []) {
      try {
        const content = JSON.parse(await file.text());
        if (typeof content !== "object" || content === null) throw new Error();
        opened.push({ name: file.name, content });
      } catch {
        failed.push(file.name);
      }
    }
    say(note, failed.length > 0 ? `no such results: ${failed.join(", ")}` : "");
    const names = figuresOf(opened);
    figure.hidden = names.length === 0;
    figure.replaceChildren(...names.map((name) => make("option", {}, name)));
    show();
  });
  figure.addEventListener("change", show);
  addEventListener("themechange", show);
  return () => {
    removeEventListener("themechange", show);
    for (const plot of plots) plot.close();
  };
}

/** Return the figures that cells have, in their order. */
function figuresOf(opened: Opened[]): string[] {
  const names = new Set<string>();
  for (const { content } of opened) {
    for (const cell of Array.isArray(content.cells) ? (content.cells as Row[]) : []) {
      for (const [name, value] of Object.entries(cell)) {
        if (typeof value === "number" && !WHICH.includes(name)) names.add(name);
      }
    }
  }
  return [...names];
}

/** Return a line per policy and SLO over the rate, of the mean over seeds. */
function overRates(cells: Row[], figure: string): Line[] {
  const has_scales = new Set(cells.map((cell) => cell.slo_scale)).size > 1;
  const lines = new Map<string, Map<number, number[]>>();
  for (const cell of cells) {
    const value = cell[figure];
    if (typeof value !== "number") continue;
    const name = String(cell.policy) + (has_scales ? ` at ${cell.slo_scale} x` : "");
    const line = lines.get(name) ?? new Map<number, number[]>();
    lines.set(name, line);
    const rate = Number(cell.rate_per_s);
    line.set(rate, [...(line.get(rate) ?? []), value]);
  }
  const mean = (values: number[]) => values.reduce((a, b) => a + b, 0) / values.length;
  return [...lines].map(([label, line]) => ({
    label,
    points: [...line].sort(([a], [b]) => a - b).map(([rate, values]) => [rate, mean(values)]),
  }));
}

/** Return which share of values is at most x, for some x. */
function distribution(told: unknown): [number, number][] {
  if (!Array.isArray(told)) return [];
  const values = (told.flat() as number[]).filter((value) => value > 0).sort((a, b) => a - b);
  const every = Math.max(1, Math.floor(values.length / MAX_POINTS));
  const kept = values.map((value, index): [number, number] => [value, (index + 1) / values.length]);
  return kept.filter((_, index) => index % every === 0 || index === values.length - 1);
}

function scalars(runs: Opened[]): HTMLElement {
  const names = new Set(runs.flatMap(({ content }) => Object.keys(content)));
  const is_told = (name: string) => runs.some(({ content }) => typeof content[name] === "number");
  const rows = [...names].filter(is_told).map((name) => [name, ...runs.map(({ content }) => content[name])]);
  return table(rows, ["", ...runs.map(({ name }) => name)]);
}

function table(rows: unknown[][], names: string[]): HTMLElement {
  const text = (value: unknown) => (typeof value === "number" ? value.toLocaleString("en", { maximumSignificantDigits: 4 }) : String(value ?? "-"));
  const head = make("tr", {}, ...names.map((name) => make("th", {}, name)));
  const body = rows.map((row) => make("tr", {}, ...row.map((value) => make("td", {}, text(value)))));
  return make("div", { class: "scrolls" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
}

/** Lines over any numbers, to be hovered over and zoomed into. */
class Plot {
  readonly element: HTMLElement;
  private readonly plot: uPlot;
  private readonly onResize = () => this.fit();

  constructor(title: string, x: string, lines: Line[]) {
    this.element = make("figure", {}, make("figcaption", {}, title));
    const tables = lines.map((line): uPlot.AlignedData => [
      line.points.map(([at]) => at),
      line.points.map(([, value]) => value),
    ]);
    const axis = { stroke: () => colour("faint"), grid: { stroke: () => colour("line"), width: 1 } };
    this.plot = new uPlot(
      {
        width: 320,
        height: 300,
        scales: { x: { time: false } },
        axes: [{ ...axis, label: x }, { ...axis, size: 64 }],
        series: [
          { label: x },
          ...lines.map((line, index) => ({
            label: line.label,
            stroke: () => colour(COLOURS[index % COLOURS.length]!),
            dash: DASHES[Math.floor(index / COLOURS.length) % DASHES.length],
            width: 2,
            spanGaps: true,
          })),
        ],
      },
      uPlot.join(tables),
      this.element,
    );
    addEventListener("resize", this.onResize);
  }

  fit(): void {
    if (this.element.clientWidth > 0) this.plot.setSize({ width: this.element.clientWidth, height: 300 });
  }

  close(): void {
    removeEventListener("resize", this.onResize);
    this.plot.destroy();
  }
}
