// The page: its views, one at a time, the theme, and the API key.

import { ApiError, call, hasKey, setKey, whenKeyIsNeeded } from "./api";
import { find, make, say } from "./dom";
import { compareView } from "./compare";
import { engineView } from "./engine";
import { modelsView } from "./models";
import { playgroundView } from "./playground";
import { sizeView } from "./size";

const GLANCE_INTERVAL_MS = 2_000;
const THEME = "evenflow.theme";

/** Shows itself in an element until it is told to stop. */
export type View = (into: HTMLElement) => () => void;

const VIEWS: Record<string, View> = { Engine: engineView, Playground: playgroundView, Compare: compareView, Size: sizeView, Models: modelsView };

let stop: () => void = () => {};

function show(): void {
  const wanted = decodeURIComponent(location.hash.slice(1));
  const name = wanted in VIEWS ? wanted : Object.keys(VIEWS)[0]!;
  stop();
  const main = find<HTMLElement>("main");
  main.replaceChildren();
  for (const link of document.querySelectorAll("nav a")) {
    if (link.textContent === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  stop = VIEWS[name]!(main);
}

function askForKey(): void {
  stop();
  stop = () => {};
  const said = hasKey() ? "This API key is not known here." : "This gateway asks for an API key.";
  const input = make("input", { type: "password", id: "key", autocomplete: "off", required: true });
  const take = (event: Event): void => {
    event.preventDefault();
    setKey(input.value);
    show();
  };
  const label = make("label", { for: "key" }, said);
  const form = make("form", { class: "key", submit: take }, label, input, make("button", {}, "Use it"));
  find("main").replaceChildren(form);
  input.focus();
}

/** Say in the head whether the gateway answers, and has an executor. */
async function glance(): Promise<void> {
  const status = find("#gateway");
  try {
    await call("/ready");
    say(status, "ready");
  } catch (error) {
    say(status, error instanceof ApiError ? "no engine is connected" : "the gateway does not answer");
  }
  status.className = status.textContent === "ready" ? "good" : "bad";
  setTimeout(glance, GLANCE_INTERVAL_MS);
}

function setTheme(theme: string | null): void {
  if (theme === null) return;
  document.documentElement.dataset.theme = theme;
  dispatchEvent(new Event("themechange"));
}

function otherTheme(): string {
  const set = document.documentElement.dataset.theme;
  const isDark = set ? set === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  return isDark ? "light" : "dark";
}

setTheme(localStorage.getItem(THEME));
find("#theme").addEventListener("click", () => {
  const theme = otherTheme();
  localStorage.setItem(THEME, theme);
  setTheme(theme);
});
const links = Object.keys(VIEWS).map((name) => make("a", { href: `#${name}` }, name));
find("nav").append(...links);
whenKeyIsNeeded(askForKey);
addEventListener("hashchange", show);
show();
void glance();
