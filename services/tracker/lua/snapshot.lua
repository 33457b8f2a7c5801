-- Returns {id of the newest event, its seq, lease fields, {request id, its JSON, request id, its JSON, ...}}.
local last = redis.call('XREVRANGE', EVENTS, '+', '-', 'COUNT', 1)
local cursor = #last > 0 and {last[1][1], last[1][2][2]} or {'0-0', '0'}

local requests = {}
for _, request_id in ipairs(redis.call('ZRANGEBYSCORE', INDEX, '(' .. call.now_s, '+inf')) do
  table.insert(requests, request_id)
  table.insert(requests, redis.call('HGET', RECORDS, request_id))
end
return {cursor[1], cursor[2], redis.call('HGETALL', LEASE), requests}
