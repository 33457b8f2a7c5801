-- Records routed requests. Returns the ids of those that were not, as a newer one is known.
for _, request_id in ipairs(redis.call('ZRANGEBYSCORE', INDEX, '-inf', call.now_s, 'LIMIT', 0, 100)) do
  redis.call('HDEL', RECORDS, request_id)
  redis.call('ZREM', INDEX, request_id)
end

local lease = redis.call('HMGET', LEASE, 'epoch', 'expires_at_s')
local executor_epoch = lease[1] and tonumber(lease[2]) > now_s and lease[1] or '0'

local function owned(record)
  return record.gateway_id == call.gateway_id and tonumber(call.gateway_epoch) >= tonumber(record.gateway_epoch)
end

local stale = {}
for _, new in ipairs(call.registrations) do
  local known = read(new.request_id)
  local known_generation = known and tonumber(known.generation) or 0
  if known_generation > new.generation then
    table.insert(stale, new.request_id)
  elseif known_generation == new.generation then
    if owned(known) then
      known.gateway_epoch = call.gateway_epoch
      write(new.request_id, known)
    else
      table.insert(stale, new.request_id)
    end
  else
    write(new.request_id, {
      state = 'queued',
      generation = new.generation,
      gateway_id = call.gateway_id,
      gateway_epoch = call.gateway_epoch,
      executor_epoch = executor_epoch,
      num_prompt_tokens = new.num_prompt_tokens,
      service_level = new.service_level,
      registered_at_s = call.now_s,
      num_generated = 0,
      num_delivered = 0,
    })
  end
end
keep()
return stale
