"""One HTTP exchange: routes, server-sent events, the edge's limits."""
