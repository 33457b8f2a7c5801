// A request's row of the map requests x layers: from left to right its layer groups, from the bottom up its tokens.

import { colour, make } from "./dom";

const HEIGHT = 18; // pixels
const COLOURS: Record<string, string> = { R: "resident", O: "offloaded", B: "restoring" };
const NAMES: Record<string, string> = { R: "in the pool", O: "on the host", B: "coming back" };

/** A stretch of a request's tokens whose KV is somewhere. */
export interface Stretch {
  share: number; // of the request's tokens, in [0, 1]
  residency: string; // a letter per layer group
  is_shared: boolean; // with other requests
}

/** Say in words where layer groups are: "1-3 in the pool, 4 on the host". */
export function described(residency: string): string {
  const runs: string[] = [];
  for (const { 0: run, index } of residency.matchAll(/(.)\1*/g)) {
    const first = index + 1;
    const last = index + run.length;
    runs.push(`${first === last ? first : `${first}-${last}`} ${NAMES[run[0]!] ?? "unknown"}`);
  }
  return runs.join(", ");
}

export class HeatRow {
  readonly element = make("canvas", { role: "img", height: HEIGHT });
  private drawn = "";

  /** Draw stretches from the first token on; nothing if nothing has changed. */
  show(stretches: Stretch[]): void {
    const own = stretches.find((stretch) => !stretch.is_shared);
    const theme = document.documentElement.dataset.theme ?? "";
    const width = this.element.clientWidth;
    const parts = stretches.map((one) => `${one.share.toFixed(2)}${one.residency}${one.is_shared}`);
    const wanted = [width, theme, matchMedia("(prefers-color-scheme: dark)").matches, ...parts].join("|");
    if (wanted === this.drawn) return;
    this.drawn = wanted;
    this.element.dataset.layers = own?.residency ?? "";
    const said = stretches.map((one) => (one.is_shared ? "shared: " : "") + described(one.residency));
    this.element.setAttribute("aria-label", `layer groups ${said.filter((s) => s).join("; ")}`);
    this.draw(stretches, width);
  }

  private draw(stretches: Stretch[], width: number): void {
    const scale = devicePixelRatio;
    this.element.width = Math.max(1, Math.round(width * scale));
    this.element.height = HEIGHT * scale;
    const context = this.element.getContext("2d")!;
    context.scale(scale, scale);
    context.fillStyle = colour("absent");
    context.fillRect(0, 0, width, HEIGHT);
    const colours = Object.fromEntries(Object.entries(COLOURS).map(([k, name]) => [k, colour(name)]));
    const ground = colour("ground");
    let bottom = HEIGHT;
    for (const { share, residency, is_shared } of stretches) {
      const height = share * HEIGHT;
      const cell = width / Math.max(1, residency.length);
      const gap = cell > 3 ? 1 : 0;
      for (let group = 0; group < residency.length; group += 1) {
        context.fillStyle = colours[residency[group]!] ?? ground;
        context.fillRect(group * cell, bottom - height, cell - gap, height);
      }
      if (is_shared) {
        context.fillStyle = ground;
        for (let x = 0; x < width; x += 4) context.fillRect(x, bottom - height, 1.5, height);
      }
      bottom -= height;
    }
  }
}
