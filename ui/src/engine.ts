// Engines at work: where each layer of each request is, what runs, what waits and why.

import { Curves, Meter } from "./charts";
import { make, say } from "./dom";
import { HeatRow, type Stretch } from "./heat";
import { type EngineNews, type EngineUpdate, type WatchedRequest, shareInTime, watch } from "./watch";

const KEEP_S = 120; // of curves
const SILENT_AFTER_S = 2.5; // an engine says something ten times a second
const RUNNING = ["prefill", "decoding"];

const number = (value: number) => value.toLocaleString("en");
const percent = (value: number) => `${(100 * value).toFixed(value < 1 ? 1 : 0)} %`;
const milliseconds = (value: number) => `${(1e3 * value).toFixed(value < 0.01 ? 2 : 1)} ms`;

export function engineView(into: HTMLElement): () => void {
  const engines = new Map<string, Engine>();
  const note = make("p", { role: "status", class: "bad" });
  const list = make("div");
  into.append(note, list);
  const stopWatch = watch(
    (news) => {
      say(note, "");
      let engine = engines.get(news.executor);
      if (engine === undefined) {
        engine = new Engine(news.executor);
        engines.set(news.executor, engine);
        list.append(engine.element);
      }
      engine.hear(news);
    },
    (why) => say(note, why),
  );
  let frame = requestAnimationFrame(function draw() {
    for (const engine of engines.values()) engine.draw();
    frame = requestAnimationFrame(draw);
  });
  return () => {
    stopWatch();
    cancelAnimationFrame(frame);
    for (const engine of engines.values()) engine.close();
  };
}

/** One engine's part of the page; what it hears is drawn with the next frame. */
class Engine {
  readonly element: HTMLElement;
  private readonly title = make("h2");
  private readonly status = make("span", { class: "status" });
  private readonly pool = new Meter("pool");
  private readonly host = new Meter("host");
  private readonly facts = make("p", { class: "facts" });
  private readonly steps = new Curves(
    "Step time",
    [
      { label: "observed", colour: "accent" },
      { label: "predicted", colour: "second", dash: [4, 3] },
    ],
    milliseconds,
    KEEP_S,
  );
  private readonly share = new Curves("Tokens in time", [{ label: "share", colour: "good" }], percent, KEEP_S, 1);
  private readonly rows = make("ol", { class: "requests" });
  private readonly reasons = make("p", { class: "facts" });
  private readonly byId = new Map<string, RequestRow>();
  private readonly shared = new Map<string, RequestRow>();
  private update: EngineUpdate | null = null;
  private heard_s = performance.now() / 1e3;
  private is_drawn = true;

  constructor(private readonly executor: string) {
    const meters = make("div", { class: "meters" }, this.pool.element, this.host.element);
    const curves = make("div", { class: "curves" }, this.steps.element, this.share.element);
    const head = make("div", { class: "head" }, this.title, this.status);
    const parts = [head, meters, this.facts, curves, legend(), this.rows, this.reasons];
    this.element = make("section", { class: "engine", "data-executor": executor }, ...parts);
    say(this.title, executor);
  }

  hear(news: EngineNews): void {
    this.heard_s = performance.now() / 1e3;
    this.update = news.is_connected ? news : null;
    this.is_drawn = false;
    if (!news.is_connected) return;
    const at_s = Date.now() / 1e3;
    this.steps.add(at_s, [news.observed_step_s, news.predicted_step_s]);
    this.share.add(at_s, [shareInTime(news.requests)]);
  }

  draw(): void {
    const silent_s = performance.now() / 1e3 - this.heard_s;
    this.showStatus(silent_s);
    if (this.is_drawn) return;
    this.is_drawn = true;
    const update = this.update;
    this.rows.hidden = update === null;
    if (update === null) return;
    say(this.title, `${update.model} at ${this.executor}`);
    this.showMemory(update);
    this.showRows(update);
    this.steps.draw();
    this.share.draw();
  }

  close(): void {
    this.steps.close();
    this.share.close();
  }

  private showStatus(silent_s: number): void {
    let status = "live";
    if (this.update === null) status = "not connected";
    else if (silent_s > SILENT_AFTER_S) status = `stopped: nothing heard for ${silent_s.toFixed(0)} s`;
    if (this.status.textContent === status) return;
    this.status.textContent = status;
    this.element.classList.toggle("stopped", status !== "live");
  }

  private showMemory(update: EngineUpdate): void {
    const used = update.num_pool_blocks - update.num_free_pool_blocks;
    this.pool.show(used, update.num_pool_blocks, `${number(used)} of ${number(update.num_pool_blocks)} blocks`);
    const away = update.num_host_blocks - update.num_free_host_blocks;
    this.host.show(away, update.num_host_blocks, `${number(away)} of ${number(update.num_host_blocks)} blocks`);
    const facts = [`step ${number(update.num_steps)}: ${milliseconds(update.observed_step_s)}`];
    if (update.predicted_step_s !== null) facts.push(`predicted ${milliseconds(update.predicted_step_s)}`);
    if (update.tokens_per_step !== null) facts.push(`${update.tokens_per_step.toFixed(2)} tokens per request and step`);
    if (update.num_host_blocks > 0) facts.push(`${number(update.num_cached_tokens)} tokens cached on the host`);
    if (update.link_bytes_per_s !== null) facts.push(`link ${(update.link_bytes_per_s / 1e9).toFixed(2)} GB/s`);
    const share = shareInTime(update.requests);
    if (share !== null) facts.push(`${percent(share)} of tokens in time`);
    say(this.facts, facts.join(" · "));
  }

  private showRows(update: EngineUpdate): void {
    const most = Math.max(1, ...update.requests.map((request) => request.num_generated_tokens));
    const shared = update.prefixes.map((prefix, index) => ({ id: `shared ${index + 1}`, prefix }));
    const here = new Set(update.requests.map((request) => request.request_id));
    dropOthers(this.byId, here);
    dropOthers(this.shared, new Set(shared.map(({ id }) => id)));
    for (const request of update.requests) {
      this.rowOf(this.byId, request.request_id).show(request, stretchesOf(request, update), most);
    }
    for (const { id, prefix } of shared) {
      const stretch = { share: 1, residency: prefix.residency, is_shared: true };
      this.rowOf(this.shared, id).showPrefix(prefix.num_tokens, prefix.request_ids, stretch);
    }
    say(this.reasons, update.requests.length > 0 ? "" : "Nothing to do.");
  }

  private rowOf(rows: Map<string, RequestRow>, id: string): RequestRow {
    let row = rows.get(id);
    if (row === undefined) {
      row = new RequestRow(id);
      rows.set(id, row);
      this.rows.append(row.element);
    }
    return row;
  }
}

function dropOthers(rows: Map<string, RequestRow>, here: Set<string>): void {
  for (const [id, row] of rows) {
    if (here.has(id)) continue;
    row.element.remove();
    rows.delete(id);
  }
}

/** Return where a request's tokens are: those that it shares, from the first on, then its own. */
function stretchesOf(request: WatchedRequest, update: EngineUpdate): Stretch[] {
  const num_tokens = Math.max(1, request.num_computed_tokens);
  const stretches: Stretch[] = [];
  let rest = 1;
  for (const prefix of update.prefixes) {
    if (!prefix.request_ids.includes(request.request_id)) continue;
    const share = Math.min(rest, prefix.num_tokens / num_tokens);
    stretches.push({ share, residency: prefix.residency, is_shared: true });
    rest -= share;
  }
  if (request.residency) stretches.push({ share: rest, residency: request.residency, is_shared: false });
  return stretches;
}

class RequestRow {
  readonly element: HTMLLIElement;
  private readonly state = make("span", { class: "state" });
  private readonly why = make("span", { class: "why" });
  private readonly tokens = make("span", { class: "tokens" });
  private readonly bar = make("span", { class: "deposit", role: "img" }, make("i"), make("i"));
  private readonly heat = new HeatRow();

  constructor(id: string) {
    const name = make("span", { class: "name", title: id }, id);
    const parts = [name, this.state, this.why, this.tokens, this.bar, this.heat.element];
    this.element = make("li", { "data-request": id }, ...parts);
  }

  show(request: WatchedRequest, stretches: Stretch[], most: number): void {
    say(this.state, request.state);
    this.element.dataset.state = request.state;
    const late = request.late_cause === null ? "" : ` · late: ${request.late_cause}`;
    say(this.why, (RUNNING.includes(request.state) ? "" : request.why_text) + late);
    this.why.title = request.why_text;
    const read = request.num_generated_tokens - request.num_deposited_tokens;
    const words = `${number(request.num_prompt_tokens)} + ${number(request.num_generated_tokens)}`;
    say(this.tokens, request.num_deposited_tokens > 0 ? `${words}, ${request.num_deposited_tokens} in deposit` : words);
    const [delivered, deposit] = this.bar.children as unknown as [HTMLElement, HTMLElement];
    delivered.style.width = `${(100 * read) / most}%`;
    deposit.style.width = `${(100 * request.num_deposited_tokens) / most}%`;
    const said = `${read} tokens delivered, ${request.num_deposited_tokens} in deposit`;
    this.bar.setAttribute("aria-label", said);
    this.heat.show(stretches);
  }

  showPrefix(num_tokens: number, ids: string[], stretch: Stretch): void {
    say(this.state, "shared");
    this.element.dataset.state = "shared";
    this.bar.setAttribute("aria-hidden", "true"); // a prefix has no reader
    say(this.why, `by ${ids.join(", ") || "no request any more"}`);
    say(this.tokens, number(num_tokens));
    this.heat.show([stretch]);
  }
}

function legend(): HTMLElement {
  const part = (kind: string, name: string) => make("span", {}, make("i", { class: kind }), name);
  return make(
    "p",
    { class: "legend" },
    "layer groups, left to right: ",
    part("resident", "in the pool"),
    part("offloaded", "on the host"),
    part("restoring", "coming back"),
    part("shared", "shared with others, from the first token up"),
    " tokens: ",
    part("delivered", "delivered"),
    part("deposited", "in deposit"),
  );
}
