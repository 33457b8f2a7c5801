// A small histogram of gaps between tokens.

import { make } from "./dom";

const BOUNDS_MS = [20, 50, 100, 200, 500, 1_000, Infinity];
const NAMES = ["< 20 ms", "< 50", "< 100", "< 200", "< 500", "< 1 s", "longer"];

export class GapCounts {
  readonly element: HTMLElement;
  private readonly counts = BOUNDS_MS.map(() => 0);
  private readonly bars = BOUNDS_MS.map(() => make("i"));

  constructor(title: string) {
    const columns = this.bars.map((bar, index) => make("span", {}, make("b", {}, bar), NAMES[index]!));
    this.element = make("figure", { class: "histogram" }, make("figcaption", {}, title), ...columns);
    this.show();
  }

  /** Count gaps of one length. */
  add(gap_ms: number, num_gaps: number): void {
    const bin = BOUNDS_MS.findIndex((bound) => gap_ms < bound);
    this.counts[bin]! += num_gaps;
    this.show();
  }

  private show(): void {
    const most = Math.max(1, ...this.counts);
    this.bars.forEach((bar, index) => (bar.style.height = `${(100 * this.counts[index]!) / most}%`));
    this.element.dataset.counts = JSON.stringify(this.counts);
    const said = this.counts.map((count, index) => `${NAMES[index]}: ${count}`).join(", ");
    this.element.setAttribute("aria-label", said);
    this.element.setAttribute("role", "img");
  }
}
