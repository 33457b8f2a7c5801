"""Where KV lives: snapshot and plan types, and the policies that map one to the other. Pure."""
