// Calls to the gateway that serves the page, with the reader's API key where it has one.

const KEY = "evenflow.key"; // for as long as the tab is open

export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly param = "", // the field at fault
  ) {
    super(message);
  }
}

export interface Model {
  id: string;
  max_model_len: number;
  parent: string | null;
}

let onKeyNeeded: () => void = () => {};

/** Have `ask` called whenever a call is refused for want of a good key. */
export function whenKeyIsNeeded(ask: () => void): void {
  onKeyNeeded = ask;
}

export function setKey(key: string): void {
  sessionStorage.setItem(KEY, key);
}

export function hasKey(): boolean {
  return sessionStorage.getItem(KEY) !== null;
}

/** Call the gateway. Throws ApiError for what is no success, and what `fetch` throws. */
export async function call(path: string, options: RequestInit = {}): Promise<Response> {
  const headers = new Headers(options.headers);
  const key = sessionStorage.getItem(KEY);
  if (key !== null) headers.set("authorization", `Bearer ${key}`);
  if (options.body !== undefined) headers.set("content-type", "application/json");
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  if (response.status === 401) onKeyNeeded();
  throw await refusal(response);
}

async function refusal(response: Response): Promise<ApiError> {
  try {
    const { error } = await response.json();
    return new ApiError(response.status, String(error.message), String(error.param ?? ""));
  } catch {
    return new ApiError(response.status, `${response.status} ${response.statusText}`);
  }
}

export async function models(): Promise<Model[]> {
  return (await (await call("/v1/models")).json()).data;
}

/** Yield the data of each server-sent event of a response, until it ends or is aborted. */
export async function* events(response: Response): AsyncGenerator<string> {
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop()!;
      for (const part of parts) {
        const lines = part.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length > 0) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}
