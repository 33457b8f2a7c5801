-- Takes or renews a lease.
local stored = redis.call('HGET', LEASE, 'epoch')
if stored and tonumber(stored) > tonumber(call.epoch) then return 'STALE_EPOCH' end

redis.call('HSET', LEASE, 'epoch', call.epoch, 'expires_at_s', call.lease_expires_at_s,
  'address', call.address, 'model', call.model, 'load', call.load)
redis.call('PEXPIRE', LEASE, call.keep_ms)
return 'OK'
