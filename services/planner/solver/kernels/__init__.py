"""Search kernels, compiled. They see arrays only; `search` and `relaxation` give them meaning."""
