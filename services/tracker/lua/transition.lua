-- Follows one edge of the state machine. Returns {status, state before}.
local refused = refusal(call.epoch)
if refused then return {refused, ''} end

local record = read(call.request_id)
if not record then return {'UNKNOWN_REQUEST', ''} end
if tonumber(record.executor_epoch) > tonumber(call.epoch) then return {'STALE_EPOCH', ''} end
if record.state ~= call.to and not call.edges[record.state][call.to] then
  return {'ILLEGAL_TRANSITION', record.state}
end

local before = record.state
record.state, record.executor_epoch = call.to, call.epoch
write(call.request_id, record)
keep()
return {'OK', before}
