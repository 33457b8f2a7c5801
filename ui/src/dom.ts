// Elements, made and changed in place.

type Child = Node | string;
type Attributes = Record<string, string | number | boolean | ((event: Event) => void)>;

/** Return an element; a function among the attributes listens to the event of its name. */
export function make<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false) element.setAttribute(name, String(value));
  }
  element.append(...children);
  return element;
}

/** Set an element's text, unless it is there already: a change costs a layout. */
export function say(element: Element, text: string): void {
  if (element.textContent !== text) element.textContent = text;
}

/** Return the one element that a selector finds. */
export function find<T extends Element>(selector: string): T {
  const found = document.querySelector<T>(selector);
  if (found === null) throw new Error(`nothing is ${selector}`);
  return found;
}

/** Return the value of a colour of the style sheet in the theme of the moment. */
export function colour(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
