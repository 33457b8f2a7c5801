-- Ends a lease now; its epoch stays as a fence against older processes.
local stored = redis.call('HGET', LEASE, 'epoch')
if not stored or tonumber(stored) < tonumber(call.epoch) then return 'OK' end
if tonumber(stored) > tonumber(call.epoch) then return 'STALE_EPOCH' end
redis.call('HSET', LEASE, 'expires_at_s', call.now_s)
return 'OK'
