"""When tokens are due: Token-Deposit arithmetic, the reader model, attainment, causes. Pure."""
