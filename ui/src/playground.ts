// A conversation at its reader's pace, and the same prompt unpaced beside it.

import { Answer, type Asked } from "./answer";
import { models } from "./api";
import { make, say } from "./dom";
import { watch } from "./watch";

const UPDATES_PER_S = 20;
const NO_BOUND = "none";

interface Turn {
  role: string;
  content: string;
}

interface Slider {
  element: HTMLElement;
  value(): number;
}

function slider(id: string, name: string, range: [number, number, number], text: (value: number) => string): Slider {
  const [min, max, value] = range;
  const input = make("input", { type: "range", id, min, max, value, step: 1 });
  const shown = make("output", { for: id }, text(value));
  input.addEventListener("input", () => say(shown, text(Number(input.value))));
  const element = make("div", { class: "slider" }, make("label", { for: id }, name), input, shown);
  return { element, value: () => Number(input.value) };
}

export function playgroundView(into: HTMLElement): () => void {
  const messages: Turn[] = [];
  let running: Answer[] = [];
  const pace = slider("pace", "pace", [1, 60, 8], (value) => `${value} tokens/s`);
  const slo = slider("slo", "largest gap", [0, 40, 0], (value) =>
    value > 0 ? `${25 * value} ms` : NO_BOUND,
  );
  const model = make("select", { id: "model", "aria-label": "model" });
  const prompt = make("textarea", { id: "prompt", rows: 3, required: true, "aria-label": "prompt" });
  const most = make("input", { id: "most", type: "number", min: 1, value: 300 });
  const beside = make("input", { id: "beside", type: "checkbox", checked: true });
  const ask = make("button", {}, "Ask");
  const stop = make("button", { type: "button", disabled: true }, "Stop");
  const anew = make("button", { type: "button" }, "New conversation");
  const note = make("p", { role: "status", class: "bad" });
  const turns = make("div", { class: "turns", "aria-live": "off" });
  const form = make(
    "form",
    { class: "ask" },
    model,
    pace.element,
    slo.element,
    prompt,
    make(
      "div",
      { class: "buttons" },
      ask,
      stop,
      anew,
      make("label", { for: "most" }, "tokens at most ", most),
      make("label", { for: "beside" }, beside, " unpaced beside it"),
    ),
  );
  into.append(form, note, turns);
  void models().then(
    (served) => model.append(...served.map((one) => make("option", {}, one.id))),
    (error) => say(note, String(error.message)),
  );

  const stated = () => ({
    consumption_rate_tps: pace.value(),
    slo_tbt_ms: 25 * slo.value(),
  });
  const repace = () => {
    for (const answer of running) void answer.repace(stated());
  };
  for (const { element } of [pace, slo]) element.addEventListener("change", repace);

  async function run(): Promise<void> {
    const turn = { role: "user", content: prompt.value };
    const asked: Asked = { model: model.value, messages: [...messages, turn], max_tokens: Number(most.value) };
    const { slo_tbt_ms, ...rest } = stated();
    const paced = new Answer("paced", { ...rest, ...(slo_tbt_ms > 0 ? { slo_tbt_ms } : {}), pace_tail: true });
    const others = beside.checked ? [new Answer("unpaced", null)] : [];
    const answers = [paced, ...others];
    const columns = make("div", { class: "answers" }, ...answers.map((answer) => answer.element));
    turns.prepend(make("article", {}, make("p", { class: "question" }, turn.content), columns));
    running = answers;
    ask.disabled = true;
    stop.disabled = false;
    say(note, "");
    const stopWatch = watch(
      (news) => {
        if (news.is_connected) for (const answer of answers) answer.observe(news.requests);
      },
      () => {},
      UPDATES_PER_S,
    );
    await Promise.all(answers.map((answer) => answer.ask(asked)));
    stopWatch();
    running = [];
    ask.disabled = false;
    stop.disabled = true;
    if (paced.text) messages.push(turn, { role: "assistant", content: paced.text });
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running.length === 0) void run();
  });
  const stopAll = () => running.forEach((answer) => answer.stop());
  stop.addEventListener("click", stopAll);
  anew.addEventListener("click", () => {
    stopAll();
    messages.length = 0;
    turns.replaceChildren();
  });
  return stopAll;
}
