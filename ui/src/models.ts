// What the gateway serves.

import { models } from "./api";
import { make } from "./dom";

const INTERVAL_MS = 2_000;

export function modelsView(into: HTMLElement): () => void {
  const rows = make("tbody");
  const head = make("tr", {}, ...["model", "context, tokens", "adapts"].map((n) => make("th", {}, n)));
  const note = make("p", { role: "status" });
  into.append(make("h2", {}, "Models"), make("table", {}, make("thead", {}, head), rows), note);
  let timer = 0;
  let isShown = true;

  async function refresh(): Promise<void> {
    try {
      const served = await models();
      const cells = (...texts: string[]) => texts.map((text) => make("td", {}, text));
      const all = served.map((one) =>
        make("tr", {}, ...cells(one.id, one.max_model_len.toLocaleString("en"), one.parent ?? "")),
      );
      rows.replaceChildren(...all);
      note.textContent = served.length > 0 ? "" : "No engine is connected.";
    } catch (error) {
      rows.replaceChildren();
      note.textContent = String(error instanceof Error ? error.message : error);
    }
    if (isShown) timer = window.setTimeout(refresh, INTERVAL_MS);
  }

  void refresh();
  return () => {
    isShown = false;
    clearTimeout(timer);
  };
}
