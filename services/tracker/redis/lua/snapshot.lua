-- Returns {lease fields, {request id, its JSON, request id, its JSON, ...}}.
local requests = {}
for _, request_id in ipairs(redis.call('ZRANGEBYSCORE', INDEX, '(' .. call.now_s, '+inf')) do
  table.insert(requests, request_id)
  table.insert(requests, redis.call('HGET', RECORDS, request_id))
end
return {redis.call('HGETALL', LEASE), requests}
