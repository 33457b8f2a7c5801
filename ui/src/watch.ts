// What the gateway passes on of its engines.

import { ApiError, call, events } from "./api";

export interface WatchedRequest {
  request_id: string;
  state: string;
  num_prompt_tokens: number;
  num_computed_tokens: number;
  num_generated_tokens: number;
  num_delivered_tokens: number;
  num_deposited_tokens: number;
  num_late_tokens: number;
  release_interval_s: number;
  residency: string; // a letter per layer group: R in the pool, O on the host, B on its way back
  late_cause: string | null;
  why: string;
  why_text: string;
}

export interface WatchedPrefix {
  request_ids: string[];
  num_tokens: number;
  residency: string;
}

export interface EngineUpdate {
  executor: string;
  is_connected: true;
  model: string;
  num_steps: number;
  observed_step_s: number;
  predicted_step_s: number | null;
  num_pool_blocks: number;
  num_free_pool_blocks: number;
  num_host_blocks: number;
  num_free_host_blocks: number;
  link_bytes_per_s: number | null;
  num_cached_tokens: number;
  tokens_per_step: number | null; // of a request, where drafts are made
  requests: WatchedRequest[];
  prefixes: WatchedPrefix[];
}

export type EngineNews = EngineUpdate | { executor: string; is_connected: false };

const UPDATES_PER_S = 10;
const RETRY_MS = 1_000;

/** Tell `hear` what engines do, and `lost` why nothing comes, until stopped. */
export function watch(
  hear: (news: EngineNews) => void,
  lost: (why: string) => void,
  updates_per_s = UPDATES_PER_S,
): () => void {
  const stop = new AbortController();
  const path = `/v1/evenflow/watch?max_updates_per_s=${updates_per_s}`;
  void follow(path, hear, lost, stop.signal);
  return () => stop.abort();
}

async function follow(
  path: string,
  hear: (news: EngineNews) => void,
  lost: (why: string) => void,
  signal: AbortSignal,
): Promise<void> {
  while (!signal.aborted) {
    try {
      for await (const data of events(await call(path, { signal }))) hear(JSON.parse(data));
      lost("The gateway is leaving.");
    } catch (error) {
      if (signal.aborted) return;
      lost(error instanceof ApiError ? error.message : "The gateway does not answer.");
    }
    await new Promise((resume) => setTimeout(resume, RETRY_MS));
  }
}

/** Return the share of tokens in time over requests with a pace; null without any. */
export function shareInTime(requests: WatchedRequest[]): number | null {
  let num_tokens = 0;
  let num_late = 0;
  for (const one of requests) {
    if (one.release_interval_s > 0 && one.num_generated_tokens > 1) {
      num_tokens += one.num_generated_tokens - 1;
      num_late += one.num_late_tokens;
    }
  }
  return num_tokens > 0 ? 1 - num_late / num_tokens : null;
}
