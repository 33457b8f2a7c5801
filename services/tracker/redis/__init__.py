"""The tracker's record in Redis: keys, codec, one Lua script per atomic step."""
