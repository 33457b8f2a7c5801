"""Where KV lives: the placement policies, as functions of a snapshot."""
