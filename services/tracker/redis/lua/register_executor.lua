-- Takes, renews or takes over a lease, and fails the live requests of older processes.
local stored = redis.call('HGET', LEASE, 'epoch')
if stored and tonumber(stored) > tonumber(call.epoch) then return 'STALE_EPOCH' end

redis.call('HSET', LEASE, 'epoch', call.epoch, 'expires_at_s', call.lease_expires_at_s,
  'address', call.address, 'model', call.model, 'load', call.load)
redis.call('PEXPIRE', LEASE, call.keep_ms)

for _, request_id in ipairs(redis.call('ZRANGEBYSCORE', INDEX, '(' .. call.now_s, '+inf')) do
  local record = read(request_id)
  if record and not call.ended[record.state] then
    local owner = tonumber(record.executor_epoch)
    if owner > 0 and owner < tonumber(call.epoch) then
      record.state = 'failed'
      write(request_id, record)
    end
  end
end
keep()
return 'OK'
