// `evenflow size` as a form: how many readers a GPU holds. The gateway has it worked out.

import { ApiError, call, models } from "./api";
import { make, say } from "./dom";

const DEVICES = ["a5000", "l4", "l40s", "a100", "h100", "h200"]; // suggestions: any name that `evenflow size` knows
const NUMBERS: [name: string, label: string, value: string][] = [
  ["context", "prompt, tokens", "8000"],
  ["answer", "answer, tokens", "1024"],
  ["reading_rate", "reading rate, tokens/s", "5"],
  ["attainment", "share that must be in time", "0.95"],
  ["ttft_s", "first token within, s", "30"],
  ["max_readers", "readers at most", "16"],
  ["gpus", "GPUs", "1"],
  ["host_gb", "host memory, GB", "256"],
  ["pool_tokens", "KV pool, tokens (0: what memory holds)", "0"],
];

export function sizeView(into: HTMLElement): () => void {
  const faults = new Map<string, HTMLElement>();
  const fields = new Map<string, HTMLInputElement>();
  const control = (name: string, text: string, field: HTMLElement): HTMLElement => {
    const fault = make("span", { class: "bad", id: `${name}-fault`, role: "alert" });
    faults.set(name, fault);
    field.id = name;
    field.setAttribute("aria-describedby", fault.id);
    return make("div", {}, make("label", { for: name }, text), field, fault);
  };
  const line = (name: string, text: string, value: string, more: Record<string, string> = {}): HTMLElement => {
    const field = make("input", { value, ...more });
    fields.set(name, field);
    return control(name, text, field);
  };
  const served = make("datalist", { id: "served" });
  const config = make("textarea", { rows: 4, spellcheck: "false" });
  const file = make("input", { type: "file", accept: ".json,application/json" });
  const ask = make("button", {}, "Size it");
  const note = make("p", { role: "status" });
  const rows = make("tbody");
  const form = make(
    "form",
    { class: "size", novalidate: true, submit },
    line("model", "model: one that is served here, or a name of evenflow size", "llama-3-8b", { list: "served" }),
    control("config", "or its config.json", config),
    control("file", "or that file", file),
    line("device", "device", "a5000", { list: "devices" }),
    line("link", "link (empty: the device's)", ""),
    line("policy", "policy", "evenflow"),
    ...NUMBERS.map(([name, text, value]) => line(name, text, value, { type: "number", step: "any", min: "0" })),
    ask,
  );
  const devices = make("datalist", { id: "devices" }, ...DEVICES.map((value) => make("option", { value })));
  into.append(make("h2", {}, "How many readers does a GPU hold?"), form, served, devices, note, make("div", { class: "scrolls" }, make("table", {}, rows)));
  const leaving = new AbortController();

  models()
    .then((all) => served.replaceChildren(...all.map((one) => make("option", { value: one.id }))))
    .catch(() => undefined); // a gateway without engines sizes all the same
  file.addEventListener("change", async () => {
    config.value = (await file.files?.[0]?.text()) ?? "";
  });

  /** Return what the form has. Throws SyntaxError if the config is no JSON. */
  function filled(): Record<string, unknown> {
    const asked: Record<string, unknown> = { config: config.value.trim() ? JSON.parse(config.value) : null };
    for (const [name, field] of fields) asked[name] = field.value.trim();
    return asked;
  }

  function fail(error: unknown): void {
    const fault = error instanceof SyntaxError ? faults.get("config") : faults.get(error instanceof ApiError ? error.param : "");
    const text = error instanceof Error ? error.message : String(error);
    say(fault ?? note, text);
    if (fault !== undefined) say(note, "");
  }

  async function submit(event: Event): Promise<void> {
    event.preventDefault();
    for (const fault of faults.values()) say(fault, "");
    rows.replaceChildren();
    ask.disabled = true;
    say(note, "Readers are simulated: seconds to minutes.");
    try {
      const body = JSON.stringify(filled());
      const answer = await call("/v1/evenflow/size", { method: "POST", body, signal: leaving.signal });
      const { said } = (await answer.json()) as { said: [string, string][] };
      rows.replaceChildren(...said.map(([word, sentence]) => make("tr", {}, make("th", { scope: "row" }, word), make("td", {}, sentence))));
      say(note, "");
    } catch (error) {
      fail(error);
    } finally {
      ask.disabled = false;
    }
  }

  return () => leaving.abort();
}
