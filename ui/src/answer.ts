// One streamed answer: its text, what is in deposit, and the gaps between its tokens.

import { ApiError, call, events } from "./api";
import { make, say } from "./dom";
import { GapCounts } from "./gaps";
import type { WatchedRequest } from "./watch";

const REPACE_AFTER_MS = 50; // of a slider at rest

export interface Asked {
  model: string;
  messages: { role: string; content: string }[];
  max_tokens: number;
}

type Level = Record<string, number | boolean> | null;

export class Answer {
  readonly element: HTMLElement;
  text = "";
  private readonly id = `ui-${crypto.getRandomValues(new Uint32Array(3)).join("-")}`;
  private readonly thoughts = make("div", { class: "thoughts", hidden: true });
  private readonly said = make("div", { class: "text" });
  private readonly facts = make("p", { class: "facts" });
  private readonly bar = make("div", { class: "deposit", role: "img" }, make("i"), make("i"));
  private readonly felt = new GapCounts("gaps felt: between two tokens here");
  private readonly hidden = new GapCounts("gaps hidden: in generation, while some were in deposit");
  private readonly stopping = new AbortController();
  private readonly asked_ms = performance.now();
  private num_read = 0;
  private num_generated = 0;
  private read_ms = 0; // when the newest token came
  private generated_ms = 0;
  private first_ms = 0;
  private timer = 0;
  private state = "waiting for the first token";

  constructor(
    kind: string,
    private readonly level: Level,
  ) {
    const heading = make("h3", {}, kind);
    const counts = make("div", { class: "gaps" }, this.felt.element);
    if (level !== null) counts.append(this.hidden.element);
    const parts = [heading, this.bar, this.facts, this.thoughts, this.said, counts];
    this.element = make("section", { class: "answer", "data-kind": kind }, ...parts);
    this.show();
  }

  /** Ask, and show what comes until the end. Does not throw. */
  async ask(asked: Asked): Promise<void> {
    const body = {
      ...asked,
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
      ...(this.level === null ? {} : { evenflow: this.level }),
    };
    const options = { method: "POST", body: JSON.stringify(body), headers: { "x-request-id": this.id } };
    try {
      const response = await call("/v1/chat/completions", { ...options, signal: this.stopping.signal });
      for await (const data of events(response)) if (data !== "[DONE]") this.take(JSON.parse(data));
      if (this.state === "reading") this.state = "read";
    } catch (error) {
      this.state = this.stopping.signal.aborted ? "stopped" : told(error);
    }
    this.show();
  }

  stop(): void {
    this.stopping.abort();
  }

  /** Have it go on at another pace, where it has one; the newest word counts. */
  async repace(level: Record<string, number>): Promise<void> {
    if (this.level === null) return;
    clearTimeout(this.timer);
    this.timer = window.setTimeout(async () => {
      try {
        await call(`/v1/streams/${this.id}`, { method: "PATCH", body: JSON.stringify(level) });
      } catch (error) {
        if (!(error instanceof ApiError && error.status === 404)) this.state = told(error);
        this.show();
      }
    }, REPACE_AFTER_MS);
  }

  /** Take in what the engine has generated. */
  observe(requests: WatchedRequest[]): void {
    const own = requests.find((request) => request.request_id === this.id);
    if (own === undefined || own.num_generated_tokens <= this.num_generated) return;
    const now_ms = performance.now();
    const num_new = own.num_generated_tokens - this.num_generated;
    if (this.num_generated > 0 && this.num_generated > this.num_read) {
      this.hidden.add((now_ms - this.generated_ms) / num_new, num_new);
    }
    this.num_generated = own.num_generated_tokens;
    this.generated_ms = now_ms;
    this.show();
  }

  private take(event: any): void {
    if (event.error !== undefined) throw new Error(String(event.error.message));
    const delta = event.choices?.[0]?.delta;
    const thought = delta?.reasoning_content ?? delta?.reasoning ?? "";
    if (thought) {
      this.thoughts.hidden = false;
      this.thoughts.append(thought);
    }
    const text = delta?.content ?? "";
    this.text += text;
    if (text) this.said.append(text);
    const num_read = event.usage?.completion_tokens ?? this.num_read;
    if (num_read > this.num_read) this.note(num_read, Boolean(text));
    this.show();
  }

  private note(num_read: number, is_read: boolean): void {
    const now_ms = performance.now();
    if (this.num_read === 0) this.first_ms = now_ms;
    else if (is_read) this.felt.add(now_ms - this.read_ms, 1);
    this.state = "reading";
    this.num_read = num_read;
    this.read_ms = now_ms;
  }

  private show(): void {
    const num_there = Math.max(this.num_read, this.num_generated);
    const num_deposited = num_there - this.num_read;
    const parts = [this.state];
    if (this.num_read > 0) {
      parts.push(`first token after ${((this.first_ms - this.asked_ms) / 1e3).toFixed(2)} s`);
      parts.push(`${this.num_read} tokens`);
      const reading_s = (this.read_ms - this.first_ms) / 1e3;
      if (reading_s > 0.5) parts.push(`${((this.num_read - 1) / reading_s).toFixed(1)} tokens/s`);
      if (num_deposited > 0) parts.push(`${num_deposited} in deposit`);
    }
    say(this.facts, parts.join(" · "));
    const [delivered, deposit] = this.bar.children as unknown as [HTMLElement, HTMLElement];
    delivered.style.width = `${(100 * this.num_read) / Math.max(1, num_there)}%`;
    deposit.style.width = `${(100 * num_deposited) / Math.max(1, num_there)}%`;
    this.bar.setAttribute("aria-label", `${this.num_read} tokens here, ${num_deposited} in deposit`);
    this.element.dataset.state = this.state;
  }
}

function told(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
