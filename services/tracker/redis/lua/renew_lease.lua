-- Extends a held lease and stores the newest load.
local refused = refusal(call.epoch)
if refused then return refused end
redis.call('HSET', LEASE, 'expires_at_s', call.lease_expires_at_s, 'load', call.load)
redis.call('PEXPIRE', LEASE, call.keep_ms)
return 'OK'
