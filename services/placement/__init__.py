"""Where each request's KV lives: snapshot and plan types, latency model, policies. Pure."""
